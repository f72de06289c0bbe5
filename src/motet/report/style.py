"""The stylesheet of the report. Light or dark as the reader's system says; one column on a phone."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --ink: #1b1f24; --soft: #5b636e; --faint: #6f7782; --line: #e3e5e8; --grid: #eceef0;
  --well: #f4f5f6; --good: #0a7a55; --bad: #b3261e; --warm: #8a5a00; --shadow: 0 1px 2px rgb(20 25 30 / 5%);
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1215; --card: #16191d; --ink: #e8eaed; --soft: #a3abb5; --faint: #8a929d; --line: #2a2f36; --grid: #242930;
    --well: #1c2025; --good: #4cc38a; --bad: #ff8a80; --warm: #e3b341; --shadow: none;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 1180px; margin: 0 auto; padding: 40px 28px 72px; }
pre, .prompt, .answer { unicode-bidi: plaintext; }
h1 { font-size: 34px; line-height: 1.15; letter-spacing: -.02em; margin: 2px 0 8px; font-weight: 680; overflow-wrap: anywhere; }
h2 { font-size: 21px; letter-spacing: -.01em; margin: 52px 0 4px; font-weight: 650; }
h3 { font-size: 15px; margin: 0; font-weight: 620; }
p { margin: 0; }
.eyebrow { color: var(--faint); font-size: 12px; letter-spacing: .09em; text-transform: uppercase; font-weight: 600; }
.lead { color: var(--soft); font-size: 16px; }
.about { color: var(--soft); margin-bottom: 16px; max-width: 72ch; }
.mono, pre, code { font-family: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
.soft { color: var(--soft); } .good { color: var(--good); } .bad { color: var(--bad); } .warm { color: var(--warm); }
.swatch { flex: none; vertical-align: -2px; margin-right: 8px; }

.legend {
  position: sticky; top: 0; z-index: 5; display: flex; flex-wrap: wrap; gap: 8px; padding: 12px 0; margin-top: 28px;
  background: var(--page); border-bottom: 1px solid var(--line); max-height: 34vh; overflow-y: auto;
}
.chip {
  display: inline-flex; align-items: center; max-width: 100%; padding: 5px 13px 5px 10px; border: 1px solid var(--line);
  border-radius: 999px; background: var(--card); color: var(--ink); font: inherit; font-size: 13.5px; cursor: pointer;
}
.chip span { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.chip:hover { border-color: var(--faint); }
.chip:focus-visible, summary:focus-visible { outline: 2px solid #2e6be6; outline-offset: 2px; }
.chip[aria-pressed=false] { background: none; color: var(--faint); text-decoration: line-through; }
.chip[aria-pressed=false] .swatch { opacity: .3; }

table { width: 100%; border-collapse: collapse; margin-top: 12px; }
th { text-align: left; font-size: 12px; font-weight: 600; color: var(--faint); padding: 8px 14px 8px 0; white-space: nowrap; }
td { padding: 11px 14px 11px 0; border-top: 1px solid var(--line); vertical-align: middle; }
td:last-child, th:last-child { padding-right: 0; }
td.job { font-weight: 620; overflow-wrap: anywhere; min-width: 150px; padding-left: 24px; text-indent: -23px; }
td.path { font-size: 12px; overflow-wrap: anywhere; color: var(--soft); user-select: all; }
tr.reason td { border-top: 0; padding: 0 0 13px 26px; font-size: 13.5px; overflow-wrap: anywhere; }
tr.off { opacity: .38; }
.state { font-size: 13px; font-weight: 600; white-space: nowrap; }
.range { display: block; overflow: visible; }
.range .track { stroke: var(--line); stroke-width: 4; stroke-linecap: round; }
.range .hollow { fill: var(--page); stroke-width: 2; }

.charts { display: grid; gap: 16px; margin-top: 14px; }
.charts.two { grid-template-columns: repeat(2, minmax(0, 1fr)); }
.charts.three { grid-template-columns: repeat(3, minmax(0, 1fr)); }
figure {
  margin: 0; padding: 15px 16px 6px; background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  box-shadow: var(--shadow); min-width: 0; display: flex; flex-direction: column;
}
figcaption p { color: var(--soft); font-size: 13px; line-height: 1.4; }
.plot { margin-top: auto; min-width: 0; }
.two .plot { height: 330px; } .three .plot { height: 190px; }
.keys { display: inline-flex; gap: 12px; flex-wrap: wrap; }
.keys i { display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 5px; }
.empty { display: grid; place-items: center; height: 120px; color: var(--faint); font-size: 13.5px; }
.static { background: var(--card); border-radius: 12px; overflow-x: auto; }

details { border-top: 1px solid var(--line); }
details:last-of-type { border-bottom: 1px solid var(--line); }
summary { display: flex; align-items: center; padding: 13px 0; cursor: pointer; list-style: none; font-weight: 620; }
summary::-webkit-details-marker { display: none; }
summary .about-job {
  margin-left: auto; padding-left: 12px; font-weight: 400; font-size: 13.5px; color: var(--soft); text-align: right;
}
summary::after { content: "+"; width: 1.4em; text-align: right; color: var(--faint); font-size: 18px; line-height: 1; }
details[open] > summary::after { content: "–"; }
.inside { padding: 0 0 22px; }
.sample { border: 1px solid var(--line); border-radius: 12px; background: var(--card); margin-bottom: 12px; overflow: hidden; }
.problem { padding: 12px 16px; border-bottom: 1px solid var(--line); display: flex; gap: 24px; justify-content: space-between; }
.problem .prompt { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 14em; overflow-y: auto; font-weight: 550; }
.problem .answer { text-align: right; max-width: 40%; overflow-wrap: anywhere; max-height: 14em; overflow-y: auto; }
.label { display: block; font-size: 12px; color: var(--faint); font-weight: 500; }
.sides { display: grid; grid-template-columns: 1fr 1fr; }
.side { padding: 11px 16px 14px; min-width: 0; }
.side + .side { border-left: 1px solid var(--line); }
.side header { display: flex; justify-content: space-between; gap: 12px; margin-bottom: 7px; }
.side header, .side p { font-size: 13px; color: var(--soft); }
.side header b { color: var(--ink); font-variant-numeric: tabular-nums; }
.side pre { margin: 0; font-size: 13px; line-height: 1.5; max-height: 22em; overflow-y: auto; }
.side pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.side p.bad { color: var(--bad); } .side p.warm { color: var(--warm); }
.side pre + pre { margin-top: 8px; padding-top: 8px; border-top: 1px dashed var(--line); }
pre.config { margin: 0; padding: 14px 16px; background: var(--well); border-radius: 12px; font-size: 12.5px; overflow-x: auto; }
footer { margin-top: 56px; color: var(--faint); font-size: 13px; }

@media (max-width: 980px) { .charts.three { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
@media (max-width: 760px) {
  main { padding: 24px 16px 48px; }
  h1 { font-size: 27px; } h2 { margin-top: 40px; }
  .charts.two, .charts.three, .sides { grid-template-columns: minmax(0, 1fr); }
  .two .plot { height: 260px; } .three .plot { height: 170px; }
  .legend { flex-wrap: nowrap; overflow-x: auto; margin: 20px -16px 0; padding: 10px 16px; scrollbar-width: none; }
  .chip { flex: none; max-width: 70vw; }
  .side + .side { border-left: 0; border-top: 1px solid var(--line); }
  .problem { flex-direction: column; gap: 8px; } .problem .answer { text-align: left; max-width: none; }
  thead { display: none; }
  table, tbody, tr, td { display: block; }
  tr { border-top: 1px solid var(--line); padding: 12px 0; }
  tr.reason { border-top: 0; padding: 0; } tr.reason td { padding: 0 0 12px; }
  td { border: 0; padding: 2px 0; display: flex; justify-content: space-between; gap: 16px; }
  td.job { font-size: 16.5px; justify-content: flex-start; align-items: center; gap: 0; padding-left: 0; text-indent: 0; }
  td[data-label]::before { content: attr(data-label); color: var(--faint); font-size: 13px; flex: none; }
  td.path { text-align: right; } td.wide { display: none; }
}
@media print { .legend { position: static; } details > .inside { display: block; } }
"""
