// Draws the charts of a matrix: bars per platform and server, and latency distributions per platform and per server.
"use strict";
(() => {
  const { DATA: data, chart, draw, colour, fade, plain } = Report;
  const checked = (name) => document.querySelector(`input[name=${name}]:checked`).value;
  const figureOf = () => data.figures.find((figure) => figure.name === document.getElementById("figure").value);
  const metricOf = () => data.metrics.find((metric) => metric.name === checked("metric"));
  const legend = { showlegend: true, margin: { l: 72, r: 14, t: 40, b: 48 } };
  const cellsOf = ({ cells }) => cells.map((index) => data.cells[index]);

  // Draws one trace of bars per server, with one bar per platform. The dots are the repeats.
  function bars(group) {
    const figure = figureOf();
    const cells = cellsOf(group);
    const platforms = [...new Set(cells.map((cell) => cell.platform))];
    const traces = [];
    for (const server of new Set(cells.map((cell) => cell.server))) {
      const serverCells = platforms.map((platform) => cells.find((cell) => cell.server === server && cell.platform === platform))
        .filter((cell) => cell && cell.figures[figure.name].mean !== null);
      if (!serverCells.length) continue;
      const results = serverCells.map((cell) => cell.figures[figure.name]);
      const errors = (side) => results.map(({ ci95, mean }) => ci95 === null ? 0 : Math.abs(ci95[side] - mean) * figure.factor);
      const hasIntervals = results.some(({ ci95 }) => ci95 !== null);
      const means = results.map(({ mean }) => mean * figure.factor);
      const name = plain(server);
      const barColour = colour(serverCells[0].colour);
      traces.push({ type: "bar", name, offsetgroup: name, legendgroup: name, x: serverCells.map((cell) => plain(cell.platform)), y: means,
        marker: { color: fade(barColour, "b8"), line: { color: barColour, width: 1 } },
        error_y: { visible: hasIntervals, type: "data", symmetric: false, array: errors(1), arrayminus: errors(0), color: colour("ink"), thickness: 1.2, width: 4 },
        hovertemplate: `%{y:.4~g} ${figure.unit}<extra>${name}, %{x}</extra>` });
      traces.push({ type: "scatter", mode: "markers", name, offsetgroup: name, legendgroup: name, showlegend: false,
        x: serverCells.flatMap((cell) => cell.figures[figure.name].values.map(() => plain(cell.platform))),
        y: results.flatMap(({ values }) => values.map((value) => value * figure.factor)),
        marker: { color: colour("ink"), size: 5, opacity: 0.75 },
        hovertemplate: `%{y:.4~g} ${figure.unit}<extra>one repeat of ${name}, %{x}</extra>` });
    }
    return { traces, layout: { ...legend, barmode: "group", scattermode: "group", bargap: 0.28, bargroupgap: 0.08,
      xaxis: { type: "category", categoryarray: platforms.map(plain), categoryorder: "array" },
      yaxis: { title: { text: `${figure.title}, ${figure.unit}` }, rangemode: "tozero" } } };
  }

  function barRows(group) {
    const figure = figureOf();
    return [["server", "platform", "figure", "unit", "mean", "low", "high", "repeats"],
      ...cellsOf(group).map((cell) => {
        const { mean, ci95, values } = cell.figures[figure.name];
        const scaled = (value) => value === null ? null : value * figure.factor;
        return [cell.server, cell.platform, figure.name, figure.unit, scaled(mean), scaled(ci95?.[0] ?? null), scaled(ci95?.[1] ?? null), values.length];
      })];
  }

  // Draws the distributions of a chart's cells. Servers differ in colour and platforms in line style. Thin lines are
  // single repeats.
  function distributions(spec) {
    const metric = metricOf();
    const log = checked("axis") === "log";
    const traces = cellsOf(spec).flatMap((cell) => {
      const name = plain(spec.kind === "host" ? cell.server : cell.platform);
      const dash = spec.kind === "host" ? cell.server_dash : cell.host_dash;
      const { pooled, runs } = cell.curves[metric.name];
      const line = (curve, style) => ({ type: "scatter", mode: curve.x.length > 1 ? "lines" : "markers", name, legendgroup: name,
        x: curve.x.map((value) => value * metric.factor), y: curve.y, ...style });
      const repeats = runs.map((run) => line(run, { showlegend: false, hoverinfo: "skip", opacity: 0.45,
        line: { color: colour(cell.colour), width: 1, shape: "hv", dash } }));
      return [...repeats, line(pooled, { line: { color: colour(cell.colour), width: 2.2, shape: "hv", dash },
        hovertemplate: `%{y:.2%} within %{x:.4~g} ${metric.unit}<extra>${name}</extra>` })];
    });
    return { traces, layout: { ...legend,
      xaxis: { title: { text: `${metric.short}, ${metric.unit}` }, type: log ? "log" : "linear", ...(log ? { dtick: "D2" } : { rangemode: "tozero" }) },
      yaxis: { range: [0, 1.01], tickvals: [0, 0.25, 0.5, 0.75, 0.9, 1], tickformat: ".0%" } } };
  }

  function distributionRows(spec) {
    const metric = metricOf();
    return [["server", "platform", metric.name, "share"],
      ...cellsOf(spec).flatMap((cell) => cell.curves[metric.name].pooled.x.map((x, index) =>
        [cell.server, cell.platform, x, cell.curves[metric.name].pooled.y[index]]))];
  }

  for (const group of data.groups) {
    chart(group.bars, { draw: () => bars(group), rows: () => barRows(group) });
    for (const spec of group.charts) chart(spec.id, { draw: () => distributions(spec), rows: () => distributionRows(spec) });
  }
  const redraw = (names) => names.forEach((name) => draw(name));
  document.getElementById("figure")?.addEventListener("change", () => redraw(data.groups.map((group) => group.bars)));
  document.querySelectorAll("input[name=metric], input[name=axis]").forEach((input) =>
    input.addEventListener("change", () => redraw(data.groups.flatMap((group) => group.charts.map((spec) => spec.id)))));
})();
