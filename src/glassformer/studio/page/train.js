// Trainings: set up, started, listed by day; a text that is dropped onto the page; several trainings over each other.
import { ask, h, place, refusal, region, remember, t } from "./dom.js";
import { overlay, panel } from "./run.js";

const PIECE = 4 << 20;
/** Bytes of a file that are read and sent at once. */

export async function train(main, query) {
  const models = h("textarea", { id: "models", rows: "3", spellcheck: "false", autocapitalize: "off" });
  models.value = (query.get("models") ?? "gpt2@1m llama@1m").split(" ").join("\n");
  const data = h("select", { name: "data" });
  const kind = h("select", { name: "kind" }, ...["minutes", "tokens"].map((one) => h("option", { value: one }, t(`budget-${one}`))));
  const amount = h("input", { name: "amount", type: "number", min: "0", step: "any", value: "1" });
  const seeds = h("input", { name: "seeds", type: "number", min: "1", max: "20", value: "1" });
  const watch = h("input", { name: "watch", type: "checkbox", checked: true });
  const plan = region(t("before-start")), said = h("div", { role: "alert" });
  const list = region(t("trainings")), over = region(t("over")), shown = h("div");
  const chosen = new Set((query.get("over") ?? "").split(" ").filter(Boolean));
  let open = null, timer = 0, most = 0;
  list.element.classList.add("listed");

  const names = () => models.value.split(/\s+/).filter(Boolean);
  const body = () => ({ models: names(), data: data.value, [kind.value]: kind.value === "tokens" ? Math.round(Number(amount.value)) : Number(amount.value),
    seeds: Number(seeds.value), watch: watch.checked, allow_unmatched: true });

  /** Asks what a training takes before it starts. */
  function count() {
    clearTimeout(timer);
    timer = setTimeout(() => {
      if (!data.value) return;
      plan.show((signal) => ask("/api/runs/plan", body(), signal), (found) => [h("p", {}, found.words),
        h("p", { class: "quiet" }, found.sizes.join("; ")), ...found.notes.map((one) => h("p", { class: "quiet" }, one))]);
    }, 400);
  }

  async function start() {
    said.replaceChildren();
    try {
      const found = await ask("/api/runs/start", body());
      watch_(found.name);
      refresh();
    } catch (problem) {
      said.replaceChildren(refusal(problem));
    }
  }

  async function act(what, name) {
    said.replaceChildren();
    try {
      await ask(`/api/runs/${what}`, { name });
      setTimeout(() => { watch_(name); refresh(); }, 800);
    } catch (problem) {
      said.replaceChildren(refusal(problem));
    }
  }

  function texts(found) {
    const before = data.value || query.get("data");
    const group = (label, some) => h("optgroup", { label: t(label) }, ...some.map((one) => h("option", { selected: one === before }, one)));
    data.replaceChildren(...[found.own.length ? group("own-texts", found.own) : null, group("library-texts", found.texts)].filter(Boolean));
  }

  function refresh() {
    return list.show((signal) => ask("/api/runs", undefined, signal), (found) => {
      texts(found);
      most = found.most_over;
      const there = found.runs.map((one) => one.name);
      for (const [i, name] of [...chosen].filter((one) => there.includes(one) || !chosen.delete(one)).entries()) if (i >= most) chosen.delete(name);
      if (!found.runs.length) return h("p", { class: "quiet" }, t("no-runs", { folder: found.folder }));
      const days = new Map();
      for (const one of found.runs) {
        const day = one.created ? new Date(one.created).toLocaleDateString(document.documentElement.lang, { dateStyle: "medium" }) : t("no-day");
        days.set(day, [...(days.get(day) ?? []), one]);
      }
      return [h("p", { class: "quiet", id: "over-hint" }, t("over-hint", { n: most })), ...[...days].flatMap(([day, some]) => [h("h3", {}, day), h("ul", { class: "runs" }, ...some.map(row))])];
    });
  }

  function row(one) {
    return h("li", {},
      h("input", { type: "checkbox", checked: chosen.has(one.name), "aria-label": t("lay-over", { name: one.name }), "aria-describedby": "over-hint", disabled: full(one.name), value: one.name, onchange: (event) => {
        event.target.checked ? chosen.add(one.name) : chosen.delete(one.name);
        lay();
      } }),
      h("div", {}, h("button", { type: "button", "aria-pressed": String(one.name === place().query.get("run")), onclick: async () => { watch_(one.name); await refresh(); focus(one.name); } }, one.name),
        h("span", {}, ` ${t(`state-${one.state}`)}`), h("p", { class: "quiet" }, [one.models?.join(", "), one.data].filter(Boolean).join(" · "), one.refused ? ` · ${one.refused.message}` : "")));
  }

  function focus(name) {
    [...list.element.querySelectorAll("button")].find((one) => one.textContent === name)?.focus();
  }

  /** True for a training that no longer fits into the figure. */
  function full(name) {
    return chosen.size >= most && !chosen.has(name);
  }

  /** Draws the chosen trainings over each other. */
  function lay() {
    for (const box of list.element.querySelectorAll("[type=checkbox]")) box.disabled = full(box.value);
    remember({ over: [...chosen].join(" ") });
    if (!chosen.size) over.element.replaceChildren();
    else over.show((signal) => ask("/api/runs/over", { names: [...chosen] }, signal), overlay);
  }

  function watch_(name) {
    open?.close();
    remember({ run: name });
    open = panel(name, act, refresh);
    shown.replaceChildren(open.element);
  }

  // A text of one's own

  const file = h("input", { type: "file", id: "file", onchange: () => file.files[0] && send(file.files[0]) });
  const sent = h("p", { role: "status" });
  const box = h("div", { class: "drop" }, h("label", { for: "file" }, t("drop")), file, sent);

  /** Sends a file piece by piece, one file at a time; the first piece carries the size of the whole, which Python may
   * refuse. */
  async function send(one) {
    if (file.disabled) return;
    [file.disabled, sent.className] = [true, ""];
    const upload = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
    try {
      for (let at = 0; ;) {
        sent.textContent = t("sending", { name: one.name, share: one.size ? Math.floor((100 * at) / one.size) : 0 });
        const found = await ask("/api/texts", { upload, name: one.name, size: one.size, at, content: one.size > at ? await base64(one.slice(at, at + PIECE)) : "" });
        if (found.complete) {
          sent.textContent = t("text-kept", found);
          await refresh();
          data.value = found.name;
          count();
          return;
        }
        at = found.have;
      }
    } catch (problem) {
      sent.className = "refusal";
      sent.textContent = problem.message;
    } finally {
      [file.value, file.disabled] = ["", false];
    }
  }

  function dropped(event) {
    if (!document.contains(box) || !event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    box.classList.toggle("over", event.type === "dragover");
    if (event.type === "drop" && event.dataTransfer.files[0]) send(event.dataTransfer.files[0]);
  }
  const away = new AbortController();
  for (const type of ["dragover", "dragleave", "drop"]) addEventListener(type, dropped, { signal: away.signal });
  addEventListener("leave", () => { away.abort(); clearTimeout(timer); open?.close(); }, { signal: away.signal });

  main.append(h("h1", {}, t("train")), h("p", { class: "lead" }, t("train-lead")),
    h("div", { class: "columns two" },
      h("section", {}, h("label", { for: "models" }, t("models")), models,
        h("form", { class: "options", onsubmit: (event) => { event.preventDefault(); start(); } },
          h("label", {}, t("text"), data), h("label", {}, t("budget"), kind), h("label", {}, t("amount"), amount), h("label", {}, t("seeds"), seeds),
          h("label", { class: "check" }, watch, t("record")), h("button", {}, t("start"))),
        box, plan.element, said),
      h("section", {}, h("h2", {}, t("trainings")), list.element)), over.element, shown);
  for (const one of [models, amount, seeds, data, watch]) one.addEventListener("input", count);
  kind.addEventListener("input", () => { amount.value = kind.value === "tokens" ? "200000" : "1"; count(); });
  await refresh();
  if (away.signal.aborted) return;
  count();
  if (chosen.size) lay();
  if (query.get("run")) watch_(query.get("run"));
}

/** A piece of a file in base64. */
function base64(piece) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => failed(new Error(t("no-file")));
    reader.readAsDataURL(piece);
  });
}
