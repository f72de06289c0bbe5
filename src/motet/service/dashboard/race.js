// The tab of a race: its candidates, their held-out reward at each decision, and who was dropped.
import {ask} from "./api.js";
import {el, fill} from "./dom.js";

export function raceTab(job) {
  const node = el("div", {class: "card"});
  async function begin() {
    const race = await ask("GET", `/v1/races/${encodeURIComponent(job.race)}`), {headings, rows, names, verdict} = race.bracket;
    const link = (name, text) => el("a", {href: `#/job/${encodeURIComponent(race.jobs[name])}/race`, title: name}, text);
    const body = rows.map(([first, ...others], place) => el("tr", {class: names[place] === job.name ? "own" : ""},
      el("td", {}, link(names[place], first)), others.map(text => el("td", {}, text))));
    fill(node, el("h2", {}, `Race ${race.name}`), el("p", {}, verdict),
      el("div", {class: "scrolls"}, el("table", {class: "race"}, el("thead", {}, el("tr", {}, headings.map(text => el("th", {scope: "col"}, text)))), el("tbody", {}, body))));
  }
  return {node, begin, update: () => begin().catch(() => {}), stop() {}};
}
