// The dashboard: who asks, which page is shown, and whether the service is there.
import {ask, Live, request, send, session} from "./api.js";
import {Board} from "./board.js";
import {el, fill, say} from "./dom.js";
import {jobPage} from "./job.js";
import {overview} from "./overview.js";
import {submitPage} from "./submit.js";

const top = document.getElementById("top"), main = document.getElementById("main");
const connection = document.getElementById("connection");
const live = new Live(), board = new Board(live);
const engine = el("div", {class: "engine"}, el("span", {}, "…"));
const context = {board, live, base: "", draft: "", keys: false};
const links = {};
let shown = null, asking = null;

/** #/ · #/job/ID · #/job/ID/TAB · #/new */
function route() {
  const [, page = "", ...rest] = location.hash.split("/").map(part => { try { return decodeURIComponent(part); } catch { return part; } });
  return {page, rest};
}

function show() {
  const {page, rest} = route();
  if (shown?.stays?.(page, rest)) return;
  shown?.stop();
  shown = page === "job" && rest[0] ? jobPage(context, rest[0], rest[1]) : page === "new" ? submitPage(context) : overview(context);
  document.title = `${shown.title} · Motet`;
  fill(main, shown.node);
  for (const [name, link] of Object.entries(links)) {
    if ((name === "new") === (page === "new")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  window.scrollTo(0, 0);
}

function head(keys) {
  links.jobs = el("a", {href: "#/"}, "Jobs");
  links.new = el("a", {href: "#/new"}, "New job");
  const skip = el("a", {href: "#main", class: "skip button", onclick: event => { event.preventDefault(); main.focus(); }}, "Skip to content");
  fill(top, el("div", {class: "bar"}, skip,
    el("a", {href: "#/", class: "brand"}, el("img", {src: "dashboard/favicon.svg", alt: ""}), el("b", {}, "Motet"), el("span", {class: "unseen"}, "Overview")),
    el("nav", {"aria-label": "Pages"}, links.jobs, links.new),
    el("div", {class: "end"}, engine, keys ? el("button", {class: "plain", type: "button", onclick: () => leave("")}, "Log out") : null)));
}

async function lookAtEngine() {
  let text = "no answer", state = "down", several = false;
  try {
    const response = await send("GET", "readyz", {});
    const health = await response.json();
    const bases = Object.keys(health.bases || {}), names = bases.join(", ") || health.base;
    several = bases.length > 1;
    context.base = names || context.base;
    [text, state] = response.ok ? [names, "ok"] : [health.message, /starting/.test(health.message) ? "" : "down"];
  } catch { /* said below */ }
  engine.className = `engine ${state}`;
  engine.title = state === "ok" ? `The engine is ready; ${several ? "its bases are" : "its base is"} ${text}.` : text;
  say(engine.firstChild, text);
}

function login(message) {
  fill(top);
  document.title = "Log in · Motet";
  const key = el("input", {type: "password", id: "key", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": "why"});
  const why = el("p", {class: "problem", id: "why", role: "alert"}, message);
  const button = el("button", {class: "primary"}, "Log in");
  const form = el("form", {onsubmit: async event => {
    event.preventDefault();
    button.disabled = true;
    say(why, "");
    session.key = key.value.trim();
    try {
      await request("GET", "v1/jobs?limit=1");
      await enter(true);
    } catch (error) {
      session.key = "";
      key.setAttribute("aria-invalid", "true");
      say(why, error.message);
      button.disabled = false;
      key.select();
    }
  }}, el("div", {class: "field"}, el("label", {for: "key"}, "API key"), key), why, button);
  fill(main, el("div", {class: "login"},
    el("img", {src: "dashboard/favicon.svg", alt: ""}), el("h1", {}, "Motet"),
    el("p", {class: "soft"}, "Your key stays in this tab and is forgotten when you close it. An admin makes keys: ", el("code", {}, "motet keys create NAME")), form));
  key.focus();
}

function leave(message) {
  shown?.stop();
  shown = null;
  session.key = "";
  live.stop();
  live.last = null;
  board.stop();
  board.take([]);
  clearInterval(asking);
  window.onhashchange = null;
  login(message);
}

async function enter(keys) {
  context.keys = keys;
  session.locked = message => { if (shown) leave(message); };
  live.lost = lost => say(connection, lost ? "Connection lost, trying again…" : "");
  await live.start();
  await Promise.all([board.start(), lookAtEngine()]);
  head(keys);
  asking = setInterval(() => { if (!document.hidden) lookAtEngine(); }, 5000);
  window.onhashchange = show;
  show();
}

async function begin() {
  const {keys} = await ask("GET", "dashboard/service.json");
  if (!keys) return enter(false);
  if (!session.key) return login("");
  return enter(true).catch(error => leave(error.status === 401 ? error.message : ""));
}

begin().catch(error => {
  say(connection, `${error.message} Trying again…`);
  setTimeout(() => location.reload(), 3000);
});
