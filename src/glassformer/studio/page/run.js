// One training: its curves while it runs, what happened in it, what its layers recorded, its verdicts and its report.
import { ask, blocks, drawing, framed, h, how, link, refusal, region, t, table } from "./dom.js";

/** Follows a training: every message holds all that is known, so that a reload loses nothing. The pages of one browser
 *  share a stream, because a browser opens few connections to an address. Returns what ends it. */
export function follow(name, heard, lost) {
  const end = new AbortController(), channel = new BroadcastChannel(`run ${name}`);
  let source = null, latest = null;
  const tell = (message) => { channel.postMessage(message); take(message); };
  const take = ({ view, problem }) => (view ? heard(JSON.parse(view)) : problem && lost(problem));

  function open() {
    source = new EventSource(`/api/runs/${encodeURIComponent(name)}/events`);
    source.onmessage = (event) => {
      latest = { view: event.data };
      tell(latest);
      if (JSON.parse(event.data).state !== "running") source.close();
    };
    source.addEventListener("lost", (event) => { source.close(); tell({ problem: JSON.parse(event.data).message }); });
    source.onerror = () => { if (source.readyState === 2 && !latest) tell({ problem: t("gone") }); };
  }

  channel.onmessage = ({ data }) => {
    if (!data.hello) take(data);
    else if (source?.readyState === 2) open(); // it may have been continued
    else if (latest) channel.postMessage(latest);
  };
  channel.postMessage({ hello: true });
  if (!navigator.locks) open();
  else {
    navigator.locks.request(`run ${name}`, { signal: end.signal }, () => new Promise((done) => {
      if (end.signal.aborted) return done();
      end.signal.addEventListener("abort", done);
      open();
    })).catch(() => null);
  }
  return () => { end.abort(); source?.close(); channel.close(); };
}

/** Curves for wide and for narrow screens, with their legend. */
export function charts(found) {
  const wide = drawing(found.figure), narrow = drawing(found.narrow), names = drawing(found.legend);
  wide.classList.add("wide");
  narrow.classList.add("narrow");
  names.querySelectorAll("button").forEach((one) => one.replaceWith(h("span", { class: one.className }, ...one.childNodes)));
  return [names, wide, narrow];
}

