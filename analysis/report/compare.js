// Draws the ratio B / A of each figure with its interval, and the margin within which a difference does not matter.
"use strict";
(() => {
  const { chart, colour, fade, logarithmic } = Report;
  const { rows, margin, range } = DATA.comparison; // `range`: the ends of a logarithmic axis, or null for a linear one
  const outcomes = { better: "good", worse: "bad", "no difference": "ink", "inconclusive": "badge" };
  const symbols = { better: "triangle-up", worse: "triangle-down", "no difference": "circle", "inconclusive": "circle-open" };
  const factor = (value) => `${value.toLocaleString("en", { maximumSignificantDigits: 4 })}x`;

  // Returns the end of an interval that the axis can show.
  const shown = (value) => range === null ? value : Math.min(Math.max(value, range[0]), range[1]);
  const interval = ({ low, high }) => low === null ? "no interval" : `95% CI ${factor(Math.max(0, low))}\u2013${factor(high)}`;

  // Returns the points with an outcome. Points without an interval are a trace of their own, because an empty error bar
  // would be drawn as a short line that looks like a very narrow interval.
  function points(outcome, known) {
    const matching = rows.filter((row) => row.outcome === outcome && (row.low !== null) === known);
    const bars = { type: "data", symmetric: false, array: matching.map((row) => shown(row.high) - row.ratio),
      arrayminus: matching.map((row) => row.ratio - shown(row.low)), color: colour(outcomes[outcome]), thickness: 2, width: 5 };
    return {
      type: "scatter", mode: "markers", name: known ? outcome : `${outcome}, no interval`,
      x: matching.map((row) => row.ratio), y: matching.map((row) => row.figure),
      marker: { size: 10, color: colour(outcomes[outcome]), ...(known ? { symbol: symbols[outcome] } : { symbol: "x-thin", line: { width: 2, color: colour(outcomes[outcome]) } }) },
      ...(known ? { error_x: bars } : {}),
      text: matching.map((row) => `${row.figure}: ${factor(row.ratio)}, ${interval(row)}`), hovertemplate: "%{text}<extra></extra>",
    };
  }

  // Returns an arrow at the edge of the chart for each interval that continues beyond it.
  function arrows() {
    const cut = range === null ? [] : rows.filter((row) => row.low !== null).flatMap((row) => [
      ...(row.low < range[0] ? [{ row, x: range[0], symbol: "triangle-left" }] : []),
      ...(row.high > range[1] ? [{ row, x: range[1], symbol: "triangle-right" }] : []),
    ]);
    return { type: "scatter", mode: "markers", name: "arrows", showlegend: false, hoverinfo: "skip", cliponaxis: false,
      x: cut.map(({ x }) => x), y: cut.map(({ row }) => row.figure),
      marker: { size: 11, symbol: cut.map(({ symbol }) => symbol), color: cut.map(({ row }) => colour(outcomes[row.outcome])) } };
  }

  function ratios() {
    const traces = [...Object.keys(outcomes).flatMap((outcome) => [points(outcome, true), points(outcome, false)]), arrows()].filter((trace) => trace.x.length);
    const marginBand = { type: "rect", xref: "x", yref: "paper", x0: 1 - margin, x1: 1 + margin, y0: 0, y1: 1, line: { width: 0 },
      fillcolor: fade(colour("quiet"), "26"), layer: "below" };
    const equalLine = { type: "line", xref: "x", yref: "paper", x0: 1, x1: 1, y0: 0, y1: 1, line: { color: colour("quiet"), width: 1, dash: "dot" } };
    const scale = range === null ? { nticks: innerWidth < 600 ? 4 : 7 }
      : { type: "log", range: range.map(Math.log10), ...logarithmic([{ x: range }]) };
    return { traces, layout: { shapes: [marginBand, equalLine], showlegend: true, margin: { l: 48, r: 16, t: 34, b: 44 },
      xaxis: { title: { text: range === null ? "B / A" : "B / A, logarithmic" }, tickangle: 0, ...scale },
      yaxis: { autorange: "reversed", automargin: true, type: "category", categoryorder: "array", categoryarray: rows.map((row) => row.figure), title: { text: "" } } } };
  }

  chart("comparison", {
    draw: ratios,
    rows: () => [["figure", "B / A", "from", "to", "B is"], ...rows.map((row) => [row.figure, row.ratio, row.low, row.high, row.outcome])],
  });
})();
