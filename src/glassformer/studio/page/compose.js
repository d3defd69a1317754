// A model while it is composed: the drawing whose boxes are buttons, the choices of a box, the figures and the exports.
import { ask, blocks, drawing, h, how, region, remember, t, table } from "./dom.js";

export function compose(main, query) {
  let expression = query.get("e") ?? "llama@10m";
  let axes = null;
  let timer = 0;
  const past = [];
  const bar = h("input", { type: "text", id: "expression", value: expression, spellcheck: "false", autocomplete: "off", autocapitalize: "off" });
  const base = h("input", { type: "text", id: "base", value: query.get("base") ?? "", spellcheck: "false", autocomplete: "off", placeholder: "gpt2" });
  const undo = h("button", { type: "button", disabled: true, onclick: () => past.length && take(past.pop(), false) }, t("undo"));
  const picture = region(t("drawing")), options = region(t("choices")), figures = region(t("parameters"));
  const exports = region(t("exports")), costs = region(t("cost"));

  /** Goes to another expression. */
  function take(next, keep = true) {
    if (keep && next !== expression) past.push(expression);
    undo.disabled = !past.length;
    expression = next;
    bar.value = next;
    remember({ e: next, base: base.value.trim() }, keep);
    refresh();
  }

  async function refresh() {
    const body = { expression, ...(base.value.trim() ? { base: base.value.trim() } : {}) };
    const found = await picture.show((signal) => ask("/api/compose", body, signal), (one) => [
      ...one.notes.map((note) => h("p", { class: "note" }, note)), ...clickable(one)]);
    if (!found) return;
    figures.show(async () => found, (one) => [
      ...one.summary.map((line) => h("p", {}, line)), ...blocks(one.components, t("parameters")),
      h("p", { class: "quiet" }, Object.entries(one.symbols).map(([letter, value]) => `${letter} = ${value}`).join(", ")),
      ...(one.ideas.length ? [h("h3", {}, t("differ", { a: expression, b: base.value })),
        table({ headings: [t("part"), expression, base.value, t("change")], rows: one.ideas.map((x) => [x.part, x.first, x.second, x.change]) })] : []),
      how(one)]);
    choose(axes ?? { title: t("whole-model"), axes: found.around });
    cost();
    load();
  }

  /** Tries the families of published classes, which takes seconds, once somebody wants to know. */
  function load() {
    if (tools.open) exports.show((signal) => ask("/api/exports", { expression }, signal), (one) => [...blocks(one.exports, t("exports")), how(one)]);
  }

  /** The drawing with its boxes as buttons: one stop of the Tab key, arrows go from box to box. */
  function clickable(found) {
    const holder = drawing(found.drawing);
    const boxes = [...holder.querySelectorAll("[data-place]")];
    boxes.forEach((box, i) => {
      const place = box.dataset.place.split(".");
      const label = box.querySelector("title")?.textContent ?? box.textContent ?? place.at(-1);
      box.setAttribute("role", "button");
      box.setAttribute("tabindex", i ? "-1" : "0");
      box.setAttribute("aria-label", `${t(`place-${place.at(-1)}`)}: ${label || place.at(-1)}`);
      const open = () => choose({ title: label, axes: found.places[place.at(-1)] }, true);
      box.addEventListener("click", open);
      box.addEventListener("keydown", (event) => {
        const step = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1 }[event.key];
        if (event.key === "Enter" || event.key === " ") open();
        else if (step) {
          const next = boxes[(i + step + boxes.length) % boxes.length];
          box.setAttribute("tabindex", "-1");
          next.setAttribute("tabindex", "0");
          next.focus();
        } else return;
        event.preventDefault();
      });
    });
    return [h("p", { class: "quiet" }, t("click-box")), holder];
  }

  /** Opens the axes of a place. */
  async function choose(place, focus = false) {
    axes = place;
    const asked = place.axes[0] && (place.open ?? place.axes[0]);
    const found = await options.show((signal) => ask("/api/choices", { expression, axis: asked }, signal), (one) => [
      h("h2", { tabindex: "-1" }, place.title),
      h("p", { class: "tabs", role: "group", "aria-label": t("axes") }, ...place.axes.map((axis) => h("button", {
        type: "button", "aria-pressed": String(axis === asked), onclick: () => choose({ ...place, open: axis }) }, t(`axis-${axis}`)))),
      h("ul", { class: "choices" }, ...one.choices.map(choice))]);
    if (found && focus) options.element.querySelector("h2").focus();
  }

  function choice(one) {
    const value = one.takes_value ? h("input", { type: "text", value: one.value, size: "8", placeholder: one.example, "aria-label": t("value-of", { word: one.word }) }) : null;
    const put = async () => {
      const change = value && value.value.trim() ? `${one.word}:${value.value.trim()}` : one.word;
      try {
        take(one.expression ?? (await ask("/api/change", { expression, change })).expression);
      } catch (problem) {
        said.textContent = problem.message;
      }
    };
    const said = h("p", { class: "refused", role: "alert" }, one.refused ?? "");
    return h("li", { class: one.current ? "choice current" : "choice" },
      h("div", { class: "line" },
        h("button", { type: "button", disabled: Boolean(one.refused) && !one.takes_value, "aria-pressed": String(one.current), onclick: put }, one.word), value,
        one.refused ? null : h("dl", { class: "effect" }, ...["parameters", "flops", "state"].map((name) => h("div", {},
          h("dt", {}, t(`short-${name}`)),
          h("dd", {}, one[name].after, " ", h("b", { class: one[name].grows ? "more" : "less" }, one[name].share)))))),
      one.refused || one.takes_value ? said : null,
      one.dropped?.length ? h("p", { class: "note" }, t("drops", { changes: one.dropped.map((x) => `+${x}`).join(" ") })) : null,
      one.meaning ? h("details", {}, h("summary", {}, t("what-is", { word: one.word })), h("p", {}, one.meaning), one.formula ? h("code", {}, one.formula) : null) : null);
  }

  // What would it cost

  const form = h("form", { class: "options", onsubmit: (event) => { event.preventDefault(); cost(); }, onchange: () => cost() },
    pick("work", ["generate", "train"], (name) => t(`work-${name}`)),
    pick("machine", ["", "h100", "h100:8", "h200:8", "a100-80gb", "a100-80gb:8", "l40s"], (name) => name || t("no-machine")),
    field("batch", "number"), field("context", "number"),
    pick("weights", ["", "float32", "bfloat16", "int8", "int4"], (name) => name || t("usual")));

  function pick(name, values, label) {
    return h("label", {}, t(`option-${name}`), h("select", { name }, ...values.map((one) => h("option", { value: one }, label(one)))));
  }

  function field(name, type) {
    return h("label", {}, t(`option-${name}`), h("input", { name, type, min: "1", step: "1", size: "8" }));
  }

  function cost() {
    const given = Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
    const body = { expression, train: given.work === "train" };
    for (const name of ["machine", "weights"]) if (given[name]) body[name] = given[name];
    for (const name of ["batch", "context"]) if (given[name]) body[name] = Number(given[name]);
    return costs.show((signal) => ask("/api/cost", body, signal), (one) => [...blocks(one.costs, t("cost")), how(one)]);
  }

  const tools = h("details", { ontoggle: load }, h("summary", {}, t("exports")), exports.element);

  function typed() {
    clearTimeout(timer);
    timer = setTimeout(() => { if (bar.value.trim() !== expression || base.value !== (query.get("base") ?? "")) take(bar.value.trim()); }, 600);
  }
  bar.addEventListener("input", typed);
  bar.addEventListener("keydown", (event) => { if (event.key === "Enter") { clearTimeout(timer); take(bar.value.trim()); } });
  base.addEventListener("change", () => take(bar.value.trim()));
  main.append(h("h1", {}, t("compose")), h("p", { class: "lead" }, t("compose-lead")),
    h("div", { class: "bar" }, h("label", { for: "expression" }, t("expression")), bar, undo,
      h("label", { for: "base" }, t("base")), base),
    h("div", { class: "columns" },
      h("section", { class: "drawn" }, picture.element),
      h("section", {}, options.element),
      h("section", {}, h("h2", {}, t("parameters")), figures.element, h("h2", {}, t("cost")), form, costs.element,
        tools)));
  refresh();
}
