// Draws the charts from the data in the page, in the colours of the reader's scheme. Tables work without it.
"use strict";
(() => {
  const PAPER_WIDTH = 660; // fits A4 and Letter between the usual margins
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const axisOf = () => document.querySelector("input[name=axis]:checked").value;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const fade = (hex) => `${hex}2e`;
  // Plotly reads tags, entities and %{...} in text; names hold a server's own words.
  const plain = (text) => text.replace(/[<>&%{}]/g, " ");
  const several = data.runs.length > 1;

  function layout(changes) {
    const axis = { color: colour("quiet"), gridcolor: colour("line"), linecolor: colour("line"), zeroline: false, automargin: true,
      title: { standoff: 8 } };
    const merged = {
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("ink") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 48, r: 14, t: several ? 34 : 10, b: 44 },
      showlegend: several, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 } },
      hoverlabel: { bgcolor: colour("raised"), bordercolor: colour("line"), font: { color: colour("ink") } },
      dragmode: touch.matches ? false : "zoom", hovermode: "closest",
      ...(document.documentElement.classList.contains("on-paper") ? { width: PAPER_WIDTH } : { autosize: true }),
      ...changes,
    };
    for (const name of Object.keys(merged)) {
      if (/^[xy]axis/.test(name)) merged[name] = { ...axis, ...merged[name], title: { ...axis.title, ...merged[name].title } };
    }
    return merged;
  }

  function draw(name, traces, changes) {
    const chart = document.getElementById(`chart-${name}`);
    if (traces.some((trace) => trace.x.length)) {
      Plotly.react(chart, traces, layout(changes), { displayModeBar: false, responsive: true, showTips: false });
    } else {
      chart.classList.add("empty");
      chart.textContent = "Nothing to draw: there is no sample.";
    }
  }

  function line(run, x, y, more) {
    return { type: "scatter", mode: x.length > 1 ? "lines" : "markers", name: plain(run.name), x, y,
      line: { color: colour(run.colour), dash: run.dash, width: 2, ...more.line }, ...without(more, "line") };
  }

  function without(object, name) {
    const { [name]: _, ...rest } = object;
    return rest;
  }

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

  function drawDistribution(chart) {
    const log = axisOf() === "log";
    const traces = data.runs.flatMap((run) => {
      const curve = run.cdf[chart.name];
      const x = curve.x.map((value) => value * chart.factor);
      const hover = `%{y:.2%} within %{x:.4~g} ${chart.unit}<extra>${several ? plain(run.name) : ""}</extra>`;
      return [...band(run, x, curve), line(run, x, curve.y, { line: { shape: "hv" }, hovertemplate: hover })];
    });
    const x = { title: { text: `${chart.short}, ${chart.unit}` }, type: log ? "log" : "linear" };
    if (log) Object.assign(x, logarithmic(traces));
    draw(chart.name, traces, {
      xaxis: x,
      yaxis: { range: [0, 1.01], tickvals: [0, 0.25, 0.5, 0.75, 0.9, 1], tickformat: ".0%" },
    });
  }

  // Warm-up, and whatever lies outside the window. Several runs would shade each other.
  function shades() {
    const [{ course, window: measured }] = data.runs;
    if (several || !course.start_s.length) return [];
    const first = course.start_s[0];
    const last = course.start_s.at(-1) + course.bin_s;
    const whole = measured.chosen === "whole";
    return [[first, whole ? 0 : measured.from_s], [whole ? last : measured.to_s, last]].filter(([from, to]) => to > from)
      .map(([from, to]) => ({ type: "rect", xref: "x", yref: "paper", x0: from, x1: to, y0: 0, y1: 1, layer: "below",
        fillcolor: fade(colour("quiet")), line: { width: 0 } }));
  }

  function drawCourse() {
    const traces = data.runs.flatMap((run) => {
      const course = run.course;
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
    draw("course", traces, {
      showlegend: true, margin: { l: 48, r: 14, t: 34, b: 44 }, shapes: shades(),
      xaxis: { title: { text: "time, s" }, rangemode: "tozero", anchor: "y2" },
      yaxis: { domain: [0.54, 1], title: { text: "output tokens/s" }, rangemode: "tozero" },
      yaxis2: { domain: [0, 0.46], title: { text: "streams" }, rangemode: "tozero" },
    });
  }

  function drawSends() {
    const { factor, unit } = data.sends;
    const traces = data.runs.map((run) =>
      line(run, run.sends.x.map((value) => value * factor), run.sends.y, { line: { shape: "hv" },
        hovertemplate: `%{y:,} sent within %{x:.4~g} ${unit}<extra></extra>` }));
    draw("sends", traces, {
      xaxis: { title: { text: `after the first request, ${unit}` }, rangemode: "tozero" },
      yaxis: { title: { text: "requests sent" }, rangemode: "tozero" },
    });
  }

  function drawAll() {
    data.charts.forEach(drawDistribution);
    drawCourse();
    drawSends();
  }

  function rows(name) {
    if (name === "course") {
      return [["run", "from_s", "output_tokens_per_s", "in_flight", "receiving"],
        ...data.runs.flatMap((run) => run.course.start_s.map((start, index) =>
          [run.name, start, run.course.tokens_per_s[index], run.course.in_flight[index], run.course.receiving[index]]))];
    }
    const sends = name === "sends";
    return [["run", sends ? "sent_after_s" : name, sends ? "requests" : "share"],
      ...data.runs.flatMap((run) => {
        const curve = sends ? run.sends : run.cdf[name];
        return curve.x.map((value, index) => [run.name, value, curve.y[index]]);
      })];
  }

  // Text cells are quoted, and one that a spreadsheet would take for a formula gets an apostrophe.
  function cell(value) {
    if (typeof value === "number") return String(value);
    return `"${value.replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"`;
  }

  function download(name) {
    const text = rows(name).map((row) => row.map(cell).join(",")).join("\r\n");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = `${name}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function onPaper(printing) {
    document.documentElement.classList.toggle("on-paper", printing);
    drawAll();
  }

  document.querySelectorAll("input[name=axis]").forEach((input) =>
    input.addEventListener("change", () => data.charts.forEach(drawDistribution)));
  document.querySelectorAll("[data-csv]").forEach((button) =>
    button.addEventListener("click", () => download(button.dataset.csv)));
  dark.addEventListener("change", drawAll);
  addEventListener("beforeprint", () => onPaper(true));
  addEventListener("afterprint", () => onPaper(false));
  drawAll();
})();
