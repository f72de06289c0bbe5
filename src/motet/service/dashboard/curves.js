// A job's curves.
import {Chart, COLOURS, curves, marks} from "./charts.js";
import {add, el} from "./dom.js";
import {partNames, SMALL, values} from "./fields.js";

/** The tab: `update(lines)` whenever there are more. */
export function curvesTab() {
  const reward = new Chart("Training reward", "mean of each step’s rollouts, thin; smoothed, thick", {size: "large", empty: "the first step is under way"});
  const held = new Chart("Held-out reward", "the same problems at every evaluation", {size: "large", xTitle: "version", empty: "no evaluation yet"});
  const parts = new Chart("Reward parts", "mean of each reward; dotted: held-out", {size: "large", latest: false});
  const small = SMALL.map(([field, title, note, options = {}]) => [field, options, new Chart(title, note, options)]);
  const node = el("div", {class: "charts"});
  add(node, reward.node, held.node, small.map(([, , chart]) => chart.node));
  const accent = COLOURS[0];

  function drawParts(lines) {
    const names = partNames(lines);
    if (names.length < 2) return;
    if (parts.node.parentNode !== node) held.node.after(parts.node);
    node.classList.add("parted");
    const traces = names.flatMap((name, place) => {
      const colour = COLOURS[place % COLOURS.length];
      const trained = values(lines, line => line.reward_parts?.[name]), kept = values(lines, line => line.eval?.reward_parts?.[name]);
      return [...(trained.x.length ? curves({name, ...trained, colour, crowd: names.length}) : []),
        ...(kept.x.length ? marks({name: `${name}, held-out`, ...kept, colour, dash: "dot"}) : [])];
    });
    parts.draw(traces, names.map((name, place) => [COLOURS[place % COLOURS.length], name]));
  }

  return {node, update(lines) {
    const one = (chart, read, {plain, joined} = {}) => {
      const found = values(lines, read, joined);
      chart.draw(found.x.length ? curves({name: chart.share ? "share" : "value", ...found, colour: accent, plain}) : []);
    };
    one(reward, line => line.reward);
    const kept = values(lines, line => line.eval?.reward);
    held.draw(kept.x.length ? marks({name: "held-out", ...kept, colour: accent}) : []);
    drawParts(lines);
    for (const [field, options, chart] of small) one(chart, line => line[field], options);
  }, stop() { for (const chart of [reward, held, parts, ...small.map(([, , chart]) => chart)]) chart.close(); }};
}
