// The dashboard: sign-in, routing between pages, and the state of the service.
import {ask, Live, request, send, session} from "./api.js";
import {Board} from "./board.js";
import {el, fill, say} from "./dom.js";
import {jobPage} from "./job.js";
import {keysPage} from "./keys.js";
import {overview} from "./overview.js";
import {sharedPage} from "./shared.js";
import {submitPage} from "./submit.js";

const top = document.getElementById("top"), main = document.getElementById("main");
const connection = document.getElementById("connection");
const live = new Live(), board = new Board(live);
const engine = el("div", {class: "engine"}, el("span", {}, "…"));
const context = {board, live, base: "", notes: {}, draft: "", keys: false, me: null, may: right => context.me.rights.includes(right)};
const BACK = "motet.back"; // the page that a sign-in returns to
const links = {};
let shown = null, asking = null, signIn = "";

/** #/ · #/job/ID · #/job/ID/TAB · #/shared/TENANT/NAME · #/new · #/keys */
function route() {
  const [, page = "", ...rest] = location.hash.split("/").map(part => { try { return decodeURIComponent(part); } catch { return part; } });
  return {page, rest};
}

function show() {
  const {page, rest} = route();
  if (shown?.stays?.(page, rest)) return;
  shown?.stop();
  shown = page === "job" && rest[0] ? jobPage(context, rest[0], rest[1])
    : page === "shared" && rest[1] && context.may("completions") ? sharedPage(context, rest[0], rest[1])
    : page === "new" && context.may("jobs") ? submitPage(context)
    : page === "keys" && context.may("keys") ? keysPage(context) : overview(context);
  document.title = `${shown.title} · Motet`;
  fill(main, shown.node);
  for (const [name, link] of Object.entries(links)) {
    if (name === (["new", "keys"].includes(page) ? page : "jobs")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  window.scrollTo(0, 0);
}

/** The header: links to the pages that the user may open, the user's name, and a button to sign out. */
function head(keys) {
  const {me, may} = context;
  for (const name of Object.keys(links)) delete links[name];
  links.jobs = el("a", {href: "#/"}, "Jobs");
  if (may("jobs")) links.new = el("a", {href: "#/new"}, "New job");
  if (keys && may("keys")) links.keys = el("a", {href: "#/keys"}, "Keys");
  const who = keys && el("span", {class: "asker", title: `${me.signed_in ? "Signed in as" : "With the key"} ${me.name || me.id}: ${me.role} of the tenant ${me.tenant}`},
    el("b", {}, me.name || me.id), el("span", {class: "soft"}, `${me.role} of ${me.tenant}`));
  const skip = el("a", {href: "#main", class: "skip button", onclick: event => { event.preventDefault(); main.focus(); }}, "Skip to content");
  fill(top, el("div", {class: "bar"}, skip,
    el("a", {href: "#/", class: "brand"}, el("img", {src: "dashboard/favicon.svg", alt: ""}), el("b", {}, "Motet"), el("span", {class: "unseen"}, "Overview")),
    el("nav", {"aria-label": "Pages"}, Object.values(links)),
    el("div", {class: "end"}, engine, who, keys ? el("button", {class: "plain", type: "button", onclick: signOut}, "Sign out") : null)));
}

async function lookAtEngine() {
  let text = "no answer", state = "down", several = false;
  try {
    const response = await send("GET", "readyz", {});
    const health = await response.json();
    const bases = Object.keys(health.bases || {}), names = bases.join(", ") || health.base;
    several = bases.length > 1;
    context.base = names || context.base;
    await lookAtBases(bases.length ? bases : [health.base]);
    [text, state] = response.ok ? [names, "ok"] : [health.message, /starting/.test(health.message) ? "" : "down"];
  } catch { /* shown below */ }
  engine.className = `engine ${state}`;
  const notes = Object.entries(context.notes).map(([base, note]) => note && `\n${base}: ${note}`).join("");
  engine.title = `${state === "ok" ? `The engine is ready; ${several ? "its bases are" : "its base is"} ${text}.` : text}${notes}`;
  say(engine.firstChild, text);
}

/** Ask what people must know of each base, until it is loaded. */
async function lookAtBases(names) {
  for (const name of names.filter(one => one && !(one in context.notes))) {
    const {note, tool_format} = await ask("GET", `v1/models/${encodeURIComponent(name)}`).catch(() => ({}));
    if (note || tool_format) context.notes[name] = note || "";
  }
}

/** Sign out: ends the key of a sign-in; a typed key is only forgotten in this tab. */
async function signOut() {
  const ended = context.me.signed_in && !session.key ? request("DELETE", "v1/login") : Promise.resolve();
  await ended.then(() => leave(""), error => { if (shown) say(connection, error.message); });
}

function login(message) {
  fill(top);
  document.title = "Sign in · Motet";
  const key = el("input", {type: "password", id: "key", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": "why"});
  const why = el("p", {class: "problem", id: "why", role: "alert"}, message);
  const button = el("button", {class: signIn ? "" : "primary"}, "Sign in with this key");
  const provider = signIn && el("a", {class: "button primary", href: signIn, onclick: () => sessionStorage.setItem(BACK, location.hash)}, "Sign in");
  const form = el("form", {onsubmit: async event => {
    event.preventDefault();
    button.disabled = true;
    say(why, "");
    session.key = key.value.trim();
    try {
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
    provider && el("p", {class: "way"}, provider, el("span", {class: "small soft"}, "with your organisation’s account")),
    el("p", {class: "soft"}, signIn ? "Or use an API key. It" : "Your key", " stays in this tab and is forgotten when you close it. An admin makes keys: ",
      el("code", {}, "motet keys create TENANT")), form));
  (provider || key).focus();
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
  context.me = await ask("GET", "v1/me");
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
  const {keys, sign_in, signed_in} = await ask("GET", "dashboard/service.json");
  signIn = sign_in;
  if (!keys) return enter(false);
  if (!session.key && !signed_in) return login("");
  const back = sessionStorage.getItem(BACK);
  if (back && !location.hash) history.replaceState(null, "", back);
  sessionStorage.removeItem(BACK);
  return enter(true).catch(error => leave(error.status === 401 ? error.message : ""));
}

begin().catch(error => {
  say(connection, `${error.message} Trying again…`);
  setTimeout(() => location.reload(), 3000);
});
