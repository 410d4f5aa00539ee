// Attainment over the scale of the bounds: where each run's curve crosses 90 % is what 90 % of its requests would have met.
"use strict";
(() => {
  const { several, chart, line, colour, plain } = Report;
  const { curves } = DATA.extras.goodput;
  const furthest = Math.max(1, ...curves.flatMap(({ x }) => x.slice(-1))) * 1.05;  // room for the last step
  const drawn = () => curves.map(({ run, x, y }) => line(DATA.runs[run], [...x, furthest], [...y, ...y.slice(-1)], { line: { shape: "hv" },
    hovertemplate: `%{y:.2%} with bounds x%{x:.4~g}<extra>${several ? plain(DATA.runs[run].name) : ""}</extra>` }));
  chart("goodput", {
    draw: () => ({ traces: drawn(), layout: {
      xaxis: { title: { text: "scale of the bounds" }, range: [0, furthest] },
      yaxis: { range: [0, 1.01], tickvals: [0, 0.25, 0.5, 0.75, 0.9, 1], tickformat: ".0%" },
      shapes: [{ type: "line", xref: "x", yref: "paper", x0: 1, x1: 1, y0: 0, y1: 1, line: { color: colour("quiet"), width: 1, dash: "dot" } }] } }),
    rows: () => [["run", "scale", "attainment"], ...curves.flatMap(({ run, x, y }) => x.map((value, index) => [DATA.runs[run].name, value, y[index]]))],
  });
})();
