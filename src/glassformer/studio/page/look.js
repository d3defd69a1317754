// A model while it reads a text: the lens's own page in a frame, and components that are removed by a click.
import { ask, framed, h, how, listed, models as models_, region, refusal, remember, t, visible } from "./dom.js";
import { patch, states } from "./inside.js";
import { watch } from "./watch.js";

export async function look(main, query) {
  const removed = new Set((query.get("without") ?? "").split(" ").filter(Boolean));
  const models = h("select", { id: "model", onchange: () => read() });
  const text = h("textarea", { id: "text", rows: "3", maxlength: "20000" });
  text.value = query.get("text") ?? t("look-example");
  const answers = region(t("answers")), parts = region(t("components")), frame = region(t("inside"));
  let known = { words: [], layers: [], generates: false, model: "", text: "" };
  const about = () => known;
  const opened = new Set((query.get("open") ?? "").split(" ").filter(Boolean));
  const panels = Object.entries({ watch: watch(about), patch: patch(about), states: states(about) }).map(([name, panel]) => {
    const element = h("details", { class: "panel", open: opened.has(name), ontoggle: () => {
      element.open ? opened.add(name) : opened.delete(name);
      remember({ open: [...opened].join(" ") });
      if (element.open && known.words.length) panel.start?.();
    } }, h("summary", {}, t(name)), panel.element);
    return { ...panel, element };
  });
  const clear = h("button", { type: "button", onclick: () => { removed.clear(); read(); } }, t("restore"));

  async function read() {
    remember({ model: models.value, text: text.value, without: [...removed].join(" ") });
    clear.disabled = !removed.size;
    const body = { model: models.value, text: text.value, ablate: [...removed] };
    const found = await answers.show((signal) => ask("/api/look", body, signal), (one) => [
      h("table", {}, h("thead", {}, h("tr", {}, h("td"), ...one.answers.map((answer) => h("th", { scope: "col" }, answer.name)))),
        h("tbody", {}, h("tr", {}, h("th", { scope: "row" }, t("loss")), ...one.answers.map((answer) => h("td", {}, `${answer.loss} ${t("nats")}`))),
          ...one.answers[0].next.map((_, i) => h("tr", {}, h("th", { scope: "row" }, t("guess", { n: i + 1 })),
            ...one.answers.map((answer) => h("td", {}, answer.next[i] ? [h("code", {}, visible(answer.next[i].word)), ` ${answer.next[i].probability}`] : "")))))),
      how(one)]);
    if (!found) return;
    const same = known.model === body.model && known.text === body.text;
    known = { ...found, layers: found.layers.filter((one) => one.heads.length).map((one) => one.layer), model: body.model, text: body.text };
    for (const panel of same ? [] : panels) {
      panel.element.hidden = !panel.usable();
      panel.reset();
      if (panel.element.open && !panel.element.hidden) panel.start?.();
    }
    parts.element.replaceChildren(...components(found.layers));
    frame.element.replaceChildren(framed(`/api/pages/${found.page}`, t("inside")));
  }

  /** A row for each layer with buttons that remove its heads, its mixer and its feed-forward network. */
  function components(layers) {
    return [h("p", { class: "quiet" }, t("remove-hint")),
      h("p", { class: "chips" }, ...["first", "before", "itself", "other"].map((kind) => h("span", { class: `part head ${kind}` }, t(`head-${kind}`)))), h("div", { class: "scroll", role: "group", tabindex: "0", "aria-label": t("components") },
      h("table", { class: "parts" }, h("thead", {}, h("tr", {}, ...["layer", "heads", "mixer", "ffn"].map((key) => h("th", { scope: "col" }, t(`col-${key}`))))),
        h("tbody", {}, ...[...layers].reverse().map((one) => h("tr", {}, h("th", { scope: "row" }, one.layer),
          h("td", {}, one.heads.map((head) => toggle(`layers.${one.layer}.heads.${head.head}`, String(head.head), `${t(`head-${head.what || "spread"}`)}; ${t("entropy", { value: head.entropy })}`, head.what))),
          h("td", {}, toggle(`layers.${one.layer}.mixer`, one.mixer, "")),
          h("td", {}, one.ffn ? toggle(`layers.${one.layer}.ffn`, t("col-ffn"), "") : null))))))];
  }

  function toggle(name, words, title, kind) {
    return h("button", {
      type: "button", class: kind ? `head ${kind}` : "head", title: `${name} ${title}`.trim(), "aria-label": `${name} ${title}`.trim(), "aria-pressed": String(removed.has(name)),
      onclick: async (event) => {
        removed.has(name) ? removed.delete(name) : removed.add(name);
        event.currentTarget.setAttribute("aria-pressed", String(removed.has(name)));
        await read();
        parts.element.querySelector(`[title^="${name} "], [title="${name}"]`)?.focus();
      },
    }, words);
  }

  main.append(h("h1", {}, t("look")), h("p", { class: "lead" }, t("look-lead")),
    h("div", { class: "options" }, h("label", { for: "model" }, t("model"), models)),
    h("label", { for: "text" }, t("prompt")), text, h("p", {}, h("button", { type: "button", onclick: () => read() }, t("read")), " ", clear),
    h("div", { class: "columns two" }, h("section", {}, h("h2", {}, t("answers")), answers.element), h("section", {}, h("h2", {}, t("components")), parts.element)),
    ...panels.map((one) => one.element), h("h2", {}, t("inside")), frame.element);
  try {
    const found = await ask(models_(query.get("model")));
    models.replaceChildren(...listed(found.listed, query.get("model")));
    if (found.models.length) await read();
    else answers.element.append(h("p", {}, t("no-models")));
  } catch (problem) {
    answers.element.replaceChildren(refusal(problem));
  }
}
