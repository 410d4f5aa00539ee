// Draws the ratio B / A of each figure with its interval, and the margin within which a difference does not matter.
"use strict";
(() => {
  const { chart, colour, fade } = Report;
  const { rows, margin } = DATA.comparison;
  const outcomes = { better: "good", worse: "bad", "no difference": "ink", "inconclusive": "badge" };
  const symbols = { better: "triangle-up", worse: "triangle-down", "no difference": "circle", "inconclusive": "circle-open" };

  function ratios() {
    const traces = Object.keys(outcomes).map((outcome) => {
      const matching = rows.filter((row) => row.outcome === outcome);
      return {
        type: "scatter", mode: "markers", name: outcome, x: matching.map((row) => row.ratio), y: matching.map((row) => row.figure),
        marker: { size: 10, color: colour(outcomes[outcome]), symbol: symbols[outcome] },
        error_x: { type: "data", symmetric: false, array: matching.map((row) => row.high - row.ratio),
          arrayminus: matching.map((row) => row.ratio - row.low), color: colour(outcomes[outcome]), thickness: 2, width: 5 },
        hovertemplate: "%{y}: %{x:.2%}<extra></extra>",
      };
    }).filter((trace) => trace.x.length);
    const marginBand = { type: "rect", xref: "x", yref: "paper", x0: 1 - margin, x1: 1 + margin, y0: 0, y1: 1, line: { width: 0 },
      fillcolor: fade(colour("quiet"), "26"), layer: "below" };
    const equalLine = { type: "line", xref: "x", yref: "paper", x0: 1, x1: 1, y0: 0, y1: 1, line: { color: colour("quiet"), width: 1, dash: "dot" } };
    return { traces, layout: { shapes: [marginBand, equalLine], showlegend: true, margin: { l: 48, r: 16, t: 34, b: 44 },
      xaxis: { title: { text: "B / A" }, tickformat: ".0%", tickangle: 0, nticks: innerWidth < 600 ? 4 : 7 },
      yaxis: { autorange: "reversed", automargin: true, type: "category", categoryorder: "array", categoryarray: rows.map((row) => row.figure), title: { text: "" } } } };
  }

  chart("comparison", {
    draw: ratios,
    rows: () => [["figure", "B / A", "from", "to", "B is"], ...rows.map((row) => [row.figure, row.ratio, row.low, row.high, row.outcome])],
  });
})();
