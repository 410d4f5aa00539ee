// TTFT over the turns of sessions: what a history that grows with each turn costs.
"use strict";
(() => {
  const { several, chart, line, plain } = Report;
  const { curves } = DATA.extras.turns;
  const drawn = () => curves.map(({ run, turn, p50, low, high }) => line(DATA.runs[run], turn, p50, { mode: "lines+markers",
    error_y: { type: "data", symmetric: false, thickness: 1.2, array: high.map((end, index) => (end ?? p50[index]) - p50[index]),
      arrayminus: low.map((end, index) => p50[index] - (end ?? p50[index])) },
    hovertemplate: `%{y:,.4~g} ms in turn %{x}<extra>${several ? plain(DATA.runs[run].name) : ""}</extra>` }));
  chart("turns", {
    draw: () => ({ traces: drawn(), layout: {
      xaxis: { title: { text: "turn" }, tickformat: "d", ...(curves.every(({ turn }) => turn.length <= 20) ? { dtick: 1 } : {}) },
      yaxis: { title: { text: "TTFT p50, ms" }, rangemode: "tozero" } } }),
    rows: () => [["run", "turn", "TTFT p50, ms", "from", "to"],
      ...curves.flatMap(({ run, turn, p50, low, high }) => turn.map((number, index) => [DATA.runs[run].name, number, p50[index], low[index], high[index]]))],
  });
})();
