// The page of one job: its state, its buttons, and its tabs.
import {ask, jobPath, request, versionsOf} from "./api.js";
import {chatTab} from "./chat.js";
import {columns, jobCurves} from "./curves.js";
import {add, copyOf, el, explain, fill, say, sure} from "./dom.js";
import {rolloutsTab} from "./rollouts.js";
import {useTab} from "./use.js";
import {age, bytes, clock, count, FINAL, measured, notes, span} from "./words.js";

const POINTS = 600;
const TABS = [["curves", "Curves"], ["rollouts", "Rollouts"], ["chat", "Chat"], ["use", "Use it"], ["configuration", "Configuration"], ["events", "Events"]];
const MOST_EVENTS = 300;

/** One entry of the list of events. */
function eventLine(event) {
  const data = event.data;
  let text = [data.message, data.submitter && `submitted by ${data.submitter}`].filter(Boolean).join(" · ");
  if (event.kind === "step") {
    const parts = [["reward", data.reward], ["held-out", data.eval?.reward], ["held-out accuracy", data.eval?.accuracy], ["held-out NLL", data.eval?.nll], ["length", data.length], ["loss", data.loss]];
    text = parts.filter(([, value]) => Number.isFinite(value)).map(([name, value]) => `${name} ${measured(value)}`).join(" · ");
  }
  const what = event.kind === "step" ? `step ${data.step}` : el("span", {class: `state ${data.state}`}, data.state);
  const told = el("span", {class: "text"});
  explain(told, text);
  return el("li", {}, el("span", {class: "soft number"}, clock(event.time)), el("span", {}, what), told);
}

function eventsTab(job, live) {
  const list = el("ol", {class: "happened", reversed: true});
  let last = 0, deaf = () => {};
  const put = event => {
    if (event.id <= last) return;
    last = event.id;
    list.prepend(eventLine(event));
    while (list.children.length > MOST_EVENTS) list.lastChild.remove();
  };
  return {node: el("div", {class: "card"}, list), async begin() {
    const waiting = [];
    let hear = event => waiting.push(event);
    deaf();
    deaf = live.listen(event => { if (event.job === job.id) hear(event); });
    for (;;) { // load all pages: state events are among the oldest
      const page = (await ask("GET", jobPath(job.id, `/events?after=${last}`))).data;
      page.forEach(put);
      if (!page.length) break;
    }
    waiting.forEach(put);
    hear = put;
  }, update() {}, stop() { deaf(); }};
}

function configurationTab(context, job) {
  const text = JSON.stringify(job.spec, null, 2);
  const again = context.may("jobs") && el("button", {type: "button", onclick: () => {
    context.draft = JSON.stringify({...(job.base ? {base: job.base} : {}), ...job.spec, name: `${job.name}-2`}, null, 2);
    location.hash = "#/new";
  }}, "Submit a variation");
  const shown = el("pre", {class: "text", tabindex: 0}, text);
  return {node: el("div", {class: "card"}, el("div", {class: "head"}, el("h2", {}, "As it was validated"), el("div", {class: "row"}, copyOf(shown), again)), shown), begin() {}, update() {}, stop() {}};
}

