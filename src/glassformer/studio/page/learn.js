// A forward pass in steps: every number is the library's, and the line below a number shows how it is made.
import { ask, h, how, models as models_, place, region, remember, t, words } from "./dom.js";
import { matrix } from "./numbers.js";

export async function learn(main, query) {
  const at = (query.get("step") ?? "").split(".");
  const three = chapter("three", async () => ({ chapter: "three" }), (found) => [
    h("p", {}, t("three-lead")), h("p", { class: "note" }, t("three-wrong", found))]);
  const sentence = h("input", { type: "text", id: "toy-words", value: query.get("words") ?? "the cat sat on", maxlength: "200", spellcheck: "false" });
  const toy = chapter("toy", async () => ({ chapter: "toy", text: sentence.value }), (found) => h("p", {}, t("toy-lead", found)));
  const model = h("input", { type: "text", id: "walk-model", list: "models", value: query.get("model") ?? "", spellcheck: "false", autocomplete: "off" });
  const models = h("datalist", { id: "models" }), labels = new Map();
  const label = () => labels.get(model.value.trim()) ?? model.value;
  const text = h("input", { type: "text", id: "walk-text", value: query.get("text") ?? "The cat sat on the", maxlength: "2000" });
  const layer = number("layer"), head = number("head");
  const chosen = chapter("model", async () => ({ chapter: "model", model: model.value, text: text.value, layer: Number(layer.value), head: Number(head.value) }), (found) => [
    h("p", {}, t("is-model", { ...found, model: label(), layer: layer.value })),
    found.trained ? null : h("p", { class: "note" }, t("untrained", { model: label() })),
    found.about.what ? h("p", { class: "quiet", lang: "en" }, found.about.what, found.about.formula ? [" ", h("code", {}, found.about.formula)] : null) : null]);

  function number(name) {
    return h("input", { type: "number", id: `walk-${name}`, min: "0", max: "10000", value: query.get(name) ?? "0" });
  }

  /** A chapter: its introduction, its steps, and the step that is open. */
  function chapter(name, body, lead) {
    const shown = region(t(`chapter-${name}`));
    let open = at[0] === name ? Number(at[1]) || 0 : 0;
    const show = () => shown.show(async (signal) => ask("/api/learn", await body(), signal), (found) => {
      const { steps } = found, detail = h("div", { class: "step" });
      const buttons = steps.map((step, i) => h("button", {
        type: "button", tabindex: "-1", onclick: () => go(i), onkeydown: (event) => {
          const next = { ArrowDown: i + 1, ArrowRight: i + 1, ArrowUp: i - 1, ArrowLeft: i - 1, Home: 0, End: steps.length - 1 }[event.key];
          if (next === undefined) return;
          event.preventDefault();
          if (steps[next]) { go(next); buttons[next].focus(); }
        },
      }, `${i + 1}. ${title(step)}`));
      function go(i, keep = true) {
        open = i;
        buttons.forEach((one, j) => {
          j === i ? one.setAttribute("aria-current", "step") : one.removeAttribute("aria-current");
          one.setAttribute("tabindex", j === i ? "0" : "-1");
        });
        requestAnimationFrame(() => detail.previousSibling.scrollTo({ left: buttons[i].offsetLeft - 12 })); // one line on a phone
        if (keep) remember({ step: `${name}.${i}` });
        const move = (label, to) => h("button", { type: "button", disabled: !steps[to], onclick: () => { go(to); detail.querySelector("h3").focus(); } }, t(label));
        detail.replaceChildren(...view(steps[i]), h("p", { class: "moves" }, move("before", i - 1), " ", move("after", i + 1)));
      }
      go(Math.min(open, steps.length - 1), false);
      return [...[lead(found)].flat().filter(Boolean), h("div", { class: "walk" },
        h("ol", { class: "steps", "aria-label": t("steps") }, ...buttons.map((one) => h("li", {}, one))), detail), how(found)];
    });
    return { element: shown.element, show };
  }

  const form = (go, ...fields) => h("form", { class: "options", onsubmit: (event) => { event.preventDefault(); go(); } }, ...fields, h("button", {}, t("walk")));
  const field = (words, input) => h("label", {}, words, input);
  main.append(h("h1", {}, t("learn")), h("p", { class: "lead" }, t("learn-lead")),
    h("h2", { id: "three" }, t("chapter-three")), three.element,
    h("h2", { id: "toy" }, t("chapter-toy")),
    form(() => { remember({ words: sentence.value }); toy.show(); }, field(t("toy-text", { words: "the cat sat on a mat dog ." }), sentence)), toy.element,
    h("h2", { id: "model" }, t("chapter-model")), h("p", {}, t("model-lead")), models,
    form(() => { remember({ model: model.value, text: text.value, layer: layer.value, head: head.value }); chosen.show(); },
      field(t("model"), model), field(t("text"), text), field(t("layer"), layer), field(t("head"), head)), chosen.element);
  await three.show();
  await toy.show();
  try {
    const found = await ask(models_(query.get("model")));
    for (const one of found.listed) labels.set(one.name, one.label);
    models.replaceChildren(...found.listed.map((one) => h("option", { value: one.name, label: one.label })));
    model.value ||= found.models[0] ?? "llama@1m";
  } catch {
    model.value ||= "llama@1m";
  }
  if (place().name !== "learn") return;
  await chosen.show();
  if (at[0] && at[0] !== "three") document.getElementById(at[0])?.scrollIntoView();
}

/** The words of a step; its name in the library if there are none. */
function title(step) {
  const name = words[`walk-${step.key}`] ?? step.key;
  return [name, step.part ? `(${step.part})` : "", step.masked && step.key !== "mask" ? `· ${t("with-mask")}` : ""].filter(Boolean).join(" ");
}

function view(step) {
  const why = words[`why-${step.key}`];
  return [h("h3", { tabindex: "-1" }, title(step)), why ? h("p", {}, why) : null,
    h("p", { class: "formula" }, step.formula ? h("code", {}, step.formula) : null, " ", h("span", { class: "quiet" }, t("shape-is", step), ` · ${step.place}`)),
    ...step.tables.map((one) => product(step, one))].filter(Boolean);
}

/** A table of numbers with its factors before it; choosing a number marks its row and its column in them. */
function product(step, one) {
  const name = one.head === null ? title(step) : `${title(step)}, ${t("of-head", one)}`;
  const said = h("output", { class: "worked", "aria-live": "polite" });
  const factors = one.factors.map((factor) => matrix(factor, factor.name));
  const result = matrix(one, name, (row, column) => {
    factors[0]?.mark(row, null);
    factors[1]?.mark(null, column);
    const line = one.worked[row]?.[column];
    said.replaceChildren(h("span", { class: "quiet" }, `[${one.rows[row].trim()}, ${one.columns[column].trim()}] `), line ? h("code", {}, line) : t("no-arithmetic"));
  });
  result.choose(one.rows.length - 1, 0);
  return h("div", { class: "product" },
    one.head === null ? null : h("p", { class: "of-head" }, t("of-head", one)),
    h("div", { class: "equation" }, ...(factors.length ? [factors[0].element, h("span", { class: "sign" }, "×"), factors[1].element, h("span", { class: "sign" }, "=")] : []), result.element), said);
}
