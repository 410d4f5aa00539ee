// The page's own charts. Tables and sentences are in the page already and work without it.
"use strict";
(() => {
  const { several, chart, draw, line, colour, fade, plain } = Report;
  const axisOf = () => document.querySelector("input[name=axis]:checked").value;

  function band(run, x, curve) {
    const edge = { type: "scatter", mode: "lines", x, line: { width: 0, shape: "hv" }, hoverinfo: "skip", showlegend: false };
    return [
      { ...edge, y: curve.y.map((share) => Math.max(0, share - curve.margin)) },
      { ...edge, y: curve.y.map((share) => Math.min(1, share + curve.margin)), fill: "tonexty", fillcolor: fade(colour(run.colour)) },
    ];
  }

  // Plotly labels a logarithmic axis with bare digits between the powers of ten; whole numbers read better.
  function logarithmic(traces) {
    const values = traces.flatMap((trace) => trace.x).filter((value) => value > 0);
    const low = values.reduce((least, value) => Math.min(least, value), Infinity);
    const high = values.reduce((most, value) => Math.max(most, value), 0);
    const tickvals = high / low > 4 ? powers(low, high) : steps(low, high);
    return { tickvals, ticktext: tickvals.map((value) => value.toLocaleString("en", { maximumSignificantDigits: 3 })) };
  }

  function powers(low, high) {
    const wide = high / low > 1000;
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
      for (const factor of wide ? [1] : [1, 2, 5]) ticks.push(factor * 10 ** power);
    }
    return ticks;
  }

  function steps(low, high) {
    const rough = (high - low) / 5 || low / 5;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
    const ticks = [];
    for (let index = Math.ceil(low / step); index * step <= high; index += 1) ticks.push(index * step);
    return ticks;
  }

  function distribution({ name, short, factor, unit }) {
    const log = axisOf() === "log";
    const traces = DATA.runs.flatMap((run) => {
      const curve = run.cdf[name];
      const x = curve.x.map((value) => value * factor);
      const hover = `%{y:.2%} within %{x:.4~g} ${unit}<extra>${several ? plain(run.name) : ""}</extra>`;
      return [...band(run, x, curve), line(run, x, curve.y, { line: { shape: "hv" }, hovertemplate: hover })];
    });
    const xaxis = { title: { text: `${short}, ${unit}` }, type: log ? "log" : "linear", ...(log ? logarithmic(traces) : {}) };
    const yaxis = { range: [0, 1.01], tickvals: [0, 0.25, 0.5, 0.75, 0.9, 1], tickformat: ".0%" };
    return { traces, layout: { xaxis, yaxis } };
  }

  function sends() {
    const { factor, unit } = DATA.sends;
    const traces = DATA.runs.map((run) =>
      line(run, run.sends.x.map((value) => value * factor), run.sends.y, { line: { shape: "hv" },
        hovertemplate: `%{y:,} sent within %{x:.4~g} ${unit}<extra></extra>` }));
    return { traces, layout: {
      xaxis: { title: { text: `after the first request, ${unit}` }, rangemode: "tozero" },
      yaxis: { title: { text: "requests sent" }, rangemode: "tozero" },
    } };
  }

  const curveRows = (head, curveOf) => () => [["run", ...head], ...DATA.runs.flatMap((run) => {
    const curve = curveOf(run);
    return curve.x.map((value, index) => [run.name, value, curve.y[index]]);
  })];
  DATA.charts.forEach((each) => chart(each.name, { draw: () => distribution(each), rows: curveRows([each.name, "share"], (run) => run.cdf[each.name]) }));
  chart("sends", { draw: sends, rows: curveRows(["sent_after_s", "requests"], (run) => run.sends) });
  document.querySelectorAll("input[name=axis]").forEach((input) =>
    input.addEventListener("change", () => DATA.charts.forEach(({ name }) => draw(name))));
})();
