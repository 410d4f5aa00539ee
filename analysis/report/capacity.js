// Draws the Pareto set of `loadgen plan-capacity`: cost, or throughput per GPU, against speed per user. A click on a point
// opens the commands of its configuration.
"use strict";
(() => {
  const { DATA: data, chart, colour, fade, plain, element, logarithmic } = Report;
  const pareto = data.pareto;
  if (!pareto) return;

  const symbol = (point) => (point.meets ? "circle" : "circle-open");
  const legendEntry = (name, style) => ({ type: "scatter", x: [null], y: [null], name, hoverinfo: "skip", ...style });

  function draw() {
    const quiet = colour("quiet");
    const { points } = pareto;
    const groups = [...new Set(points.map((point) => point.group))];
    const ink = (point) => colour(point.colour);
    const line = { type: "scatter", mode: "lines", name: "Pareto set", showlegend: false, hoverinfo: "skip",
      x: points.map((point) => point.speed), y: points.map((point) => point.height), line: { color: fade(quiet, "90"), width: 1.5 } };
    const dots = { type: "scatter", mode: "markers+text", name: "configurations", showlegend: false, cliponaxis: false, textposition: "top center",
      x: points.map((point) => point.speed), y: points.map((point) => point.height), text: points.map((point) => point.letter),
      customdata: points.map((point) => point.letter), hovertext: points.map((point) => point.hover.map(plain).join("<br>")), hoverinfo: "text",
      textfont: { size: 12, color: points.map(ink) },
      marker: { size: 11, color: points.map(ink), symbol: points.map(symbol), line: { width: 2, color: points.map(ink) } } };
    const legend = groups.map((group) => legendEntry(plain(group), { mode: "markers", marker: { size: 10, color: ink(points.find((point) => point.group === group)) } }));
    if (points.some((point) => !point.meets)) legend.push(legendEntry("misses an objective", { mode: "markers", marker: { size: 10, color: quiet, symbol: "circle-open", line: { width: 2, color: quiet } } }));
    const yaxis = pareto.is_cost ? { type: "log", ...logarithmic([{ x: line.y }]) } : { rangemode: "tozero" };
    return { traces: [line, dots, ...legend],
      layout: { showlegend: true, xaxis: { title: { text: "tokens/s per user (1 / median TPOT)" }, rangemode: "tozero" }, yaxis: { title: { text: pareto.y_title }, ...yaxis } } };
  }

  const head = ["point", "configuration", "tokens/s per user", pareto.y_title, "TTFT p99, s", "objectives"];
  const rows = () => [head, ...pareto.points.map((point) => [point.letter, point.name, point.speed, point.height, point.ttft, point.meets ? "met" : "missed"])];
  chart("pareto", { draw, rows });

  // Opens the commands of a point, and moves the focus there.
  function openCommands(letter) {
    const summaries = [...document.querySelectorAll("#commands details > summary")];
    const summary = summaries.find(({ textContent }) => textContent.trim().startsWith(`${letter}:`));
    if (!summary) return;
    summary.parentElement.open = true;
    summary.scrollIntoView({ block: "center" });
    summary.focus({ preventScroll: true });
  }

  function addClickHandler() {
    if (!element("pareto").on) return void setTimeout(addClickHandler, 100); // the chart is drawn only when it comes into view
    element("pareto").on("plotly_click", ({ points: [{ customdata }] }) => { if (customdata) openCommands(customdata); });
  }
  addClickHandler();
})();
