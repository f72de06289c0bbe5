// Charts of one job, or of all jobs of a run, for the dashboard and the report of `motet run`.
import {Chart, curves, known, look, marks} from "./charts.js";
import {add, el, say} from "./dom.js";
import {COLOURS} from "./palette.js";

const SMALL = [ // field of metrics.jsonl, title, note, options
  ["length", "Length", "sampled tokens per rollout", {asks: "Are the answers sound?"}],
  ["truncated", "Truncated", "share of rollouts that ran into max_tokens", {share: true}],
  ["no_signal", "Groups without signal", "share of groups whose rewards are all equal", {share: true}],
  ["distinct", "Distinct answers", "share of a group’s answers that differ", {share: true}],
  ["accuracy", "Accuracy", "share of pairs, or answers, that the policy gets right", {share: true}],
  ["eval/accuracy", "Held-out accuracy", "the same pairs, or answers, at every evaluation", {share: true, joined: true}],
  ["eval/nll", "Held-out NLL", "nats per token of the answers", {joined: true}],
  ["loss", "Loss", "before the update", {asks: "Are the updates sound?"}],
  ["entropy", "Entropy", "nats per token"],
  ["kl_base", "KL to the reference", "nats per token, on steps that evaluate", {joined: true}],
  ["grad_norm", "Gradient norm", "before clipping"],
  ["lr", "Learning rate", "of the update", {plain: true}],
  ["clip_fraction", "Clipped", "share of tokens whose gradient the clip removed", {share: true}],
  ["kl_sampler", "KL to the sampler", "nats per token"],
  ["logprob_gap", "Logprob gap", "largest |trainer − sampler|", {plain: true}],
  ["staleness", "Staleness", "steps that sampling ran ahead", {plain: true}],
];
const PARTS = "reward_parts/", HELD = "eval/", MOST_PARTS = 12;

/** Lines of metrics.jsonl as {field: {x, y}}, with nested fields as "eval/reward"; a null is a gap. */
export function columns(lines) {
  const byField = {};
  const take = (step, table, prefix) => {
    for (const [name, value] of Object.entries(table)) {
      if (value !== null && typeof value === "object") take(step, value, `${prefix}${name}/`);
      if (value !== null && !Number.isFinite(value)) continue;
      const series = byField[prefix + name] ||= {x: [], y: []};
      series.x.push(step);
      series.y.push(value);
    }
  };
  for (const line of lines) take(line.step, line, "");
  return byField;
}

/** Half of the 95 % intervals of a held-out field at these versions; null where they are not known. */
function halves({series}, field, at) {
  const of = name => { const {x, y} = series[name] || {x: [], y: []}; return new Map(x.map((step, place) => [step, y[place]])); };
  const values = of(field), rows = of("eval/rows"), errors = field === "eval/accuracy" ? new Map(at.map(step => [step, Math.sqrt(values.get(step) * (1 - values.get(step)) / rows.get(step))])) : of(`${field}_stderr`);
  return at.some(step => errors.get(step)) ? at.map(step => 2 * errors.get(step) || 0) : null;
}

/** Traces of one field of a job; none if it has no value. */
function drawn(job, field, {plain, joined, crowd}) {
  const {x, y} = job.series[field] || {x: [], y: []}, places = [...y.keys()].filter(place => known(y[place]));
  if (!places.length) return [];
  const style = {name: job.name, ...look(job.place)};
  if (joined) {
    const at = places.map(place => x[place]);
    return marks({...style, x: at, y: places.map(place => y[place]), half: halves(job, field, at)});
  }
  return curves({...style, x, y, plain, crowd});
}

/** All charts. `update(jobs)` draws jobs of the form {name, place, series}, with `series` from `columns`. */
export function jobCurves() {
  const reward = new Chart("Training reward", "mean of each step’s rollouts, thin; smoothed, thick", {size: "large", empty: "no step yet"});
  const held = new Chart("Held-out reward", "the same problems at every evaluation; bars: 95 % intervals", {size: "large", xTitle: "version", empty: "no evaluation yet"});
  const parts = new Chart("Reward parts", "mean of each reward; dotted: held-out", {size: "large", latest: false});
  const small = SMALL.map(([field, title, note, options = {}]) => [new Chart(title, note, options), field, options]);
  const all = [[reward, "reward", {}], [held, "eval/reward", {joined: true}], ...small];
  const node = el("div", {class: "charts"}), same = el("p", {class: "same small soft", hidden: true});
  const asked = new Map(small.filter(([, , {asks}]) => asks).map(([chart, , {asks}]) => [chart, el("h2", {}, asks)]));
  add(node, all.flatMap(([chart]) => [asked.get(chart), chart.node].filter(Boolean)), same);

  const ofPart = new Map();
  const partsOf = ({series}) => Object.keys(series).filter(field => field.startsWith(PARTS)).map(field => field.slice(PARTS.length));

  /** Draw the reward parts: those of a job that is shown alone in one chart, those of several in one chart each. */
  function drawParts(jobs) {
    const parted = jobs.filter(job => partsOf(job).length > 1);
    const shared = jobs.length > 1 ? [...new Set(parted.flatMap(partsOf))].slice(0, MOST_PARTS) : [];
    for (const [name, chart] of ofPart) if (!shared.includes(name)) chart.node.remove();
    for (const name of shared) {
      if (!ofPart.has(name)) ofPart.set(name, new Chart(`Reward part ${name}`, "mean of each step’s rollouts"));
      const chart = ofPart.get(name);
      if (!chart.node.parentNode) add(node, [chart.node]);
      chart.draw(parted.flatMap(job => drawn(job, PARTS + name, {crowd: parted.length})));
    }
    const series = jobs.length === 1 ? jobs[0].series : {}, names = jobs.length === 1 ? partsOf(jobs[0]) : [];
    node.classList.toggle("parted", names.length > 1);
    if (names.length < 2) return void parts.node.remove();
    if (parts.node.parentNode !== node) held.node.after(parts.node);
    const traces = names.flatMap((name, place) => {
      const colour = COLOURS[place % COLOURS.length], kept = series[HELD + PARTS + name];
      return [...curves({name, ...series[PARTS + name], colour, crowd: names.length}),
        ...(kept ? marks({name: `${name}, held-out`, ...kept, colour, dash: "dot"}) : [])];
    });
    parts.draw(traces, names.map((name, place) => [COLOURS[place % COLOURS.length], name]));
  }

  return {node, update(jobs) {
    const begun = jobs.some(job => job.series.loss), told = [];
    let title = null;
    for (const [chart, field, options] of all) {
      const large = chart.node.classList.contains("large"), values = jobs.flatMap(job => job.series[field]?.y.filter(known) || []);
      const flat = !large && values.length > 1 && values.every(value => value === values[0]);
      if (flat) told.push(`${chart.title} ${chart.value(values[0])}`);
      const hidden = begun && (flat || !values.some(value => large || value)); // once there are steps: charts without data, and small ones that say one thing
      if (asked.has(chart)) (title = asked.get(chart)).hidden = true;
      if (title && !hidden) title.hidden = false;
      chart.node.style.display = hidden ? "none" : "";
      chart.draw(jobs.flatMap(job => drawn(job, field, {...options, crowd: jobs.length})));
    }
    same.hidden = !told.length;
    say(same, `The same in every step: ${told.join(", ")}.`);
    drawParts(jobs);
  }, stop() { for (const chart of [parts, ...ofPart.values(), ...all.map(([chart]) => chart)]) chart.close(); }};
}
