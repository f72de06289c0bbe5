// Charts, drawn by plotly.js: the report of `motet run` contains it, the dashboard loads it for the first chart.
import {el, fill, say} from "./dom.js";
import {COLOURS} from "./palette.js";
import {measured} from "./words.js";

const SYMBOLS = [["circle", "●"], ["square", "■"], ["diamond", "◆"], ["triangle-up", "▲"], ["triangle-down", "▼"], ["pentagon", "⬟"]];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const SMOOTH_FROM = 12; // points; shorter curves are drawn as they are
const EVERY = 400; // milliseconds between drawings
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const touch = window.matchMedia("(pointer: coarse)");
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const escaped = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

/** Whether a value is not a gap. */
export const known = value => value !== null;

let loading = window.Plotly ? Promise.resolve(window.Plotly) : null;

function plotly() {
  loading ||= new Promise((resolve, reject) => {
    const script = el("script", {src: "dashboard/plotly.js"});
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => { loading = null; script.remove(); reject(new Error("plotly.js did not come")); });
    document.head.append(script);
  });
  return loading;
}

/** Colour, dash and symbol of the n-th job; jobs of the same colour differ in dash and symbol. */
export function look(place) {
  const again = Math.floor(place / COLOURS.length), [symbol, glyph] = SYMBOLS[(place + again) % SYMBOLS.length];
  return {colour: COLOURS[place % COLOURS.length], dash: DASHES[again % DASHES.length], symbol, glyph};
}

/** Exponential moving average over about a tenth of the curve, starting at the first value; gaps stay. */
export function smoothed(values) {
  const weight = Math.max(2 / (values.length / 5 + 1), 0.04);
  let mean = values.find(known);
  return values.map(value => (known(value) ? (mean += Math.min(weight, 1) * (value - mean)) : null));
}

/** Traces of values over steps: a thin measured line and a thick smoothed one, or one line for few points. A null is a gap. */
export function curves({name, x, y, colour, dash = "solid", plain = false, crowd = 1}) {
  const line = {type: "scatter", mode: "lines", x, y, name, line: {color: colour, width: 2, dash}};
  const alone = y.map((value, at) => known(value) && !known(y[at - 1] ?? null) && !known(y[at + 1] ?? null));
  if (alone.includes(true)) Object.assign(line, {mode: "lines+markers", marker: {size: alone.map(one => one ? 7 : 0), color: colour}});
  if (plain || x.length < SMOOTH_FROM) return [line];
  const faint = Math.max(.14, Math.min(.38, 1.5 / crowd));
  return [
    {...line, opacity: faint, line: {color: colour, width: 1}},
    {...line, y: smoothed(y), line: {...line.line, width: 2.6}, hoverinfo: "skip"},
  ];
}

/** A trace of sparse values, with a symbol at each. */
export const marks = ({name, x, y, colour, dash = "solid", symbol = "circle", half = null}) => [{
  type: "scatter", mode: "lines+markers", x, y, name, cliponaxis: false, ...(half && {error_y: {type: "data", array: half, thickness: 1, width: 3}}),
  line: {color: colour, width: 2, dash}, marker: {size: 8, symbol, color: colour},
}];

/** A trace of a stacked area chart. */
export const area = ({name, x, y, colour, opacity = "d0"}) => [{
  type: "scatter", mode: "lines", x, y, name, stackgroup: "all", fillcolor: colour + opacity, line: {width: 0, color: colour},
}];

/** One chart: add `node` to the page, and call `draw(traces)` for every update. */
export class Chart {
  constructor(title, note, {size = "", xTitle = "step", share = false, range = null, empty = "no data yet", latest = true} = {}) {
    Object.assign(this, {title, xTitle, share, range, traces: [], due: null, drawn: 0});
    this.latest = latest ? el("span", {class: "latest"}) : null;
    this.plot = el("div", {class: "plot none", data: {empty}});
    this.keys = el("div", {class: "keys below", hidden: true});
    this.node = el("figure", {class: `card ${size}`, data: {points: 0}},
      el("figcaption", {}, el("div", {}, el("h3", {}, title), el("p", {}, note)), this.latest), this.keys, this.plot);
    this.resized = new ResizeObserver(() => this.drawn && window.Plotly.Plots.resize(this.plot).catch(() => {}));
    this.resized.observe(this.plot);
    this.turned = () => this.soon();
    dark.addEventListener("change", this.turned);
  }

