// All jobs: their rewards in one chart, a table, and the device time of today.
import {ask, jobPath, rowsOf} from "./api.js";
import {Chart, curves, dot, look} from "./charts.js";
import {add, arrange, choice, el, explain, fill, say} from "./dom.js";
import {sharedCard} from "./shared.js";
import {age, count, FINAL, measured, notes, span} from "./words.js";

const STATES = ["running", "queued", "paused", "succeeded", "failed", "cancelled"];
const AT_MOST = 24; // curves
const AT_ONCE = 4; // requests
const POINTS = 240;
const PARTS = 10; // of the device time; the others are combined
const USAGE_EVERY = 10000; // milliseconds

/** Rewards of jobs over steps: loaded once, then updated by events. */
class Rewards {
  constructor(board, changed) {
    this.series = new Map(); // id → {x, y, after, heard}
    this.board = board;
    this.changed = changed;
    this.waiting = [];
    this.busy = 0;
    this.deaf = board.live.listen(event => this.hear(event));
  }

  want(id) {
    if (this.series.has(id)) return;
    this.series.set(id, {x: [], y: [], after: null, heard: []});
    this.waiting.push(id);
    this.next();
  }

  async next() {
    if (this.busy >= AT_ONCE || !this.waiting.length) return;
    this.busy += 1;
    const id = this.waiting.shift(), series = this.series.get(id);
    try {
      const answer = await ask("GET", jobPath(id, `/steps?field=reward&points=${POINTS}`));
      series.after = answer.after;
      for (const line of answer.data) this.put(series, line);
      for (const event of series.heard) if (event.id > series.after) this.put(series, event.data);
      this.changed();
    } catch {
      this.series.delete(id); // requested again with the next update of the board
    }
    this.busy -= 1;
    this.next();
  }

  hear(event) {
    const series = event.kind === "step" && this.series.get(event.job);
    if (!series) return;
    if (series.after === null) series.heard.push(event);
    else if (event.id > series.after) {
      this.put(series, event.data);
      this.changed();
    }
  }

  put(series, line) {
    if (!Number.isFinite(line.reward) || line.step <= (series.x.at(-1) ?? -1)) return;
    series.x.push(line.step);
    series.y.push(line.reward);
  }

  last(id) { return this.series.get(id)?.y.at(-1); }
}

/** A row of the table; its element stays the same while the job exists. */
function makeRow(board, hidden, changed) {
  const row = {node: el("tr"), why: el("tr", {class: "why"}), reason: el("td", {colspan: 12})};
  row.why.append(row.reason);
  row.swatch = el("button", {type: "button", class: "swatch", onclick: () => {
    if (!hidden.delete(row.id)) hidden.add(row.id);
    changed();
  }}, el("i"));
  row.name = el("a");
  row.tenant = el("td", {class: "small soft", data: {label: "tenant"}});
  row.base = el("td", {class: "small soft", data: {label: "base"}});
  row.by = el("td", {class: "small soft", data: {label: "by"}});
  row.state = el("span", {class: "state"});
  row.steps = el("span", {class: "number"});
  row.done = el("i");
  row.bar = el("span", {class: "progress", "aria-hidden": "true"}, row.done);
  const number = label => el("td", {class: "right number", data: {label}});
  Object.assign(row, {reward: number("reward"), held: number("held-out"), best: number("best"), rate: number("tokens/s"), age: number("age")});
  add(row.node, el("td", {class: "name"}, el("span", {class: "who"}, row.swatch, row.name)), el("td", {class: "is"}, row.state),
    el("td", {class: "steps"}, row.steps, row.bar), row.reward, row.held, row.best, row.rate, row.age);
  row.update = (job, reward) => {
    row.id = job.id;
    const place = look(board.places.get(job.id) ?? 0);
    row.swatch.style.color = place.colour;
    row.swatch.setAttribute("aria-pressed", String(!hidden.has(job.id)));
    row.swatch.setAttribute("aria-label", `Show ${board.named(job)} in the chart`);
    say(row.name, job.name);
    row.name.href = `#/job/${encodeURIComponent(job.id)}`;
    row.state.className = `state ${job.state}`;
    say(row.state, job.state);
    say(row.steps, `${count(job.step)} / ${count(job.steps)}`);
    row.bar.className = `progress ${job.state}`;
    row.done.style.width = `${100 * Math.min(1, job.step / Math.max(job.steps, 1))}%`;
    say(row.reward, measured(reward ?? job.reward));
    const held = job.held_out;
    say(row.held, held ? `${held.figure} ${measured(held.value)}` : "–");
    say(row.best, held && held.best !== null ? `v${held.best_version} · ${measured(held.best)}` : "–");
    say(row.rate, job.progress ? count(job.progress.tokens_per_second) : "–");
    say(row.age, age(job.created));
    if (job.base && !row.base.parentNode) row.age.after(row.base);
    say(row.base, job.base || "");
    if (board.team && !row.by.parentNode) (row.base.parentNode ? row.base : row.age).after(row.by);
    say(row.by, job.submitter || "–");
    if (board.admin && !row.tenant.parentNode) row.node.append(row.tenant);
    say(row.tenant, job.tenant || "");
    row.warnings = notes(job);
    row.reason.className = {failed: "bad", running: "warm", succeeded: "warm"}[job.state] || "soft";
    explain(row.reason, row.warnings);
  };
  return row;
}

