// The ratio of each figure of B to A's, with its interval and the margin within which no difference matters.
"use strict";
(() => {
  const { chart, colour, fade } = Report;
  const { rows, margin } = DATA.comparison;
  const outcomes = { better: "good", worse: "bad", "no difference": "ink", "inconclusive": "badge" };
  const symbols = { better: "triangle-up", worse: "triangle-down", "no difference": "circle", "inconclusive": "circle-open" };

  function ratios() {
    const traces = Object.keys(outcomes).map((outcome) => {
      const own = rows.filter((row) => row.outcome === outcome);
      return {
        type: "scatter", mode: "markers", name: outcome, x: own.map((row) => row.ratio), y: own.map((row) => row.figure),
        marker: { size: 10, color: colour(outcomes[outcome]), symbol: symbols[outcome] },
        error_x: { type: "data", symmetric: false, array: own.map((row) => row.high - row.ratio),
          arrayminus: own.map((row) => row.ratio - row.low), color: colour(outcomes[outcome]), thickness: 2, width: 5 },
        hovertemplate: "%{y}: %{x:.2%}<extra></extra>",
      };
    }).filter((trace) => trace.x.length);
    const band = { type: "rect", xref: "x", yref: "paper", x0: 1 - margin, x1: 1 + margin, y0: 0, y1: 1, line: { width: 0 },
      fillcolor: fade(colour("quiet"), "26"), layer: "below" };
    const even = { type: "line", xref: "x", yref: "paper", x0: 1, x1: 1, y0: 0, y1: 1, line: { color: colour("quiet"), width: 1, dash: "dot" } };
    return { traces, layout: { shapes: [band, even], showlegend: true, margin: { l: 48, r: 16, t: 34, b: 44 },
      xaxis: { title: { text: "B / A" }, tickformat: ".0%", tickangle: 0, nticks: innerWidth < 600 ? 4 : 7 },
      yaxis: { autorange: "reversed", automargin: true, type: "category", categoryorder: "array", categoryarray: rows.map((row) => row.figure), title: { text: "" } } } };
  }

  chart("comparison", {
    draw: ratios,
    rows: () => [["figure", "B / A", "from", "to", "B is"], ...rows.map((row) => [row.figure, row.ratio, row.low, row.high, row.outcome])],
  });
})();
