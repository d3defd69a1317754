// The attention of a model while it writes: each new token with the tokens that a head read for it.
import { h, Refusal, refusal, t } from "./dom.js";
import { events } from "./chat.js";

const NEW = 16, KEYS = 32;
/** Tokens that are written, and the strongest keys of a head that are sent for each. */

/** `about()` returns the model, its text, its words and the layers with heads. */
export function watch(about) {
  const layers = h("select", { id: "watch-layer", onchange: () => start() }), heads = h("p", { class: "tabs", role: "group", "aria-label": t("col-heads") });
  const strip = h("div", { class: "tokens", role: "group", "aria-label": t("writes") }), said = h("p", { role: "status" });
  const write = h("button", { type: "button", onclick: () => start() }, t("write-on")), stop = h("button", { type: "button", disabled: true, onclick: () => running?.abort() }, t("stop"));
  let words = [], written = [], head = 0, shown = -1, running = null;

  async function start() {
    running?.abort();
    const mine = (running = new AbortController());
    const one = about();
    [words, written, shown, stop.disabled] = [one.words, [], -1, false];
    said.replaceChildren();
    draw();
    const site = `layers.${layers.value}.mixer.pattern`;
    try {
      const response = await fetch("/v1/completions", {
        method: "POST", signal: mine.signal, headers: { "content-type": "application/json", "x-glassformer": "1" },
        body: JSON.stringify({ model: one.model, prompt: one.text, stream: true, temperature: 0, max_tokens: NEW, glass: { sites: [site], top: KEYS } }),
      });
      if (!response.ok) throw new Refusal((await response.json()).error.message);
      for await (const event of events(response.body)) {
        if (event.error) throw new Refusal(event.error.message);
        for (const token of event.choices?.[0]?.glass ?? []) written.push({ word: token.token, rows: token.sites[site].top });
        if (written.length) choose(written.length - 1);
      }
    } catch (problem) {
      if (problem.name !== "AbortError") said.replaceChildren(refusal(problem));
    } finally {
      if (running === mine) stop.disabled = true;
    }
  }

  function choose(at) {
    shown = at;
    draw();
  }

  /** The text so far; tokens are shaded by the weight that the chosen head gave them for the chosen new token. */
  function draw() {
    const rows = written[shown]?.rows ?? [];
    head = Math.min(head, Math.max(0, rows.length - 1));
    const weights = new Map(rows[head] ?? []);
    heads.replaceChildren(...rows.map((_, i) => h("button", { type: "button", class: "head", "aria-pressed": String(i === head), "aria-label": t("of-head", { head: i }), onclick: () => { head = i; draw(); heads.children[i].focus(); } }, i)));
    const focused = strip.contains(document.activeElement);
    const all = [...words, ...written.map((one) => one.word)];
    strip.replaceChildren(...all.map((word, i) => {
      const at = i - words.length, level = Math.ceil(6 * (weights.get(i) ?? 0) - 0.2);
      const name = `token${level > 0 ? ` above${level}` : ""}${at >= 0 && at === shown ? " chosen" : ""}`;
      if (at < 0) return h("span", { class: name }, word);
      return h("span", {
        class: name, role: "button", "aria-label": word.trim() ? null : `${t("token")} ${i + 1}`, tabindex: at === shown ? "0" : "-1", "aria-pressed": String(at === shown), onclick: () => choose(at),
        onkeydown: (event) => {
          const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
          if (!step || !written[at + step]) return;
          event.preventDefault();
          choose(at + step);
          strip.querySelector(".chosen").focus();
        },
      }, word);
    }));
    if (focused) strip.querySelector(".chosen")?.focus();
    if (shown < 0) return;
    const best = (rows[head] ?? []).slice(0, 5).map(([key, weight]) => `${(all[key] ?? key).trim() || "␣"} ${(100 * weight).toFixed(0)} %`);
    said.replaceChildren(t("head-reads", { head, token: all[words.length + shown], from: all[words.length + shown - 1], list: best.join(" · ") }));
  }

  return {
    element: h("div", {}, h("p", { class: "quiet" }, t("watch-lead")), h("p", {}, h("label", { for: "watch-layer" }, t("layer"), " ", layers), " ", write, " ", stop), heads, strip, said),
    /** A new text or model was read. */
    reset() {
      running?.abort();
      [words, written, shown] = [about().words, [], -1];
      const some = about().layers;
      if ([...layers.options].map((one) => one.value).join() !== some.join()) layers.replaceChildren(...some.map((one, i) => h("option", { value: one, selected: i === some.length >> 1 }, one)));
      said.replaceChildren();
      draw();
    },
    usable: () => about().generates && about().layers.length > 0,
  };
}