  /** Draw traces, soon. `keys` is the legend, [colour, name] or [colour, name, dash] each; shown for two or more. */
  draw(traces, keys = []) {
    this.traces = traces;
    const points = traces.reduce((sum, trace) => sum + (trace.hoverinfo === "skip" ? 0 : trace.y.filter(known).length), 0);
    this.node.dataset.points = points;
    this.plot.classList.toggle("none", points === 0);
    const alone = new Set(traces.map(trace => trace.name)).size === 1, flat = alone ? null : this.flat(); // of several traces, only a common value
    const latest = flat !== null ? `${this.value(flat)} throughout` : points && alone ? this.value(traces[0].y.findLast(known)) : "";
    if (this.latest) say(this.latest, latest);
    this.keys.hidden = keys.length < 2;
    const drawn = JSON.stringify(keys);
    if (this.keys.dataset.drawn !== drawn) fill(this.keys, keys.map(([colour, name, dash]) => el("span", {}, dash ? stroke(colour, dash) : dot(colour), name)));
    this.keys.dataset.drawn = drawn;
    this.soon();
  }

  value(number) {
    return this.share ? `${(100 * number).toFixed(number > 0 && number < .1 ? 1 : 0)} %` : measured(number);
  }

  soon() {
    this.due ||= setTimeout(() => this.paint(), Math.max(0, EVERY - (Date.now() - this.drawn)));
  }

  async paint() {
    const library = await plotly().catch(() => null);
    this.due = null;
    if (!library || (!this.drawn && this.node.dataset.points === "0") || !this.node.isConnected || !this.plot.clientWidth) return;
    this.drawn = Date.now();
    const value = this.share ? "%{y:.1%}" : "%{y:.4~g}";
    const traces = this.traces.map(({name, ...trace}) => ({
      ...trace, name: escaped(name), showlegend: false,
      hovertemplate: trace.hoverinfo === "skip" ? null : `${value}<extra>${escaped(name)}</extra>`,
    }));
    await library.react(this.plot, traces, this.layout(), {displayModeBar: false, responsive: false});
  }

  layout() {
    const soft = css("--soft"), large = /large|wide/.test(this.node.className), flat = this.flat(), range = this.range || (large && this.wide());
    const axis = {
      color: soft, gridcolor: css("--grid"), zeroline: false, linecolor: css("--line"), tickfont: {size: 11},
      fixedrange: touch.matches, automargin: true, nticks: large ? 7 : 5,
      ticklabelstandoff: 5, // keeps symbols at zero off the numbers
    };
    return {
      margin: {l: 42, r: 8, t: 12, b: 34}, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: {family: getComputedStyle(document.body).fontFamily, color: soft, size: 12},
      hovermode: "x unified", dragmode: touch.matches ? false : "zoom", uirevision: "same",
      hoverlabel: {bgcolor: css("--card"), bordercolor: css("--line"), font: {color: css("--ink"), size: 12}},
      xaxis: {...axis, showgrid: false, showline: true, title: {text: this.xTitle, font: {size: 11}, standoff: 6},
              rangemode: "tozero", unifiedhovertitle: {text: `${this.xTitle} %{x:.6~g}`}},
      yaxis: {...axis, tickformat: this.share ? ".1~%" : "", rangemode: "tozero",
              ...(range ? {range} : flat === null ? {} : {range: [Math.min(0, 2 * flat), Math.max(flat ? 0 : 1, 2 * flat)]})},
    };
  }

  /** The value if all are equal, else null: the axis is then centred on it. */
  flat() {
    const values = new Set();
    for (const trace of this.traces) for (const value of trace.y.filter(known)) if (values.add(value).size > 1) return null;
    return values.size ? [...values][0] : null;
  }

  /** The range of an axis that does not follow its curve, which would show noise as a rise; null if all values are equal. */
  wide() {
    const ends = trace => trace.y.flatMap((value, at) => known(value) ? [value - (trace.error_y?.array[at] || 0), value + (trace.error_y?.array[at] || 0)] : []);
    const values = this.traces.flatMap(ends), low = values.reduce((a, b) => Math.min(a, b), 0), high = values.reduce((a, b) => Math.max(a, b), 0);
    const pad = Math.max(.1, high - low) / 20;
    return values.length && this.flat() === null ? [low < 0 ? low - pad : 0, Math.max(high, low + .1) + pad] : null;
  }

  close() {
    dark.removeEventListener("change", this.turned);
    this.resized.disconnect();
    clearTimeout(this.due);
    if (this.drawn) window.Plotly.purge(this.plot);
  }
}

/** A line sample for the legend. */
function stroke(colour, dash) {
  const made = el("i", {class: "stroke", "aria-hidden": "true"});
  made.style.borderTop = `3px ${{dash: "dashed", dot: "dotted", dashdot: "dashed"}[dash] || "solid"} ${colour}`;
  return made;
}

/** A colour sample for the legend. */
export function dot(colour) {
  const made = el("i", {"aria-hidden": "true"});
  made.style.color = colour;
  return made;
}
