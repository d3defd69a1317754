// The frame of the page: token, language, and which page is shown.
import { ask, h, place, refusal, t, words } from "./dom.js";
import { gallery } from "./gallery.js";
import { compose } from "./compose.js";
import { chat } from "./chat.js";
import { learn } from "./learn.js";
import { look } from "./look.js";
import { train } from "./train.js";

const PAGES = { gallery, compose, train, chat, look, learn };
const NAMES = { en: "English", zh: "中文" };
const main = document.getElementById("content");

/** Exchanges the token of the address for a cookie, and takes it out of the address and the history. */
async function login() {
  const found = /^#token=([^&]+)&?(.*)$/.exec(location.hash);
  if (!found) return;
  history.replaceState(null, "", `#${found[2] || "/gallery"}`);
  await ask("/api/login", { token: decodeURIComponent(found[1]) });
}

function language() {
  const chosen = stored("language") ?? navigator.language;
  return chosen.startsWith("zh") ? "zh" : "en";
}

function stored(key, value) {
  try {
    return value === undefined ? localStorage.getItem(key) : localStorage.setItem(key, value);
  } catch {
    return null; // a browser that keeps nothing
  }
}

async function speak(name) {
  Object.assign(words, await (await fetch(`/page/${name}.json`)).json());
  document.documentElement.lang = name === "zh" ? "zh-Hans" : "en";
  document.querySelector(".gf-skip").textContent = t("skip");
  const select = document.getElementById("language");
  select.previousSibling.textContent = t("language");
  select.replaceChildren(...Object.entries(NAMES).map(([key, words]) => h("option", { value: key, lang: key, selected: key === name }, words)));
  select.onchange = async () => { stored("language", select.value); await speak(select.value); show(); };
}

function show() {
  dispatchEvent(new Event("leave")); // a page ends its streams and its listeners
  const { name, query } = place();
  const page = PAGES[name] ? name : "gallery";
  document.getElementById("nav").replaceChildren(...Object.keys(PAGES).map((one) =>
    h("a", { href: `#/${one}`, "aria-current": one === page ? "page" : null }, t(one))));
  document.title = `${t(page)} · Glassformer Studio`;
  main.replaceChildren();
  PAGES[page](main, query);
}

await speak(language());
try {
  await login();
} catch (problem) {
  main.replaceChildren(refusal(problem));
}
let soon = 0;
for (const type of ["hashchange", "popstate"]) addEventListener(type, () => { // a link fires both
  clearTimeout(soon);
  soon = setTimeout(() => (location.hash.startsWith("#token=") ? location.reload() : show())); // the printed address, in a tab that is open
});
show();
document.documentElement.classList.add("ready");