function empty(base, submits) {
  return el("div", {class: "card empty"}, el("h2", {}, "No jobs yet"),
    submits ? [el("p", {}, "Submit one from the command line, or write it here."),
      el("pre", {class: "text"}, "motet submit jobs.yaml"), el("div", {}, el("a", {href: "#/new", class: "button primary"}, "New job"))]
      : el("p", {}, "Jobs of your tenant appear here. Your role lets you look at them, not submit any."),
    base ? el("p", {class: "small faint"}, `This service trains adapters of ${base}.`) : null);
}

function headings(bases, team, admin) {
  const names = ["job", "state", "steps", ">reward", ">held-out", ">best", ">tokens/s", ">age", ...(bases ? ["base"] : []), ...(team ? ["by"] : []), ...(admin ? ["tenant"] : [])];
  return el("tr", {}, names.map(name => el("th", {scope: "col", class: name.startsWith(">") && "right"}, name.replace(">", ""))));
}

/** Figures at the top of the page. */
function makeStats() {
  const parts = Object.fromEntries(["running", "queued", "tokens/s", "longest to go"].map(name => [name, el("dd", {}, "–")]));
  const node = el("dl", {class: "stats", "aria-label": "Now"}, Object.entries(parts).map(([name, value]) => el("div", {}, el("dt", {}, name), value)));
  return {node, update(jobs) {
    const running = jobs.filter(job => job.state === "running");
    say(parts.running, count(running.length));
    say(parts.queued, count(jobs.filter(job => job.state === "queued").length));
    say(parts["tokens/s"], count(running.reduce((sum, job) => sum + (job.progress?.tokens_per_second || 0), 0)));
    const left = running.map(job => job.progress?.seconds_left).filter(Number.isFinite);
    say(parts["longest to go"], left.length ? span(Math.max(...left)) : "–");
  }};
}

/** Device time of today, by job. */
function makeDevice(board) {
  const bar = el("div", {class: "split", role: "img"}), keys = el("div", {class: "keys"});
  const node = el("section", {class: "card", hidden: true}, el("div", {class: "head"}, el("h2", {}, "Device time"),
    el("span", {class: "small soft"}, "sampling and training today (UTC), by job")), bar, keys);
  let asked = 0;

  function colour(line) {
    const place = board.places.get(line.job);
    return line.kind === "idle" ? "var(--line)" : place === undefined ? "var(--faint)" : look(place).colour;
  }

  function draw(lines) {
    const used = lines.filter(line => line.device_seconds >= 0.5).sort((a, b) => b.device_seconds - a.device_seconds);
    const total = used.reduce((sum, line) => sum + line.device_seconds, 0);
    const idle = used.filter(line => line.kind === "idle"), busy = used.filter(line => line.kind !== "idle"), shown = busy.slice(0, PARTS);
    const part = line => [colour(line), [line.name ? board.named(line) : line.kind, line.base].filter(Boolean).join(" · "), line.device_seconds];
    const parts = shown.map(part), rest = busy.slice(PARTS).reduce((sum, line) => sum + line.device_seconds, 0);
    if (rest) parts.push(["var(--faint)", "others", rest]);
    parts.push(...idle.map(part));
    node.hidden = !parts.length;
    fill(bar, parts.map(([background, , seconds]) => {
      const part = el("i");
      part.style.width = `${100 * seconds / total}%`;
      part.style.background = background;
      return part;
    }));
    const words = parts.map(([, name, seconds]) => `${name} ${span(seconds)}, ${Math.round(100 * seconds / total)} %`);
    bar.setAttribute("aria-label", words.join("; "));
    fill(keys, words.map((text, place) => el("span", {}, dot(parts[place][0]), text)));
  }

  return {node, async update() {
    if (Date.now() - asked < USAGE_EVERY) return;
    asked = Date.now();
    const today = new Date().toISOString().slice(0, 10);
    await rowsOf(`v1/usage?by=job&since=${today}`).then(draw, () => {});
  }};
}

