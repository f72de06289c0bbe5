// The report of a run: draws the data of page.py with the dashboard's components.
import {area, Chart, curves, look} from "./charts.js";
import {jobCurves} from "./curves.js";
import {add, el} from "./dom.js";
import {rolloutCard} from "./tokens.js";
import {count, measured} from "./words.js";

const run = JSON.parse(document.getElementById("report-data").textContent);
const jobs = run.jobs.map((job, place) => ({...job, place}));
const hidden = new Set();
const DEVICE = {decode: "#5f7ea8", train: "#c2a15f", idle: "#8b919c"};
const WARNING = {failed: "bad", paused: "warm"};

/** The symbol of a job, in its colour. */
function mark({place}) {
  const {colour, glyph} = look(place), made = el("i", {class: "mark", "aria-hidden": "true"}, glyph);
  made.style.color = colour;
  return made;
}

function header() {
  const states = new Map();
  for (const {state} of jobs) states.set(state, (states.get(state) || 0) + 1);
  const bases = [...new Set(jobs.map(job => job.base).filter(Boolean))].sort();
  const total = field => count(jobs.reduce((sum, job) => sum + job[field], 0));
  const facts = [`${jobs.length} job${jobs.length === 1 ? "" : "s"}${bases.length ? ` on ${bases.join(", ")}` : ""}`,
    [...states].map(([state, number]) => `${number} ${state}`).join(", "), `${total("done")} steps`, `${total("tokens")} tokens`];
  return el("header", {}, el("p", {class: "small faint"}, "Motet run"), el("h1", {}, run.name), el("p", {class: "soft"}, facts.join(" · ")));
}

/** A button for each job that shows or hides it in all charts; with Shift or Alt, only this job is shown. */
function legend(changed) {
  const chips = jobs.map(job => el("button", {type: "button", class: "chip", "aria-pressed": "true", title: `Show or hide ${job.name}; with Shift, show it alone`,
    onclick: event => {
      const alone = hidden.size === jobs.length - 1 && !hidden.has(job);
      if (!event.shiftKey && !event.altKey) hidden.delete(job) || hidden.add(job);
      else for (const other of jobs) alone || other === job ? hidden.delete(other) : hidden.add(other);
      chips.forEach((chip, place) => chip.setAttribute("aria-pressed", String(!hidden.has(jobs[place]))));
      changed();
    }}, mark(job), job.name));
  return el("nav", {class: "legend row", "aria-label": "Jobs shown in the charts"}, chips);
}

/** First (hollow) and last (filled) evaluation of a job, on a scale that all jobs share. */
function change(job, low, high) {
  const first = job.evaluations[0], last = job.evaluations.at(-1), place = value => `${100 * (value - low) / (high - low)}%`;
  const made = el("span", {class: "range", "aria-hidden": "true"}, el("i", {class: "from"}), el("i"));
  made.style.color = look(job.place).colour;
  made.firstChild.style.left = place(first);
  made.lastChild.style.left = place(last);
  return made;
}

/** A held-out figure: with three decimals, unless these would not show it. */
function figure(value) {
  const size = Math.abs(value);
  return value && (size < 0.001 || size >= 1000) ? measured(value) : value.toFixed(3).replace("-", "−");
}

function gain(values, half = null) {
  if (values.length < 2) return values.length ? figure(values[0]) : "–";
  const first = values[0], last = values.at(-1), text = `${last > first ? "+" : ""}${figure(last - first)}`, seen = figure(first) === figure(last) ? 0 : last - first;
  return [`${figure(first)} → `, el("b", {}, figure(last)), half === null ? " " : ` ± ${figure(half)} `, el("span", {class: seen > 0 ? "good" : seen < 0 ? "bad" : "soft"}, text)];
}

function summary() {
  const values = jobs.flatMap(job => [...job.evaluations.slice(0, 1), ...job.evaluations.slice(-1)]), low = Math.min(0, ...values), top = Math.max(0, ...values), high = low === 0 && top <= 1 ? 1 : top;
  const cell = (label, ...children) => el("td", {data: {label}, class: "number"}, children);
  const rows = jobs.flatMap(job => {
    const notes = [job.rule && el("p", {class: "warm"}, `v${job.best} was ${job.rule}`), job.message && el("p", {class: WARNING[job.state]}, job.message), job.inexact && el("p", {class: "warm"}, `not exact: ${job.inexact}`),
      ...job.warnings.map(text => el("p", {class: text.startsWith("alarm") ? "bad" : "warm"}, text))];
    return [el("tr", {}, el("td", {class: "name"}, el("span", {class: "who"}, mark(job), el("b", {}, job.name))),
      el("td", {class: "is"}, el("span", {class: `state ${job.state}`}, job.state)), cell("steps", job.planned === null ? `${job.done}` : `${job.done}/${job.planned}`),
      cell("held-out", job.evaluations.length ? [`${job.figure} `, ...[gain(job.evaluations)].flat()] : "–"), el("td", {class: "wide"}, job.evaluations.length ? change(job, low, high) : null),
      cell("best", job.best === null ? "–" : `v${job.best}${job.best_figure === null ? "" : ` · ${figure(job.best_figure)}`}`), el("td", {class: "mono small soft path"}, job.adapter)),
    notes.some(Boolean) ? el("tr", {class: "why"}, el("td", {colspan: 7}, notes)) : null];
  });
  const headings = ["job", "state", "steps", "held-out first → newest", "", "best version", "its adapter"];
  const kept = jobs.find(job => job.best !== null && job.adapter.includes("/"));
  const ask = kept && el("p", {class: "small soft"}, "Ask an adapter, from the directory of the run: ", el("code", {}, `motet chat ${kept.base || "BASE"} --adapter ${kept.adapter}`));
  return el("section", {class: "card"}, el("table", {class: "jobs"}, el("thead", {}, el("tr", {}, headings.map(text => el("th", {scope: "col"}, text)))), el("tbody", {}, rows)), ask);
}

