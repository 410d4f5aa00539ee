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

  // Warm-up, and whatever lies outside the window. Several runs would shade each other.
  function shades() {
    const [{ course, window: measured }] = DATA.runs;
    if (several || !course.start_s.length) return [];
    const first = course.start_s[0];
    const last = course.start_s.at(-1) + course.bin_s;
    const whole = measured.chosen === "whole";
    return [[first, whole ? 0 : measured.from_s], [whole ? last : measured.to_s, last]].filter(([from, to]) => to > from)
      .map(([from, to]) => ({ type: "rect", xref: "x", yref: "paper", x0: from, x1: to, y0: 0, y1: 1, layer: "below",
        fillcolor: fade(colour("quiet")), line: { width: 0 } }));
  }

  function course() {
    const traces = DATA.runs.flatMap((run) => {
      const { course } = run;
      const stepped = (values) => [...values, ...values.slice(-1)];
      const x = course.start_s.length ? [...course.start_s, course.start_s.at(-1) + course.bin_s] : [];
      const tail = `<extra>${several ? plain(run.name) : ""}</extra>`;
      const shape = { shape: "hv" };
      return [
        line(run, x, stepped(course.tokens_per_s), { line: shape, showlegend: several, fill: several ? "none" : "tozeroy", fillcolor: fade(colour(run.colour)),
          hovertemplate: `%{y:,.0f} tokens/s from %{x:.4~g} s${tail}` }),
        line(run, x, stepped(course.in_flight), { line: shape, yaxis: "y2", showlegend: !several, name: "in flight",
          hovertemplate: `%{y:,} in flight from %{x:.4~g} s${tail}` }),
        line(run, x, stepped(course.receiving), { line: { ...shape, dash: "dot", width: 1.5 }, yaxis: "y2", showlegend: !several, name: "receiving tokens",
          hovertemplate: `%{y:,} receiving from %{x:.4~g} s${tail}` }),
      ];
    });
    return { traces, layout: {
      showlegend: true, margin: { l: 48, r: 14, t: 34, b: 44 }, shapes: shades(),
      xaxis: { title: { text: "time, s" }, rangemode: "tozero", anchor: "y2" },
      yaxis: { domain: [0.54, 1], title: { text: "output tokens/s" }, rangemode: "tozero" },
      yaxis2: { domain: [0, 0.46], title: { text: "streams" }, rangemode: "tozero" },
    } };
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
  const courseRows = () => [["run", "from_s", "output_tokens_per_s", "in_flight", "receiving"],
    ...DATA.runs.flatMap(({ name, course: { start_s, tokens_per_s, in_flight, receiving } }) =>
      start_s.map((start, index) => [name, start, tokens_per_s[index], in_flight[index], receiving[index]]))];

  DATA.charts.forEach((each) => chart(each.name, { draw: () => distribution(each), rows: curveRows([each.name, "share"], (run) => run.cdf[each.name]) }));
  chart("course", { draw: course, rows: courseRows });
  chart("sends", { draw: sends, rows: curveRows(["sent_after_s", "requests"], (run) => run.sends) });
  document.querySelectorAll("input[name=axis]").forEach((input) =>
    input.addEventListener("change", () => DATA.charts.forEach(({ name }) => draw(name))));
})();
