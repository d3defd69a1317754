// Published models as cards: search, filter by part, and two of them side by side.
import { ask, blocks, drawing, h, how, link, region, remember, t, table } from "./dom.js";

const ROLES = { mixer: "mixer", ffn: "ffn", norm: "norm", residual: "norm", position: "chip", visibility: "chip" };
let known = null;

export async function gallery(main, query) {
  known ??= await (await fetch("/page/gallery.json")).json();
  const parts = new Set((query.get("parts") ?? "").split(",").filter(Boolean));
  const pair = [query.get("a"), query.get("b")].filter(Boolean);
  const search = h("input", { type: "search", id: "search", value: query.get("q") ?? "", placeholder: t("search-hint") });
  const count = h("p", { class: "quiet", role: "status" });
  const cards = h("ul", { class: "cards" });
  const compared = region(t("difference"));

  function fits(card) {
    const of = Object.entries(card.parts).flatMap(([axis, some]) => some.map((one) => `${axis}.${one}`));
    const text = `${card.name} ${card.family} ${card.year} ${Object.values(card.parts).flat().join(" ")}`.toLowerCase();
    return [...parts].every((one) => of.includes(one)) &&
      search.value.toLowerCase().split(/\s+/).every((word) => text.includes(word));
  }

  function draw() {
    const found = known.cards.filter(fits);
    count.textContent = t("found", { n: found.length, all: known.cards.length });
    cards.replaceChildren(...found.map(card));
    remember({ q: search.value, parts: [...parts].join(","), a: pair[0], b: pair[1] });
  }

  function card(one) {
    const chosen = pair.includes(one.name);
    return h("li", { class: chosen ? "card chosen" : "card" },
      h("h2", {}, h("a", { href: link("compose", { e: one.name }) }, one.name)),
      h("p", { class: "facts" }, `${one.year} · ${one.size}`, one.family ? ` · ${one.family}` : ""),
      h("p", { class: "facts" }, t("shape", { layers: one.layers, width: one.width, context: one.context })),
      h("p", { class: "facts" }, one.generates ? t("state", { state: one.state }) : t("encoder")),
      h("p", { class: "chips" }, ...Object.entries(one.parts).flatMap(([axis, some]) =>
        some.map((word) => h("span", { class: `part ${ROLES[axis]}`, title: t(`axis-${axis}`) }, word)))),
      h("button", { type: "button", "aria-pressed": String(chosen), onclick: () => pick(one.name) }, t("compare-this")));
  }

  function pick(name) {
    if (pair.includes(name)) pair.splice(pair.indexOf(name), 1);
    else pair.push(name);
    if (pair.length > 2) pair.shift();
    draw();
    compare();
    cards.querySelectorAll(".card")[known.cards.filter(fits).findIndex((one) => one.name === name)]?.querySelector("button").focus();
  }

  function compare() {
    if (pair.length < 2) {
      compared.element.replaceChildren(h("p", { class: "quiet" }, t(pair.length ? "one-more" : "choose-two", { name: pair[0] })));
      return;
    }
    compared.show((signal) => ask("/api/difference", { first: pair[0], second: pair[1] }, signal), (found) => [
      h("h2", {}, t("differ", { a: found.names[0], b: found.names[1] })),
      found.ideas.length
        ? h("div", { class: "ideas" }, table({ headings: [t("part"), ...found.names, t("change")], rows: found.ideas.map((one) => [one.part, one.first, one.second, one.change]) }))
        : h("p", {}, t("same")),
      h("div", { class: "pair" }, ...found.drawings.map((one, i) => h("figure", {}, h("figcaption", {}, found.names[i]), drawing(one))),
        h("div", {}, h("h3", {}, t("costs")), ...blocks(found.costs, t("costs")))),
      h("p", { class: "quiet" }, t("read-drawing")),
      how(found),
    ]);
  }

  const filters = h("div", { class: "filters" }, ...Object.entries(known.filters).map(([axis, some]) =>
    h("fieldset", {}, h("legend", {}, t(`axis-${axis}`)), ...some.map(({ word, meaning }) => {
      const key = `${axis}.${word}`;
      return h("button", {
        type: "button", class: `part ${ROLES[axis]}`, title: meaning, "aria-pressed": String(parts.has(key)),
        onclick: (event) => {
          parts.has(key) ? parts.delete(key) : parts.add(key);
          event.currentTarget.setAttribute("aria-pressed", String(parts.has(key)));
          draw();
        },
      }, word);
    }))));
  search.addEventListener("input", draw);
  main.append(h("h1", {}, t("gallery")), h("p", { class: "lead" }, t("gallery-lead")),
    h("label", { for: "search" }, t("search")), search,
    h("details", { open: parts.size > 0 }, h("summary", {}, t("filter")), filters),
    compared.element, count, cards);
  draw();
  compare();
}
