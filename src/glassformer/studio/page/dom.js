// Elements, questions to the server, and the pieces that every page uses.

/** Words of the chosen language, by key. */
export const words = {};

/** The words of a key, with {name} filled in; the key itself if there are none. */
export function t(key, values = {}) {
  return (words[key] ?? key).replace(/\{(\w+)\}/g, (all, name) => (name in values ? String(values[name]) : all));
}

/** An element: attributes, listeners as onclick, and children as nodes or texts. */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((one) => one !== null && one !== undefined && one !== false));
  return element;
}

/** A drawing that the server made: it escapes every word in it. */
export function drawing(markup) {
  const holder = h("div", { class: "drawing" });
  holder.innerHTML = markup;
  return holder;
}

export class Refusal extends Error {}

/** The answer of the server, or a Refusal with its sentence. */
export async function ask(path, body, signal) {
  const options = body === undefined ? { signal } : {
    method: "POST", signal, body: JSON.stringify(body),
    headers: { "content-type": "application/json", "x-glassformer": "1" },
  };
  let response;
  try {
    response = await fetch(path, options);
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new Refusal(t("gone"));
  }
  const found = await response.json().catch(() => ({}));
  if (response.status === 401) throw new Refusal(t("no-token"));
  if (!response.ok) throw new Refusal(found.error?.message ?? `${response.status}`);
  return found;
}

/** A region that shows what a question finds: busy, then the answer or the refusal. A newer question ends an older one. */
export function region(label) {
  const element = h("div", { class: "region", role: "region", "aria-label": label, "aria-live": "polite" });
  let asking = null;
  return {
    element,
    async show(question, draw) {
      asking?.abort();
      const mine = (asking = new AbortController());
      element.setAttribute("aria-busy", "true");
      if (!element.firstChild) element.append(h("p", { class: "busy" }, t("busy")));
      try {
        const found = await question(mine.signal);
        if (asking === mine) element.replaceChildren(...[draw(found)].flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false));
        return found;
      } catch (problem) {
        if (problem.name !== "AbortError" && asking === mine) element.replaceChildren(refusal(problem));
        if (!(problem instanceof Refusal) && problem.name !== "AbortError") throw problem;
        return null;
      } finally {
        if (asking === mine) element.removeAttribute("aria-busy");
      }
    },
  };
}

/** A page of the library in a frame, with a word in its place until it is there; `loading` is that of the frame. */
export function framed(src, title, loading) {
  const wait = h("p", { class: "busy", role: "status" }, t("opening"));
  return h("div", { class: "framed" }, wait, h("iframe", { src, title, loading, sandbox: "allow-scripts", height: "900", onload: () => wait.remove() }));
}

/** A token with its spaces and line ends to be seen. */
export function visible(token) {
  return token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣").replaceAll("\u00a0", "⍽");
}

export function refusal(problem) {
  return h("p", { class: "refusal", role: "alert" }, problem.message);
}

/** The question for the models that can be chosen; a link may name older ones also. */
export function models(...also) {
  return `/api/models?${new URLSearchParams(also.filter(Boolean).map((one) => ["also", one]))}`;
}

/** Options for models, those of finished trainings apart. */
export function listed(all, chosen) {
  return ["own", "run"].map((kind) => [kind, all.filter((one) => one.kind === kind)]).filter(([, some]) => some.length).map(([kind, some]) =>
    h("optgroup", { label: t(`models-${kind}`) }, ...some.map((one) => h("option", { value: one.name, selected: one.name === chosen }, one.label))));
}

/** Tables and texts as the command line prints them. */
export function blocks(list, label) {
  return list.map((one) => ("text" in one ? h("p", { class: one.quiet ? "quiet" : null }, one.text) : table(one, label)));
}

export function table(one, label) {
  const cell = (name, words, i) => h(name, { class: one.numbers?.[i] ? "number" : null, scope: name === "th" ? "col" : null },
    ...String(words).split("\n").flatMap((line, j) => (j ? [h("br"), h("small", {}, line)] : [line])));
  return h("div", { class: "scroll", role: "group", tabindex: "0", "aria-label": one.title || label || one.headings.join(", ") },
    h("table", {},
      one.title ? h("caption", {}, one.title) : null,
      h("thead", {}, h("tr", {}, ...one.headings.map((words, i) => (words ? cell("th", words, i) : h("td"))))),
      h("tbody", {}, ...one.rows.map((row) => h("tr", {}, ...row.map((words, i) => cell("td", words, i)))))));
}

/** The commands and the lines of Python that give what a panel shows. */
export function how(found) {
  const line = (words) => h("div", { class: "gf-command" }, h("code", { class: "gf-code" }, words),
    h("button", { type: "button", class: "gf-copy", onclick: (event) => copy(event.target, words) }, t("copy")));
  return h("details", { class: "how" }, h("summary", {}, t("how")), ...found.commands.map(line), ...found.python.map(line));
}

async function copy(button, words) {
  try {
    await navigator.clipboard.writeText(words);
    button.textContent = t("copied");
  } catch {
    getSelection().selectAllChildren(button.previousSibling);
  }
}

/** The page and its settings, as the address holds them: #/compose?e=llama@10m. */
export function place() {
  const [name, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { name, query: new URLSearchParams(query) };
}

/** Writes settings into the address; empty ones are left out. `push` makes a step of the browser's history. */
export function remember(values, push = false) {
  const { name, query } = place();
  for (const [key, value] of Object.entries(values)) value ? query.set(key, value) : query.delete(key);
  const text = `#/${name}${[...query].length ? `?${query}` : ""}`;
  history[push ? "pushState" : "replaceState"](null, "", text);
}

export function link(name, values) {
  return `#/${name}?${new URLSearchParams(values)}`;
}