/** The page. */
export function overview({board, base, may}) {
  const hidden = new Set(), rows = new Map();
  let filter = "all";
  const chart = new Chart("Training reward", "mean of each step’s rollouts, thin; smoothed, thick", {size: "wide", latest: false, empty: "curves appear with the first steps"});
  const rewards = new Rewards(board, () => update());
  const stats = makeStats(), device = makeDevice(board);
  const states = choice("Show jobs that are", [["all", "All", 0]], filter, value => { filter = value; update(); });
  const body = el("tbody"), headRow = el("thead"), none = el("p", {class: "soft", hidden: true}, "No job is in this state.");
  const older = el("button", {type: "button", hidden: true, onclick: () => {
    older.disabled = true;
    board.more().catch(() => {}).finally(() => { older.disabled = false; });
  }}, "Show older jobs");
  const full = el("div", {class: "stack"}, el("h1", {class: "unseen"}, "Jobs"), el("div", {}, stats.node, chart.node), device.node,
    el("section", {class: "card"}, el("div", {class: "head"}, el("h2", {}, "Jobs"), states), el("table", {class: "jobs"}, headRow, body), none, older));
  const nothing = empty(base, may("jobs")), shared = sharedCard(may), node = el("div", {class: "stack"});

  function update() {
    const jobs = board.jobs;
    arrange(node, [jobs.length ? full : nothing, shared]);
    if (!jobs.length) return;
    const more = board.older === null ? "" : "+", number = state => jobs.filter(job => job.state === state).length;
    const states_ = STATES.filter(number).map(state => [state, state, `${number(state)}${FINAL.includes(state) ? more : ""}`]);
    states.offer([["all", "all", `${jobs.length}${more}`], ...states_]);
    const listed = jobs.filter(job => filter === "all" || job.state === filter);
    for (const job of listed.filter(job => job.step > 0 || job.state === "running").slice(0, AT_MOST)) rewards.want(job.id);
    stats.update(jobs);
    device.update();
    const bases = jobs.some(job => job.base), columns = `${bases} ${board.team} ${board.admin}`;
    if (headRow.dataset.columns !== columns) fill(headRow, headings(bases, board.team, board.admin));
    headRow.dataset.columns = columns;
    arrange(body, listed.flatMap(job => {
      if (!rows.has(job.id)) rows.set(job.id, makeRow(board, hidden, update));
      const row = rows.get(job.id);
      row.update(job, rewards.last(job.id));
      return row.warnings ? [row.node, row.why] : [row.node];
    }));
    none.hidden = listed.length > 0;
    older.hidden = board.older === null;
    draw(listed.filter(job => !hidden.has(job.id) && rewards.series.get(job.id)?.x.length));
  }

  function draw(jobs) {
    const drawn = jobs.slice(0, AT_MOST).reverse();
    const place = job => look(board.places.get(job.id) ?? 0);
    chart.draw(drawn.flatMap(job => {
      const {x, y} = rewards.series.get(job.id);
      return curves({name: board.named(job), x: [...x], y: [...y], crowd: drawn.length, ...place(job)});
    }), drawn.map(job => [place(job).colour, board.named(job), place(job).dash]).reverse());
  }

  const deaf = board.listen(update);
  update();
  return {node, title: "Jobs", stop() { deaf(); rewards.deaf(); chart.close(); }};
}
