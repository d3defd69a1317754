// Texts written by one model or by two from the same prompt: each token with its alternatives, which can be taken, and what
// the settings do to the next one.
import { ask, h, how, listed, models as models_, region, refusal, remember, t, visible, Refusal } from "./dom.js";

const SURPRISES = [0.7, 1.6, 3, 5];
/** Nats from which a token is shaded one step darker. */

export async function chat(main, query) {
  const known = region(t("model"));
  const models = h("select", { id: "model", onchange: () => open() });
  const other = h("select", { id: "second", onchange: () => open() });
  const mode = h("select", { id: "mode", onchange: () => begin() },
    ...["complete", "talk"].map((one) => h("option", { value: one, selected: query.get("mode") === one }, t(one))));
  const prompt = h("textarea", { id: "prompt", rows: "4", maxlength: "100000" });
  prompt.value = query.get("prompt") ?? t("prompt-example");
  const settings = h("form", { class: "options", onsubmit: (event) => event.preventDefault(), onchange: () => all((one) => one.distribution()) },
    number("temperature", 0.8, 0, 10, 0.1), number("top_p", 0.95, 0.01, 1, 0.01), number("top_k", "", 1, 1000, 1),
    number("min_p", "", 0.01, 1, 0.01), number("max_tokens", 40, 1, 2000, 1), number("seed", 1, 0, 1e9, 1));
  const meanings = h("details", { class: "how meanings" }, h("summary", {}, t("settings-mean")), h("dl", {}, ...[...settings.elements].flatMap(({ name }) =>
    [h("dt", {}, t(`setting-${name}`)), h("dd", {}, t(`means-${name}`))])));
  const write = h("button", { type: "button", onclick: () => all((one) => one.start()) }, t("write"));
  const stop = h("button", { type: "button", disabled: true, onclick: () => all((one) => one.stop()) }, t("stop"));
  const place = h("div", { class: "writers" });
  let writers = [];

  const all = (act) => Promise.all(writers.map(act));

  function number(name, value, min, max, step) {
    return h("label", { title: t(`means-${name}`) }, t(`setting-${name}`), h("input", { name, type: "number", value, min, max, step }));
  }

  const shared = {
    prompt, mode,
    given(names) {
      const form = new FormData(settings);
      return Object.fromEntries(names.filter((name) => form.get(name) !== "").map((name) => [name, Number(form.get(name))]));
    },
    changed() { stop.disabled = !writers.some((one) => one.busy()); },
  };

  async function open() {
    const names = [...new Set([models.value, other.value].filter(Boolean))];
    remember({ model: models.value, second: other.value });
    writers.forEach((one) => one.stop());
    writers = [];
    const found = await known.show((signal) => Promise.all(names.map((model) => ask("/api/model", { model }, signal))), (some) =>
      some.map((one) => h("p", { class: "quiet" }, t("about-model", one))));
    const able = found !== null && found.every((one) => one.generates);
    write.disabled = !able;
    mode.disabled = !found?.every((one) => one.chats);
    if (mode.disabled) mode.value = "complete";
    if (found) writers = names.map((name, i) => writer(name, found[i], names.length > 1, shared));
    place.classList.toggle("both", names.length > 1);
    place.replaceChildren(...writers.map((one) => one.element));
    begin();
  }

  /** A new text. */
  function begin() {
    remember({ mode: mode.value === "talk" ? "talk" : "" });
    all((one) => one.begin());
  }

  prompt.addEventListener("change", () => all((one) => one.changed()));
  addEventListener("leave", () => all((one) => one.stop()), { once: true });
  main.append(h("h1", {}, t("chat")), h("p", { class: "lead" }, t("chat-lead")),
    h("div", { class: "options" }, h("label", { for: "model" }, t("model"), models), h("label", { for: "second" }, t("second"), other), h("label", { for: "mode" }, t("kind"), mode)), known.element,
    h("label", { for: "prompt" }, t("prompt")), prompt, settings, meanings, h("p", {}, write, " ", stop), place);
  try {
    const found = await ask(models_(query.get("model"), query.get("second")));
    models.replaceChildren(...listed(found.listed, query.get("model")));
    other.replaceChildren(h("option", { value: "" }, t("no-other")), ...listed(found.listed, query.get("second")));
    if (found.models.length) await open();
    else known.element.append(h("p", {}, t("no-models")));
  } catch (problem) {
    known.element.replaceChildren(refusal(problem));
  }
}

