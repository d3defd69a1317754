// Comparisons: started, watched while they are trained, stopped and continued; verdicts and report as the library gives them.
import { ask, drawing, h, how, place, refusal, region, remember, t } from "./dom.js";

export async function train(main, query) {
  const models = h("textarea", { id: "models", rows: "3", spellcheck: "false" });
  models.value = (query.get("models") ?? "gpt2@1m llama@1m").split(" ").join("\n");
  const data = h("select", { name: "data" });
  const minutes = h("input", { name: "minutes", type: "number", min: "0.1", step: "any", value: "1" });
  const seeds = h("input", { name: "seeds", type: "number", min: "1", max: "20", value: "1" });
  const total = h("p", { class: "quiet", role: "status" }), said = h("div", { role: "alert" });
  const list = region(t("runs")), shown = region(t("run"));
  let source = null;

  const names = () => models.value.split(/\s+/).filter(Boolean);

  function count() {
    total.textContent = t("total", { models: names().length, seeds: seeds.value, minutes: minutes.value, all: +(names().length * seeds.value * minutes.value).toFixed(1) });
  }

  async function start() {
    said.replaceChildren();
    try {
      const found = await ask("/api/runs/start", { models: names(), data: data.value, minutes: Number(minutes.value), seeds: Number(seeds.value), allow_unmatched: true });
      watch(found.name);
      refresh();
    } catch (problem) {
      said.replaceChildren(refusal(problem));
    }
  }

  async function act(what, name) {
    try {
      await ask(`/api/runs/${what}`, { name });
      setTimeout(() => { watch(name); refresh(); }, 800);
    } catch (problem) {
      said.replaceChildren(refusal(problem));
    }
  }

  function refresh() {
    return list.show((signal) => ask("/api/runs", undefined, signal), (found) => {
      if (!data.options.length) data.replaceChildren(...found.texts.map((one) => h("option", {}, one)));
      if (!found.runs.length) return h("p", { class: "quiet" }, t("no-runs", { folder: found.folder }));
      return h("ul", { class: "runs" }, ...found.runs.map((one) => h("li", {},
        h("button", { type: "button", "aria-pressed": String(one.name === place().query.get("run")), onclick: () => { watch(one.name); refresh(); } }, one.name),
        ` ${t(`state-${one.state}`)}`, one.models?.length ? ` · ${one.models.join(", ")}` : "")));
    });
  }

  /** Follows a comparison: every event holds all that is known, so that a reload loses nothing. */
  function watch(name) {
    source?.close();
    remember({ run: name });
    source = new EventSource(`/api/runs/${encodeURIComponent(name)}/events`);
    let state = "";
    source.onmessage = (event) => {
      const found = JSON.parse(event.data);
      shown.element.replaceChildren(...view(found));
      if (found.state !== "running") source.close();
      if (state && state !== found.state) refresh();
      state = found.state;
    };
    source.onerror = () => { if (source.readyState === 2 && !state) shown.element.replaceChildren(refusal({ message: t("gone") })); };
  }

  function view(found) {
    const wide = drawing(found.figure), narrow = drawing(found.narrow), names = drawing(found.legend);
    wide.classList.add("wide");
    narrow.classList.add("narrow");
    names.querySelectorAll("button").forEach((one) => one.replaceWith(h("span", { class: one.className }, ...one.childNodes)));
    return [h("h2", {}, found.name), h("p", { role: "status" }, h("b", {}, t(`state-${found.state}`)), ` · ${t("ended", { n: found.runs_ended })}`),
      found.progress ? h("p", { class: "quiet" }, found.progress) : null,
      found.refused ? h("p", { class: "refusal" }, found.refused) : null,
      ...found.verdicts.map((one) => h("p", {}, one)),
      found.state === "running" ? h("p", { class: "quiet" }, t("no-verdict")) : null,
      found.similar.length ? h("p", { class: "note" }, t("similar", { names: found.similar.join(", ") })) : null,
      names, wide, narrow,
      h("p", {}, found.state === "running"
        ? h("button", { type: "button", onclick: () => act("stop", found.name) }, t("stop-run"))
        : found.state === "complete" ? null : h("button", { type: "button", onclick: () => act("resume", found.name) }, t("resume"))),
      how(found),
      found.report ? h("details", {}, h("summary", {}, t("report")), h("iframe", { src: `/api/runs/${encodeURIComponent(found.name)}/report`, sandbox: "allow-scripts", title: t("report"), height: "900" })) : null].filter(Boolean);
  }

  addEventListener("hashchange", () => source?.close(), { once: true });
  main.append(h("h1", {}, t("train")), h("p", { class: "lead" }, t("train-lead")),
    h("div", { class: "columns two" },
      h("section", {}, h("label", { for: "models" }, t("models")), models,
        h("form", { class: "options", onsubmit: (event) => { event.preventDefault(); start(); } },
          h("label", {}, t("text"), data), h("label", {}, t("minutes"), minutes), h("label", {}, t("seeds"), seeds),
          h("button", {}, t("start"))), total, said, shown.element),
      h("section", {}, h("h2", {}, t("runs")), list.element)));
  for (const one of [models, minutes, seeds]) one.addEventListener("input", count);
  count();
  await refresh();
  if (query.get("run")) watch(query.get("run"));
}