/** The panel of a training; `act` stops or continues it, `changed` hears of another state. */
export function panel(name, act, changed) {
  const head = h("div"), status = h("p", { role: "status" }), curves = h("div"), runs = h("div"), ends = h("div"), report = h("div");
  const reason = region(t("why"));
  const layers = region(t("dynamics"));
  const inside = h("details", { ontoggle: () => inside.open && dynamics() }, h("summary", {}, t("dynamics")),
    h("p", {}, h("button", { type: "button", onclick: () => dynamics() }, t("refresh"))), layers.element);
  let state = "", statistic = "", ending = null;

  function draw(found) {
    const busy = status.textContent, words = `${t(`state-${found.state}`)} · ${t("ended", { n: found.runs_ended })}`;
    if (busy !== words) status.replaceChildren(h("b", {}, t(`state-${found.state}`)), ` · ${t("ended", { n: found.runs_ended })}`);
    head.replaceChildren(...[found.refused ? h("p", { class: "refusal" }, found.refused) : null,
      found.progress ? h("p", { class: "quiet" }, found.progress) : null,
      ...found.verdicts.map((one) => h("p", {}, one)),
      found.state === "running" ? h("p", { class: "quiet" }, t("no-verdict")) : null,
      found.similar.length ? h("p", { class: "note" }, t("similar", { names: found.similar.join(", ") })) : null].filter(Boolean));
    curves.replaceChildren(...charts(found), ...(found.marks ? [h("p", { class: "quiet" }, t("marks"))] : []));
    keep(runs, () => runs.replaceChildren(...found.runs.map(run)));
    if (state === found.state) return;
    if (state) changed();
    state = found.state;
    ends.replaceChildren(...[state === "running" ? h("button", { type: "button", onclick: () => act("stop", name) }, t("stop-run"))
      : state === "complete" ? null : h("button", { type: "button", onclick: () => act("resume", name) }, t("resume"))].filter(Boolean), how(found));
    report.replaceChildren(...(found.report ? [h("details", {}, h("summary", {}, t("report")),
      framed(`/api/runs/${encodeURIComponent(name)}/report`, t("report"), "lazy"))] : []));
  }

  /** One run with its events, and the pages that can open it. */
  function run(one) {
    const asks = h("button", { type: "button", "data-run": one.run, onclick: () => why(one) }, t("why"));
    return h("div", { class: "one-run" },
      h("p", {}, h("b", {}, one.model), ` ${t("seed-of", { n: one.seed })} · `, one.progress || t("no-step"), one.held_out ? ` · ${one.held_out}` : "", " ",
        one.progress ? asks : null, " ",
        one.weights ? [h("a", { href: link("chat", { model: one.weights }) }, t("chat")), " · ", h("a", { href: link("look", { model: one.weights }) }, t("look"))] : null),
      one.events.length ? h("ul", { class: "events" }, ...one.events.map((words) => h("li", {}, h("span", { "aria-hidden": "true" }, "◆ "), words)),
        one.more ? h("li", { class: "quiet" }, t("more-events", { n: one.more })) : null) : null);
  }

  async function why(one) {
    const found = await reason.show((signal) => ask("/api/runs/why", { name, run: one.run }, signal), (all) => [
      h("h3", { tabindex: "-1" }, t("why-of", { model: one.model, n: one.seed })), ...blocks(all.lines, t("why")), how(all)]);
    if (found) reason.element.querySelector("h3").focus();
  }

  function dynamics() {
    return layers.show((signal) => ask("/api/runs/dynamics", { name, statistic }, signal), (all) => {
      const words = drawing(all.words), curves_ = drawing(all.curves), maps = drawing(all.layers);
      words.querySelectorAll("button").forEach((one) => one.remove());
      curves_.querySelectorAll("button").forEach((one) => one.replaceWith(h("span", { class: one.className }, ...one.childNodes)));
      return [all.words ? words : h("p", { class: "quiet" }, t("nothing-recorded")),
        Object.keys(all.statistics).length ? h("p", { class: "tabs", role: "group", "aria-label": t("by-layer") }, t("by-layer"), ...Object.entries(all.statistics).map(([key, label]) =>
          h("button", { type: "button", "aria-pressed": String(key === all.statistic), onclick: async () => {
            statistic = key;
            await dynamics();
            layers.element.querySelector("[aria-pressed=true]")?.focus();
          } }, label))) : null, maps, curves_].filter(Boolean);
    });
  }

  ending = follow(name, draw, (problem) => {
    head.replaceChildren(refusal({ message: problem }));
    changed();
  });
  return {
    close: () => ending(),
    element: h("section", { class: "run" }, h("h2", {}, name), status, head, h("div", { class: "course" }, curves, runs), reason.element, ends, inside, report),
  };
}

/** Draws anew what has the focus, and gives it back to the button of the same run. */
function keep(holder, draw) {
  const held = holder.contains(document.activeElement) ? document.activeElement.dataset.run : null;
  draw();
  if (held) [...holder.querySelectorAll("[data-run]")].find((one) => one.dataset.run === held)?.focus();
}

/** Several trainings in one figure. */
export function overlay(found) {
  return [h("h2", {}, t("over")), ...found.notes.map((one) => h("p", { class: "note" }, one)),
    h("div", { class: "course" }, h("div", {}, ...charts(found)), table({ headings: [t("training"), t("text"), t("state-head")], rows: found.runs.map((one) => [`${one.letter} ${one.name}`, one.data, t(`state-${one.state}`)]) }, t("over")))];
}