/** The text of one model, with the alternatives of each token and the distribution of the next one. */
function writer(model, about, named, shared) {
  const label = about?.label ?? model;
  const next = region(`${t("next")} ${label}`);
  const text = h("div", { class: "tokens", role: "group", "aria-label": `${t("answer")} ${label}` });
  const others = h("div", { class: "others", role: "region", "aria-label": `${t("alternatives")} ${label}`, "aria-live": "polite" });
  const status = h("p", { class: "quiet", role: "status" });
  const said = h("ol", { class: "said" });
  let running = null, tokens = [], messages = [], base = "";

  const written = () => tokens.map((one) => one.text).join("");

  function stop() {
    running?.abort();
  }

  function begin() {
    stop();
    [tokens, messages, base] = [[], [], ""];
    said.replaceChildren();
    draw();
    distribution();
  }

  /** The text that the model reads before its answer. */
  async function read() {
    if (shared.mode.value === "complete") return shared.prompt.value;
    return (await ask("/apply-template", { model, messages: [...messages, { role: "user", content: shared.prompt.value }] })).prompt;
  }

  async function start() {
    if (shared.mode.value === "talk" && tokens.length) {
      messages.push({ role: "user", content: said.dataset.asked }, { role: "assistant", content: written() });
      said.append(h("li", {}, h("b", {}, t("you")), ` ${said.dataset.asked}`), h("li", {}, h("b", {}, label), ` ${written()}`));
    }
    tokens = [];
    said.dataset.asked = shared.prompt.value;
    try {
      base = await read();
    } catch (problem) {
      text.replaceChildren(refusal(problem));
      return;
    }
    await go();
  }

  /** Continues the text from its tokens so far. */
  async function go() {
    stop();
    const mine = (running = new AbortController());
    others.textContent = "";
    shared.changed();
    const began = performance.now(), before = tokens.length;
    draw();
    try {
      const response = await fetch("/v1/completions", {
        method: "POST", signal: mine.signal, headers: { "content-type": "application/json", "x-glassformer": "1" },
        body: JSON.stringify({ model, prompt: base + written(), stream: true, logprobs: 8, ...shared.given(["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"]) }),
      });
      if (!response.ok) throw new Refusal((await response.json()).error.message);
      for await (const event of events(response.body)) {
        if (event.error) throw new Refusal(event.error.message);
        const one = event.choices?.[0];
        one?.logprobs?.tokens.forEach((token, i) => tokens.push({ text: token, logprob: one.logprobs.token_logprobs[i], top: one.logprobs.top_logprobs[i] }));
        draw();
      }
      const speed = (tokens.length - before) / ((performance.now() - began) / 1000);
      status.textContent = t("written", { n: tokens.length - before, speed: speed.toFixed(1) });
    } catch (problem) {
      if (problem.name !== "AbortError") text.append(refusal(problem instanceof Refusal ? problem : { message: t("gone") }));
    } finally {
      if (running === mine) running = null;
      shared.changed();
    }
    distribution();
  }

  function draw() {
    const shown = text.children.length > tokens.length || !tokens.length ? [] : [...text.children];
    if (!shown.length) text.replaceChildren();
    tokens.slice(shown.length).forEach((one, j) => {
      const at = shown.length + j;
      const surprise = -one.logprob;
      text.append(h("span", {
        class: `token s${SURPRISES.filter((least) => surprise > least).length}`, role: "button", tabindex: at ? "-1" : "0",
        "aria-label": one.text.trim() ? null : visible(one.text), onclick: () => choose(at), onmouseenter: () => choose(at), onfocus: () => choose(at),
        onkeydown: (event) => {
          const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
          if (step) text.children[at + step]?.focus();
          else if (event.key === "Enter" || event.key === " ") others.querySelector("button")?.focus();
          else return;
          event.preventDefault();
        },
      }, one.text));
    });
  }

  /** Shows what the model could have written in the place of a token. */
  function choose(at) {
    [...text.children].forEach((one, i) => one.classList.toggle("chosen", i === at));
    const best = Object.entries(tokens[at].top).sort((a, b) => b[1] - a[1]);
    others.replaceChildren(h("p", { class: "quiet" }, t("instead", { token: visible(tokens[at].text) })),
      h("ul", {}, ...best.map(([word, logprob]) => h("li", {}, h("button", {
        type: "button", disabled: word.includes("\ufffd"), "aria-pressed": String(word === tokens[at].text), onclick: () => {
          tokens = [...tokens.slice(0, at), { text: word, logprob, top: tokens[at].top }];
          text.replaceChildren();
          go();
        } }, visible(word)), ` ${(100 * Math.exp(logprob)).toFixed(1)} %`))));
  }

  async function distribution() {
    if (!about?.generates) return;
    await next.show(async (signal) => ask("/api/next", { model, text: tokens.length ? base + written() : await read(), ...shared.given(["temperature", "top_p", "top_k", "min_p"]) }, signal), (found) => [
      h("p", { class: "quiet" }, t("kept", found)),
      h("table", { class: "bars" }, h("thead", {}, h("tr", {}, ...["token", "of-model", "after-settings"].map((key) => h("th", { scope: "col" }, t(key))), h("td"))),
        h("tbody", {}, ...found.tokens.map((one) => h("tr", {}, h("td", {}, h("code", {}, visible(one.token))), h("td", { class: "number" }, one.before),
          h("td", { class: "number" }, one.after), h("td", {}, h("meter", { value: one.share, max: "1", "aria-label": `${visible(one.token)} ${one.after}` })))))),
      how(found)]);
  }

  return {
    begin, start, stop, distribution, busy: () => running !== null,
    changed() { tokens = []; text.replaceChildren(); distribution(); },
    element: h("div", { class: "writer" },
      h("section", {}, named ? h("h2", {}, label) : null, said, text, status, others),
      h("section", {}, h("h2", {}, t("next")), next.element)),
  };
}

/** The JSON of each server-sent event of a stream. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
