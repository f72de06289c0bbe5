"""The page's script: hands the curves to plotly.js, follows the colour scheme, and lets the legend switch jobs."""

SCRIPT = r"""
"use strict";
const report = JSON.parse(document.getElementById("report-data").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const touch = window.matchMedia("(pointer: coarse)").matches;
const hidden = new Set();
const text = value => value.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function trace(chart, curve) {
  const job = curve.job === null ? null : report.jobs[curve.job];
  const colour = job ? job.colour : (report.device[curve.label] || css("--soft"));
  const name = text(curve.label);
  const value = chart.share ? "%{y:.1%}" : "%{y:.4~g}";
  const made = {
    type: "scatter", mode: "lines", x: curve.x, y: curve.y, name, showlegend: false,
    line: {color: colour, width: 2, dash: job ? job.dash : "solid"},
    hovertemplate: value + "<extra>" + name + "</extra>",
    visible: !hidden.has(curve.job),
  };
  const faint = Math.max(.12, Math.min(.38, 1.5 / report.jobs.length));
  if (curve.kind === "raw") Object.assign(made, {opacity: faint, line: {color: colour, width: 1}});
  if (curve.kind === "smooth") Object.assign(made, {hoverinfo: "skip", hovertemplate: null, line: {...made.line, width: 2.6}});
  const alone = curve.y.map((y, at) => y !== null && curve.y[at - 1] == null && curve.y[at + 1] == null);
  if (alone.includes(true)) { // between gaps
    Object.assign(made, {mode: "lines+markers", marker: {size: alone.map(one => one ? 5 : 0), color: colour}});
  }
  if (curve.kind === "markers") {
    made.mode = "lines+markers";
    made.cliponaxis = false;
    made.marker = {size: 8, symbol: job ? job.symbol : "circle", color: colour, line: {width: 1.5, color: css("--card")}};
  }
  if (curve.kind === "area") {
    const opacity = curve.label === "idle" ? "40" : "d0";
    Object.assign(made, {stackgroup: "device", fillcolor: colour + opacity, line: {width: 0, color: colour}});
  }
  return made;
}

function layout(chart) {
  const soft = css("--soft");
  const axis = {
    color: soft, gridcolor: css("--grid"), zeroline: false, linecolor: css("--line"), tickfont: {size: 11},
    fixedrange: touch, automargin: true, nticks: chart.large ? 7 : 5,
  };
  const range = chart.flat !== null ? {range: [Math.min(0, 2 * chart.flat), Math.max(1, 2 * chart.flat)]} : {};
  const stacked = chart.curves.some(curve => curve.kind === "area") ? {range: [0, 1]} : {};
  return {
    margin: {l: 42, r: 8, t: 12, b: 34}, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {family: getComputedStyle(document.body).fontFamily, color: soft, size: 12},
    hovermode: "x unified", dragmode: touch ? false : "zoom",
    hoverlabel: {bgcolor: css("--card"), bordercolor: css("--line"), font: {color: css("--ink"), size: 12}},
    xaxis: {...axis, showgrid: false, showline: true, title: {text: chart.x_title, font: {size: 11}, standoff: 6},
            rangemode: "tozero", unifiedhovertitle: {text: chart.x_title + " %{x:.6~g}"}},
    yaxis: {...axis, tickformat: chart.share ? ".0%" : "", rangemode: chart.large ? "normal" : "tozero", ...range, ...stacked},
  };
}

function draw() {
  for (const chart of report.charts) {
    const place = document.getElementById("plot-" + chart.key);
    if (!place) continue;
    Plotly.react(place, chart.curves.map(curve => trace(chart, curve)), layout(chart),
                 {displayModeBar: false});
  }
}

function show() {
  for (const chart of report.charts) {
    const place = document.getElementById("plot-" + chart.key);
    if (place) Plotly.restyle(place, {visible: chart.curves.map(curve => !hidden.has(curve.job))});
  }
  for (const element of document.querySelectorAll("[data-job]")) {
    const off = hidden.has(Number(element.dataset.job));
    if (element.matches(".chip")) element.setAttribute("aria-pressed", String(!off));
    else element.classList.toggle("off", off);
  }
}

document.querySelector(".legend").addEventListener("click", event => {
  const chip = event.target.closest(".chip");
  if (!chip) return;
  const job = Number(chip.dataset.job);
  if (event.shiftKey || event.altKey) {
    const alone = hidden.size === report.jobs.length - 1 && !hidden.has(job);
    hidden.clear();
    if (!alone) report.jobs.forEach((_, other) => other !== job && hidden.add(other));
  } else if (!hidden.delete(job)) hidden.add(job);
  show();
});
dark.addEventListener("change", draw);
draw();
const resized = new ResizeObserver(entries => entries.forEach(entry => Plotly.Plots.resize(entry.target)));
document.querySelectorAll(".plot").forEach(place => resized.observe(place));
"""
