"""Style sheet and script of the report page. Both are inlined: the page loads nothing."""

STYLE = """
:root {
  --paper: #f6f7f9; --card: #ffffff; --ink: #1d2530; --quiet: #66707e; --line: #e3e7ec; --code: #f3f5f8;
  --c0: #2a78d6; --c1: #e2662f; --c2: #1a9e6d; --c3: #8a63d2; --c4: #c8920f; --c5: #7a8393;
  --c6: #c2477f; --c7: #8a5a3b;
  --good: #137a50; --good-paper: #e3f5ec; --bad: #b3372b; --bad-paper: #fceae7;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #12161c; --card: #1a2028; --ink: #e7ebf0; --quiet: #97a2b0; --line: #2b333e; --code: #141a21;
    --c0: #5b9cf0; --c1: #f0875c; --c2: #3cc794; --c3: #a98bea; --c4: #e0b94a; --c5: #98a2b1;
    --c6: #e27aa8; --c7: #b98a66;
    --good: #6fd9aa; --good-paper: #173427; --bad: #f2978c; --bad-paper: #3b211f;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 40px 0 14px; }
h3 { font-size: 14px; margin: 0 0 10px; color: var(--quiet); font-weight: 600; }
.meta { color: var(--quiet); margin: 4px 0 22px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin-bottom: 16px; }
.tile, .panel, .rollout, .sheet { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 16px; }
.tile span { color: var(--quiet); font-size: 13px; }
.tile b { display: block; font-size: 25px; font-weight: 650; line-height: 1.25; font-variant-numeric: tabular-nums; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(430px, 100%), 1fr)); gap: 14px; }
.panel { margin: 0; padding: 14px 14px 6px; position: relative; }
.panel figcaption span { color: var(--quiet); font-size: 13px; margin-left: 4px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 4px 0 0; padding: 0;
  font-size: 12.5px; color: var(--quiet); }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 5px; vertical-align: -1px;
  background: currentColor; }
.key.faint { opacity: 0.4; }
svg { display: block; width: 100%; height: auto; margin-top: 6px; overflow: visible; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .axis { stroke: var(--quiet); stroke-width: 1; opacity: 0.5; }
svg .tick { fill: var(--quiet); font-size: 11.5px; font-variant-numeric: tabular-nums; }
svg .line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .line.faint { stroke-width: 1.2; opacity: 0.38; }
svg .band { fill: currentColor; opacity: 0.14; }
svg .area { fill: currentColor; opacity: 0.85; stroke: var(--card); stroke-width: 0.8; }
svg .dot { fill: currentColor; }
svg .cross { stroke: var(--quiet); stroke-width: 1; stroke-dasharray: 3 3; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); }
.c3 { color: var(--c3); } .c4 { color: var(--c4); } .c5 { color: var(--c5); }
.c6 { color: var(--c6); } .c7 { color: var(--c7); }
#tip { position: fixed; display: none; pointer-events: none; background: var(--card); color: var(--ink); z-index: 9;
  border: 1px solid var(--line); border-radius: 8px; box-shadow: 0 4px 18px rgb(0 0 0 / 0.16); padding: 7px 11px;
  font-size: 12.5px; font-variant-numeric: tabular-nums; max-width: 320px; }
#tip table td:last-child { text-align: right; padding-left: 14px; font-weight: 600; }
.sheet { overflow-x: auto; }
.sheet table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
.sheet th, .sheet td { padding: 6px 16px; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
.sheet tr:last-child td { border-bottom: 0; }
.sheet th { color: var(--quiet); font-weight: 600; }
.sheet th:first-child, .sheet td:first-child { text-align: left; }
.sheet td:first-child, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.steps { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(430px, 100%), 1fr)); gap: 18px; }
.rollout { padding: 12px 14px; margin-bottom: 12px; }
.chips { display: flex; flex-wrap: wrap; gap: 6px; margin-bottom: 8px; font-size: 12.5px; }
.chip { background: var(--code); color: var(--quiet); border-radius: 20px; padding: 1px 10px;
  font-variant-numeric: tabular-nums; }
.chip.good { background: var(--good-paper); color: var(--good); font-weight: 600; }
.chip.bad { background: var(--bad-paper); color: var(--bad); font-weight: 600; }
.rollout pre { margin: 0; padding: 8px 10px; background: var(--code); border-radius: 7px; font-size: 12.5px;
  line-height: 1.45; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 260px; overflow-y: auto; }
.rollout pre + .who { margin-top: 8px; }
.who { color: var(--quiet); font-size: 12px; margin-bottom: 3px; }
details { margin-top: 14px; } summary { cursor: pointer; color: var(--quiet); }
details pre { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px;
  overflow-x: auto; font-size: 12.5px; }
.none { color: var(--quiet); }
@media print { body { background: #fff; } .panel, .rollout { break-inside: avoid; } }
"""

SCRIPT = """
(() => {
  const tip = document.getElementById('tip');
  const svgns = 'http://www.w3.org/2000/svg';
  const nearest = (rows, at) => rows.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
  for (const svg of document.querySelectorAll('svg[data-chart]')) {
    const chart = JSON.parse(svg.dataset.chart);
    const layer = svg.querySelector('.hover');
    const view = svg.viewBox.baseVal;
    svg.addEventListener('mousemove', event => {
      const box = svg.getBoundingClientRect();
      const [px, step] = nearest(chart.steps, (event.clientX - box.left) * view.width / box.width);
      layer.replaceChildren();
      const line = document.createElementNS(svgns, 'line');
      line.setAttribute('class', 'cross');
      for (const [name, value] of [['x1', px], ['x2', px], ['y1', 12], ['y2', view.height - 30]])
        line.setAttribute(name, value);
      layer.append(line);
      const table = document.createElement('table');
      for (const series of chart.series) {
        const point = series.points.find(p => p[0] === px);
        if (!point) continue;
        if (!chart.stack && point[2] !== null) {
          const dot = document.createElementNS(svgns, 'circle');
          dot.setAttribute('class', 'dot c' + series.colour);
          for (const [name, value] of [['cx', px], ['cy', point[2]], ['r', 3.5]]) dot.setAttribute(name, value);
          layer.append(dot);
        }
        const row = table.insertRow();
        const key = row.insertCell();
        const mark = document.createElement('i');
        mark.className = 'key c' + series.colour;
        key.append(mark, series.label);
        row.insertCell().textContent = point[1];
      }
      tip.replaceChildren('step ' + step, table);
      tip.style.display = 'block';
      const right = event.clientX + 18 + tip.offsetWidth > innerWidth;
      tip.style.left = (right ? event.clientX - 14 - tip.offsetWidth : event.clientX + 18) + 'px';
      tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + 'px';
    });
    svg.addEventListener('mouseleave', () => { layer.replaceChildren(); tip.style.display = 'none'; });
  }
})();
"""
