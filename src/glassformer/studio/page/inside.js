// Values of one text put into another, states of mixers without attention, and the experts of each token.
import { ask, h, how, region, t, visible } from "./dom.js";
import { matrix, shade } from "./numbers.js";

const SITES = ["resid_pre", "mixer.out", "ffn.out"];

/** Places of a text whose values are put into another text by a click; `about()` returns the model and its text. */
export function patch(about) {
  const other = h("input", { type: "text", id: "other", maxlength: "2000" });
  const site = h("select", { id: "site", onchange: () => { places.clear(); tried = null; read(); } }, ...SITES.map((one) => h("option", { value: one }, t(`site-${one}`))));
  const answers = region(t("patched")), grid = h("div", { class: "scroll", role: "group", "aria-label": t("patch") });
  const places = new Set();
  let tried = null;

  async function read(every = false, focus = "") {
    const { model, text } = about();
    const body = { model, text, other: other.value, site: site.value, every, places: [...places].map((one) => one.split(".").map(Number)) };
    const found = await answers.show((signal) => ask("/api/patch", body, signal), (one) => [
      h("div", { class: "scroll", role: "group", tabindex: "0", "aria-label": t("answers") }, h("table", {},
        h("thead", {}, h("tr", {}, ...[t("first-text"), t("other-text"), t("patched")].slice(0, one.answers.length).map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, ...one.answers[0].map((_, i) => h("tr", {}, ...one.answers.map((answer) => h("td", {}, answer[i] ? [h("code", {}, visible(answer[i].word)), ` ${answer[i].probability}`] : ""))))))),
      one.answers.length > 2 ? h("p", { role: "status" }, one.restored ? t("restored", { share: one.restored }) : t("no-share")) : null,
      how(one)]);
    if (!found) return;
    if (found.every) tried = found.every;
    grid.replaceChildren(...[tried ? h("p", { class: "quiet" }, t("shares-are")) : null, table(found)].filter(Boolean));
    if (focus) grid.querySelector(`[data-place="${focus}"]`)?.focus();
  }

  function table(found) {
    const cells = [];
    const rows = Array.from({ length: found.layers }, (_, i) => found.layers - 1 - i);
    const one = (layer, at) => {
      const name = `${layer}.${at}`, column = tried ? at - tried.first : -1;
      const button = h("button", {
        type: "button", "data-place": name, tabindex: "-1", "aria-pressed": String(places.has(name)),
        class: column >= 0 ? shade(tried.levels[layer][column]) : null,
        "aria-label": t("place", { layer, token: found.words[at] }),
        onclick: () => { places.has(name) ? places.delete(name) : places.add(name); read(false, name); },
        onkeydown: (event) => {
          const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
          if (!step) return;
          event.preventDefault();
          const next = cells[rows.indexOf(layer) + step[0]]?.[at + step[1]];
          if (!next) return;
          button.setAttribute("tabindex", "-1");
          next.setAttribute("tabindex", "0");
          next.focus();
        },
      }, column >= 0 ? tried.texts[layer][column] : "·");
      return button;
    };
    rows.forEach((layer) => cells.push(found.words.map((_, at) => one(layer, at))));
    cells[0]?.at(-1)?.setAttribute("tabindex", "0");
    return h("table", { class: "places" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("layer")), ...found.words.map((word, at) => h("th", { scope: "col", class: found.differ[at] ? "differs" : null }, word, found.differ[at] ? h("small", {}, ` ≠ ${found.other[at]}`) : null)))),
      h("tbody", {}, ...cells.map((row, i) => h("tr", {}, h("th", { scope: "row" }, rows[i]), ...row.map((button) => h("td", {}, button))))));
  }

  const element = h("div", {}, h("p", { class: "quiet" }, t("patch-lead")),
    h("form", { class: "options", onsubmit: (event) => { event.preventDefault(); places.clear(); tried = null; read(); } },
      h("label", {}, t("other-text"), other), h("label", {}, t("site"), site), h("button", {}, t("read")),
      h("button", { type: "button", onclick: () => read(true) }, t("try-every")),
      h("button", { type: "button", onclick: () => { places.clear(); read(); } }, t("restore"))),
    answers.element, grid);
  return {
    element, usable: () => about().generates,
    reset() {
      places.clear();
      tried = null;
      answers.element.replaceChildren();
      grid.replaceChildren();
      if (!other.value && about().text === t("look-example")) other.value = t("look-other");
    },
    start: () => other.value && read(),
  };
}

/** States after each token, and the experts of each token. */
export function states(about) {
  const shown = region(t("states"));

  function read(layer) {
    const { model, text } = about();
    return shown.show((signal) => ask("/api/states", { model, text, ...(layer === undefined ? {} : { layer }) }, signal), (found) => [
      found.states || found.experts ? null : h("p", {}, t("no-states")),
      found.experts ? [h("h3", {}, t("experts-of", found.experts)), chooser(found.experts, read),
        h("p", { class: "quiet" }, t("experts-lead")), matrix(found.experts.weights, t("experts-weights")).element,
        matrix(found.experts.load, t("experts-load")).element,
        h("details", {}, h("summary", {}, t("in-words")), ...found.experts.told.map((line) => h("p", {}, line)))] : null,
      found.states ? [h("h3", {}, t("states-of", found.states)), chooser(found.states, read), h("p", { class: "quiet" }, t("states-lead")),
        matrix(found.states.sizes, t("states-sizes")).element,
        ...found.states.tensors.map((one) => matrix(one, t("states-tensor", one)).element)] : null,
      how(found)].flat().filter(Boolean));
  }

  return { element: h("div", {}, shown.element), usable: () => true, reset: () => shown.element.replaceChildren(), start: () => read() };
}

function chooser(found, read) {
  return h("p", {}, h("label", {}, t("layer"), " ", h("select", { onchange: (event) => read(Number(event.target.value)) },
    ...found.layers.map((one) => h("option", { value: one, selected: one === found.layer }, one)))));
}