/** Open a dialog to download saved versions, as archives of PEFT directories. */
async function download(job, complain) {
  const data = await versionsOf(job.id);
  const list = el("ul", {class: "versions"});
  const dialog = el("dialog", {"aria-labelledby": "take"}, el("h2", {id: "take"}, "Take the adapter home"),
    el("p", {class: "soft"}, data.length ? "A .tar.gz of a PEFT directory." : "No version is saved yet."), list,
    el("form", {method: "dialog", class: "row"}, el("button", {}, "Close")));
  for (const version of [...data].reverse()) {
    const fetchIt = async () => {
      const response = await request("GET", jobPath(job.id, `/versions/${version.version}/download`));
      const address = URL.createObjectURL(await response.blob());
      const link = el("a", {href: address, download: `${job.name}-v${version.version}.tar.gz`});
      document.body.append(link);
      link.click();
      link.remove();
      setTimeout(() => URL.revokeObjectURL(address), 60000);
      dialog.close();
    };
    add(list, el("li", {}, el("span", {}, `version ${version.version}`, version.best && el("span", {class: "badge"}, "best"), version.untrained && el("span", {class: "badge", title: "It equals the adapter that the job began with"}, "untrained"),
      version.latest && el("span", {class: "badge"}, "latest"), el("span", {class: "small faint"}, ` ${bytes(version.bytes)}`)),
    el("button", {type: "button", "aria-label": `Download version ${version.version}`, onclick: () => fetchIt().catch(error => complain(error.message))}, "Download")));
  }
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

/** Name, state, progress and buttons. */
function makeHead(context, refreshed, complain, leaving) {
  const name = el("h1"), state = el("span", {class: "state", role: "status"}), facts = el("p", {class: "facts"}), note = el("p", {class: "note", hidden: true});
  const detail = el("span", {class: "number"}), done = el("i"), bar = el("span", {class: "progress", "aria-hidden": "true"}, done);
  add(facts, state, detail);
  let job = null, waits = null;
  const button = (text, work, kind = "") => el("button", {type: "button", class: kind, onclick: async event => {
    event.target.disabled = true;
    await work().catch(error => complain(error.message));
    event.target.disabled = false;
  }}, text);
  const steer = word => async () => {
    waits = [job.state, {pause: "pausing after this step", resume: "resuming", cancel: "cancelling"}[word]];
    refreshed();
    await ask("POST", jobPath(job.id, `/${word}`)).catch(error => { waits = null; throw error; });
    context.board.soon(); // ignore the answer: the job may have changed since
  };
  const buttons = {
    pause: button("Pause", steer("pause")), resume: button("Resume", steer("resume"), "primary"),
    cancel: button("Cancel", async () => {
      if (await sure(`Cancel ${job.name}?`, "It ends now and cannot be resumed. What it saved stays.", "Cancel the job")) await steer("cancel")();
    }, "danger"),
    download: button("Download", () => download(job, complain)),
    remove: button("Delete", async () => {
      if (!await sure(`Delete ${job.name}?`, "Its versions, rollouts and events are removed for good.", "Delete the job")) return;
      leaving(true); // stop requesting the job
      await ask("DELETE", jobPath(job.id)).catch(error => { leaving(false); throw error; });
      context.board.drop(job.id);
      location.hash = "#/";
    }, "danger"),
  };
  const node = el("div", {}, el("p", {class: "crumbs"}, el("a", {href: "#/"}, "Jobs"), el("span", {class: "faint"}, " /")),
    el("div", {class: "title"}, name, el("div", {class: "row"}, Object.values(buttons))), facts, bar, note);
  return {node, close() { for (const one of Object.values(buttons)) one.hidden = true; }, update(now) {
    job = now;
    say(name, job.name);
    state.className = `state ${job.state}`;
    say(state, job.state);
    if (waits && waits[0] !== job.state) waits = null;
    const progress = job.state === "running" ? job.progress : null, held = job.held_out;
    const best = held && held.best !== null && held.best_version !== held.version ? `, best ${measured(held.best)} (v${held.best_version})` : "";
    const rule = held && held.figure === "accuracy" && !held.best_by && "chosen by held-out loss, the rule of the release that began the job";
    say(detail, [`step ${count(job.step)} of ${count(job.steps)}`, waits ? waits[1] : progress?.phase, job.base && `base ${job.base}`, Number.isInteger(progress?.host) && `host ${progress.host}`,
      progress && `${count(progress.tokens_per_second)} tokens/s`, Number.isFinite(progress?.seconds_left) && `${span(progress.seconds_left)} to go`,
      held && `held-out ${held.figure} ${measured(held.value)} (v${held.version})${best}`, rule, Number.isFinite(job.reward) && `training reward ${measured(job.reward)}`, job.tenant, context.keys && `by ${job.submitter || "–"}`, `${age(job.created)} old`].filter(Boolean).join(" · "));
    bar.className = `progress ${job.state}`;
    done.style.width = `${100 * Math.min(1, job.step / Math.max(job.steps, 1))}%`;
    const text = notes(job);
    note.hidden = !text;
    note.className = `note ${job.state}`;
    explain(note, text);
    const ended = FINAL.includes(job.state), steers = context.may("jobs") && job.may_change;
    buttons.pause.hidden = !steers || !["running", "queued"].includes(job.state);
    buttons.resume.hidden = !steers || !["paused", "failed"].includes(job.state);
    buttons.cancel.hidden = !steers || ended;
    buttons.remove.hidden = !steers || !ended;
    buttons.download.hidden = job.step === 0;
  }};
}

/** Tabs after the ARIA tabs pattern: one tab stop, arrow keys move. */
function makeTabs(context, job, chosen, opened) {
  const may = {chat: context.may("completions"), use: context.may("completions")};
  const offered = TABS.filter(([key]) => may[key] ?? true);
  const list = el("div", {role: "tablist", "aria-label": "What to see of the job"}), panel = el("div", {role: "tabpanel", id: "panel", "aria-labelledby": "", tabindex: -1});
  const tabs = offered.map(([key, text]) => el("button", {type: "button", role: "tab", id: `tab-${key}`, "aria-controls": "panel", onclick: () => open(key)}, text));
  list.addEventListener("keydown", event => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key], place = tabs.indexOf(document.activeElement);
    if (!step || place < 0) return;
    const next = tabs[(place + step + tabs.length) % tabs.length];
    next.focus();
    next.click();
  });
  add(list, tabs);
  function open(key) {
    offered.forEach(([name], place) => {
      tabs[place].setAttribute("aria-selected", String(name === key));
      tabs[place].tabIndex = name === key ? 0 : -1;
      if (name === key) tabs[place].scrollIntoView({block: "nearest", inline: "nearest"});
    });
    panel.setAttribute("aria-labelledby", `tab-${key}`);
    history.replaceState(null, "", `#/job/${encodeURIComponent(job.id)}${key === "curves" ? "" : `/${key}`}`);
    opened(key);
  }
  return {list, panel, open: () => open(offered.some(([key]) => key === chosen) ? chosen : "curves")};
}