/** Results of each setting over its seeds. */
function seeds() {
  const several = run.settings;
  const cell = (label, ...children) => el("td", {data: {label}, class: "number"}, children);
  const rows = several.map(one => el("tr", {}, el("td", {class: "name"}, el("b", {}, one.name)), cell("place", one.place ? `${one.place}.` : "–"),
    cell("seeds", one.seeds === one.jobs ? `${one.jobs}` : `${one.seeds} of ${one.jobs}`),
    cell("held-out", one.mean === null ? "–" : gain([one.before, one.mean], one.half))));
  return several.length && el("section", {}, el("h2", {}, "Settings"), el("p", {class: "soft"}, `Jobs that differ only in their seed. Held-out: ${run.seeds}.`),
    el("div", {class: "card"}, el("table", {class: "jobs"}, el("thead", {}, el("tr", {}, ["setting", "place", "seeds", "held-out before → after"].map(text => el("th", {scope: "col"}, text)))), el("tbody", {}, rows))));
}

/** Charts of the device over time; all jobs report the same device. */
function deviceCharts() {
  const time = {xTitle: "minutes", share: true}, parts = Object.entries(DEVICE).filter(([name]) => run.device[name].x.length);
  const device = new Chart("Device time", "share of the time so far", {...time, range: [0, 1], latest: false});
  const occupancy = new Chart("Occupancy", "how full the batches were", time);
  const tokens = new Chart("Tokens", "sampled and trained so far, by job", {xTitle: "minutes", latest: false});
  const node = el("div", {class: "charts"}, device.node, occupancy.node, tokens.node);
  return {node, update(shown) {
    device.draw(parts.flatMap(([name, colour]) => area({name, colour, ...run.device[name], opacity: name === "idle" ? "40" : "d0"})), parts.map(([name, colour]) => [colour, name]));
    occupancy.draw(curves({name: "occupancy", ...run.device.occupancy, ...look(0), plain: true}));
    tokens.draw(shown.flatMap(job => curves({name: job.name, ...job.used, ...look(job.place), plain: true})));
  }};
}

function folded(job, about, open, ...children) {
  return el("details", {open}, el("summary", {}, mark(job), el("b", {}, job.name), el("span", {class: "small soft"}, about)), children);
}

function sample({prompt, answer, before, after}, [first, last]) {
  const side = (title, rollout, earlier) => el("section", {class: "card"}, el("h3", {}, title), rollout ? rolloutCard(rollout, earlier) : el("p", {class: "soft"}, "not in this evaluation"));
  return el("article", {class: "sample"}, el("p", {class: "asked"}, prompt), answer ? el("p", {class: "small soft"}, `reference: ${answer}`) : null,
    el("div", {class: "sides"}, side(`before · v${first}`, before), last === first ? null : side(`after · v${last}`, after, before)));
}

function samples() {
  const evaluated = jobs.filter(job => job.pairs.length), about = ([first, last]) => last === first ? `version ${first} only so far` : `version ${first} and ${last}`;
  return evaluated.length && el("section", {}, el("h2", {}, "Before and after"),
    el("p", {class: "soft"}, "The first held-out problems in data order, not a choice of the best: what the first and the newest evaluated version answered."),
    evaluated.map((job, place) => folded(job, about(job.versions), place === 0, job.pairs.map(pair => sample(pair, job.versions)))));
}

function configurations() {
  const written = jobs.filter(job => job.config);
  return written.length && el("section", {}, el("h2", {}, "Configuration"), written.map(job => folded(job, "", false, el("pre", {class: "text"}, job.config))));
}

const learning = jobCurves(), device = deviceCharts();
const draw = () => { for (const charts of [learning, device]) charts.update(jobs.filter(job => !hidden.has(job))); };
add(document.querySelector("main"), header(), summary(), seeds() || null, legend(draw), el("section", {}, el("h2", {}, "Learning"), learning.node),
  el("section", {}, el("h2", {}, "Device"), el("p", {class: "soft"}, "One device serves all jobs of the run."), device.node), samples() || null, configurations() || null,
  el("footer", {class: "small faint"}, "Made by Motet from the files of the run. This page loads nothing from the network."));
draw();
