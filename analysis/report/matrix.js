// The charts of a matrix: bars per platform and server, and distributions per platform and per server.
"use strict";
(() => {
  const { DATA: data, chart, draw, colour, fade, plain } = Report;
  const checked = (name) => document.querySelector(`input[name=${name}]:checked`).value;
  const figureOf = () => data.figures.find((figure) => figure.name === document.getElementById("figure").value);
  const metricOf = () => data.metrics.find((metric) => metric.name === checked("metric"));
  const legend = { showlegend: true, margin: { l: 72, r: 14, t: 40, b: 48 } };
  const cellsOf = (of) => of.cells.map((index) => data.cells[index]);

  // One trace of bars per server, one entry per platform; the dots are the repeats.
  function bars(group) {
    const figure = figureOf();
    const cells = cellsOf(group);
    const platforms = [...new Set(cells.map((cell) => cell.platform))];
    const traces = [];
    for (const server of new Set(cells.map((cell) => cell.server))) {
      const own = platforms.map((platform) => cells.find((cell) => cell.server === server && cell.platform === platform))
        .filter((cell) => cell && cell.figures[figure.name].mean !== null);
      if (!own.length) continue;
      const values = own.map((cell) => cell.figures[figure.name]);
      const ends = (side) => values.map((each) => each.ci95 === null ? 0 : Math.abs(each.ci95[side] - each.mean) * figure.factor);
      const known = values.some((each) => each.ci95 !== null);
      const means = values.map((each) => each.mean * figure.factor);
      const name = plain(server);
      traces.push({ type: "bar", name, offsetgroup: name, legendgroup: name, x: own.map((cell) => plain(cell.platform)), y: means,
        marker: { color: fade(colour(own[0].colour), "b8"), line: { color: colour(own[0].colour), width: 1 } },
        error_y: { visible: known, type: "data", symmetric: false, array: ends(1), arrayminus: ends(0), color: colour("ink"), thickness: 1.2, width: 4 },
        hovertemplate: `%{y:.4~g} ${figure.unit}<extra>${name}, %{x}</extra>` });
      traces.push({ type: "scatter", mode: "markers", name, offsetgroup: name, legendgroup: name, showlegend: false,
        x: own.flatMap((cell) => cell.figures[figure.name].values.map(() => plain(cell.platform))),
        y: values.flatMap((each) => each.values.map((value) => value * figure.factor)),
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

  // Servers are told apart by colour, platforms by dash; thin lines are single repeats.
  function distributions(of) {
    const metric = metricOf();
    const log = checked("axis") === "log";
    const traces = cellsOf(of).flatMap((cell) => {
      const name = plain(of.kind === "host" ? cell.server : cell.platform);
      const dash = of.kind === "host" ? cell.server_dash : cell.host_dash;
      const { pooled, runs } = cell.curves[metric.name];
      const line = (curve, look) => ({ type: "scatter", mode: curve.x.length > 1 ? "lines" : "markers", name, legendgroup: name,
        x: curve.x.map((value) => value * metric.factor), y: curve.y, ...look });
      const repeats = runs.map((run) => line(run, { showlegend: false, hoverinfo: "skip", opacity: 0.45,
        line: { color: colour(cell.colour), width: 1, shape: "hv", dash } }));
      return [...repeats, line(pooled, { line: { color: colour(cell.colour), width: 2.2, shape: "hv", dash },
        hovertemplate: `%{y:.2%} within %{x:.4~g} ${metric.unit}<extra>${name}</extra>` })];
    });
    return { traces, layout: { ...legend,
      xaxis: { title: { text: `${metric.short}, ${metric.unit}` }, type: log ? "log" : "linear", ...(log ? { dtick: "D2" } : { rangemode: "tozero" }) },
      yaxis: { range: [0, 1.01], tickvals: [0, 0.25, 0.5, 0.75, 0.9, 1], tickformat: ".0%" } } };
  }

  function distributionRows(of) {
    const metric = metricOf();
    return [["server", "platform", metric.name, "share"],
      ...cellsOf(of).flatMap((cell) => cell.curves[metric.name].pooled.x.map((x, index) =>
        [cell.server, cell.platform, x, cell.curves[metric.name].pooled.y[index]]))];
  }

  for (const group of data.groups) {
    chart(group.bars, { draw: () => bars(group), rows: () => barRows(group) });
    for (const each of group.charts) chart(each.id, { draw: () => distributions(each), rows: () => distributionRows(each) });
  }
  const again = (names) => names.forEach((name) => draw(name));
  document.getElementById("figure")?.addEventListener("change", () => again(data.groups.map((group) => group.bars)));
  document.querySelectorAll("input[name=metric], input[name=axis]").forEach((input) =>
    input.addEventListener("change", () => again(data.groups.flatMap((group) => group.charts.map((each) => each.id)))));
})();