/** The page. */
export function jobPage(context, id, tab) {
  const node = el("div"), problem = el("p", {class: "problem", role: "alert"});
  const complain = text => say(problem, text);
  const lines = [], tabs = {};
  let job = null, current = null, after = null, early = [], gone = false;
  const head = makeHead(context, () => head.update(job), complain, value => { gone = value; });
  const page = {node, title: id, stop() { deaf.forEach(stop => stop()); Object.values(tabs).forEach(one => one.stop()); }};

  function take(now) {
    if (gone) return;
    job = now;
    head.update(job);
    for (const one of Object.values(tabs)) one.node.isConnected && one !== tabs.curves && one.update();
  }

  function hear(event) {
    if (event.job !== job?.id) return;
    if (after === null) return void early.push(event);
    if (event.id <= after) return;
    complain("");
    if (event.kind !== "step" || event.data.step < (lines.at(-1)?.step ?? -1)) return;
    if (event.data.step === lines.at(-1)?.step) lines.pop();
    lines.push(event.data);
    drawCurves();
  }

  function drawCurves() {
    if (current === "curves") tabs.curves.update([{name: job.name, place: 0, series: columns(lines)}]);
  }

  function open(key, panel) {
    current = key;
    tabs[key] ||= {curves: () => jobCurves(), rollouts: () => rolloutsTab(job), chat: () => chatTab(context, job), use: () => useTab(context, job),
      configuration: () => configurationTab(context, job), events: () => eventsTab(job, context.live)}[key]();
    fill(panel, tabs[key].node);
    if (key === "curves") drawCurves();
    else Promise.resolve(tabs[key].begin()).catch(error => complain(error.message));
  }

  async function begin() {
    job = await ask("GET", jobPath(id));
    page.title = job.name;
    document.title = `${job.name} · Motet`;
    const {list, panel, open: first} = makeTabs(context, job, tab, key => open(key, panel));
    fill(node, head.node, problem, list, panel);
    take(job);
    first();
    const answer = await ask("GET", jobPath(job.id, `/steps?points=${POINTS}`));
    lines.push(...answer.data);
    after = answer.after;
    early.forEach(hear);
    early = [];
    drawCurves();
    context.board.soon(); // changes that happened during the requests
  }

  const deaf = [context.live.listen(hear), context.board.listen(jobs => {
    const now = jobs.find(one => one.id === job?.id);
    if (now) take(now);
    else if (job && !gone) ask("GET", jobPath(job.id)).then(take, error => {
      if (error.status !== 404) return;
      complain("This job was deleted.");
      head.close();
    });
  })];
  begin().catch(error => fill(node, el("div", {class: "card empty"}, el("h2", {}, error.status === 404 ? "There is no such job" : "This does not work now"),
    el("p", {}, error.message), el("p", {}, el("a", {href: "#/"}, "All jobs")))));
  return page;
}
