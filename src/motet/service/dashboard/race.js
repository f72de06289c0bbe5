// The tab of a race: its candidates, their held-out reward at each decision, and who was dropped.
import {ask} from "./api.js";
import {el, fill} from "./dom.js";
import {count, measured} from "./words.js";

const WORDS = {leads: "leads", "goes on": "continues", worse: "dropped: worse", dropped: "dropped: not shown worse", failed: "failed or ended"};
const short = name => name.replace(/^.*-c=/, "").replace(/-.*$/, "");

const copiesOf = record => new Map(record.rungs.flatMap(rung => rung.copies).map(copy => [copy.name, copy]));

/** The settings with which a candidate began; a copy has those of the candidate that it continues. */
function settings(record, copies, name) {
  while (copies.has(name)) name = copies.get(name).of;
  return record.values[name];
}

/** One row for each candidate, the furthest first. */
function rows(record, copies) {
  const names = [...record.rungs].reverse().flatMap(rung => rung.standings.map(one => one.name));
  return [...new Set([...names, ...Object.keys(record.values), ...copies.keys()])].map(name => {
    const mine = record.rungs.map(rung => rung.standings.find(one => one.name === name));
    const place = mine.findLastIndex(Boolean), last = mine[place], end = record.outcome;
    let text = last ? `${WORDS[last.verdict]} at v${record.rungs[place].version}` : "";
    if (end && end.finalist === name) text = end.low > 0 ? "winner" : "best, not confirmed";
    else if (end && (!last || ["leads", "goes on"].includes(last.verdict))) text = "finalist";
    return {name, means: mine.map(one => Number.isFinite(one?.mean) ? measured(one.mean) : ""), text};
  });
}

function verdict(race) {
  const {record} = race, end = record.outcome;
  if (race.failure) return race.failure;
  if (!end) return `${record.rungs.length} of ${record.plan.length} decisions are made.`;
  if (!end.finalist) return "No winner: every candidate failed or was ended.";
  const gain = Number.isFinite(end.low) ? `gain ${measured(end.gain)} (${measured(end.low)} to ${measured(end.high)})` : "gain unknown";
  const said = end.low > 0 ? `Winner: ${end.finalist}, version ${end.version}` : `No winner: ${end.finalist} is not shown better than the start`;
  return `${said}, on rows that no decision used: ${gain}. All candidates took ${count(end.tokens)} tokens.`;
}

export function raceTab(job) {
  const node = el("div", {class: "card"});
  async function begin() {
    const race = await ask("GET", `/v1/races/${encodeURIComponent(job.race)}`), {record} = race, copies = copiesOf(record);
    const fields = [...new Set(Object.values(record.values).flatMap(given => Object.keys(given)))];
    const heads = ["candidate", ...(copies.size ? ["copy of"] : []), "decision", ...fields.map(field => field.split(".").at(-1)), ...record.rungs.map(rung => `v${rung.version}`)];
    const cell = value => el("td", {}, value === undefined ? "" : typeof value === "number" ? String(value) : typeof value === "string" ? value : JSON.stringify(value));
    const of = copy => copy ? `${short(copy.of)} at step ${copy.step}, lr × ${copy.factor}` : "";
    const body = rows(record, copies).map(row => el("tr", {class: row.name === job.name ? "own" : ""},
      el("td", {}, el("a", {href: `#/job/${encodeURIComponent(race.jobs[row.name])}/race`, title: row.name}, short(row.name))),
      copies.size ? cell(of(copies.get(row.name))) : [], cell(row.text), fields.map(field => cell(settings(record, copies, row.name)[field])), row.means.map(cell)));
    fill(node, el("h2", {}, `Race ${race.name}`), el("p", {}, verdict(race)),
      el("div", {class: "scrolls"}, el("table", {class: "race"}, el("thead", {}, el("tr", {}, heads.map(text => el("th", {scope: "col"}, text)))), el("tbody", {}, body))));
  }
  return {node, begin, update: () => begin().catch(() => {}), stop() {}};
}
