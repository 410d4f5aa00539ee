// Draws the run over time: tokens per second and streams, and below them, on the same time axis, the telemetry of the
// server, the GPUs and the host.
"use strict";
(() => {
  const { several, chart, line, colour, fade, plain } = Report;
  const [PANEL, TOP, BOTTOM, GAP, LEGEND_LINE, PAGE] = [165, 30, 48, 34, 19, 900]; // heights in pixels
  const tag = (run) => `<extra>${several ? plain(run.name) : ""}</extra>`;
  const shape = { shape: "hv" };
  const UNITS = { requests: "requests", "%": "share, %" };

  const onPaper = () => document.documentElement.classList.contains("on-paper");
  const panels = ["output tokens/s", "streams", ...new Set(DATA.runs.flatMap((run) => run.data.course.series.map((curve) => curve.panel)))];
  const axisName = (index, prefix = "yaxis") => `${prefix}${index ? index + 1 : ""}`;

  // Returns the curves that loadgen itself measured: tokens per second, and streams in flight and receiving.
  function clientTraces(run) {
    const { course: throughput } = run.data.course;
    const stepped = (values) => [...values, ...values.slice(-1)];
    const x = throughput.start_s.length ? [...throughput.start_s, throughput.start_s.at(-1) + throughput.bin_s] : [];
    return [
      line(run, x, stepped(throughput.tokens_per_s), { line: shape, showlegend: several, fill: several ? "none" : "tozeroy", fillcolor: fade(colour(run.colour)),
        hovertemplate: `%{y:,.0f} tokens/s from %{x:.4~g} s${tag(run)}` }),
      line(run, x, stepped(throughput.in_flight), { line: shape, yaxis: "y2", legend: "legend2", showlegend: !several, name: "in flight",
        hovertemplate: `%{y:,} in flight from %{x:.4~g} s${tag(run)}` }),
      line(run, x, stepped(throughput.receiving), { line: { ...shape, dash: "dot", width: 1.5 }, yaxis: "y2", legend: "legend2", showlegend: !several, name: "receiving tokens",
        hovertemplate: `%{y:,} receiving from %{x:.4~g} s${tag(run)}` }),
    ];
  }

  // Returns the telemetry curves. On a page of one run, the curves of a panel differ in colour and line style. On a page
  // of several runs, each run keeps its own colour and line style.
  function telemetryTraces(run) {
    const styles = [[run.colour, "solid"], ["ink", "solid"], ["quiet", "dash"], ["other-1", "solid"], ["other-2", "dash"], ["ink", "dot"], ["other-1", "dot"], ["quiet", "dot"]];
    const curvesOfPanel = new Map();
    return run.data.course.series.map((curve) => {
      const index = panels.indexOf(curve.panel, 2);
      const number = curvesOfPanel.get(index) ?? 0;
      curvesOfPanel.set(index, number + 1);
      const [colourName, dash] = several ? [run.colour, run.dash] : styles[number % styles.length];
      const name = `${curve.title}, ${plain(curve.of)}`;
      return line(run, curve.x, curve.y, { line: { color: colour(colourName), dash, width: 1.6 }, yaxis: axisName(index, "y"), legend: axisName(index, "legend"),
        name, showlegend: !several, connectgaps: false, hovertemplate: `${name}: %{y:,.4~g} ${curve.unit} at %{x:.4~g} s${tag(run)}` });
    });
  }

  // Shades the warm-up and the time outside the measurement window, on pages of one run only.
  function shadedAreas() {
    const [{ data: { course: { course: throughput } }, window: measured }] = DATA.runs;
    if (several || !throughput.start_s.length) return [];
    const first = throughput.start_s[0];
    const last = throughput.start_s.at(-1) + throughput.bin_s;
    return [[first, measured?.[0] ?? 0], [measured?.[1] ?? last, last]].filter(([from, to]) => to > from)
      .map(([from, to]) => ({ type: "rect", xref: "x", yref: "paper", x0: from, x1: to, y0: 0, y1: 1, layer: "below",
        fillcolor: fade(colour("quiet")), line: { width: 0 } }));
  }

  // Returns the space above each panel. Legend entries are shown side by side if they fit, and one per line otherwise.
  function spaceAbove(container, traces) {
    const available = (onPaper() ? 660 : container.clientWidth || 900) - 70;
    return panels.map((_, index) => {
      const lengths = traces.filter((trace) => trace.showlegend && (trace.legend ?? "legend") === axisName(index, "legend")).map((trace) => trace.name.length);
      const wide = lengths.reduce((sum, length) => sum + length * 6.6 + 45, 0) > available;
      return Math.max(index ? GAP : TOP, (wide ? lengths.length : 1) * LEGEND_LINE + GAP - LEGEND_LINE);
    });
  }

  function drawThroughput(container) {
    const traces = DATA.runs.flatMap((run) => [...clientTraces(run), ...telemetryTraces(run)]);
    const above = spaceAbove(container, traces);
    const panelHeight = onPaper() ? // all panels fit on one sheet
      Math.max(40, Math.min(PANEL, (PAGE - BOTTOM - above.reduce((sum, gap) => sum + gap, 0)) / panels.length)) : PANEL;
    const inner = panels.length * panelHeight + above.slice(1).reduce((sum, gap) => sum + gap, 0);
    const height = above[0] + BOTTOM + inner;
    let filled = 0;
    if (DATA.runs.some((run) => run.data.course.course.start_s.length)) container.style.height = `${height}px`;
    const axes = Object.fromEntries(panels.flatMap((unit, index) => {
      filled += index ? panelHeight + above[index] : 0;
      const top = 1 - filled / inner;
      const legend = { orientation: "h", x: 0, y: top, yanchor: "bottom", font: { size: 12 } };
      return [[axisName(index), { domain: [Math.max(0, top - panelHeight / inner), top], title: { text: UNITS[unit] ?? plain(unit), font: { size: onPaper() ? 9.5 : 12.5 } }, rangemode: "tozero", nticks: 5 }],
        [axisName(index, "legend"), legend]];
    }));
    return { traces, layout: {
      showlegend: true, height, margin: { l: 60, r: 16, t: above[0], b: BOTTOM }, shapes: shadedAreas(),
      xaxis: { title: { text: "time, s" }, rangemode: "tozero", anchor: axisName(panels.length - 1, "y") }, ...axes,
    } };
  }

  // Returns one row per interval and client curve, followed by one row per telemetry reading.
  const rows = () => [["run", "from_s", "figure", "of", "value", "unit"], ...DATA.runs.flatMap(({ name, data: { course: { course: throughput, series } } }) => [
    ...throughput.start_s.flatMap((start, index) => [[name, start, "output_tokens", "client", throughput.tokens_per_s[index], "tokens/s"],
      [name, start, "in_flight", "client", throughput.in_flight[index], "streams"], [name, start, "receiving", "client", throughput.receiving[index], "streams"]]),
    ...series.flatMap((curve) => curve.x.map((time, index) => [name, time, curve.title, curve.of, curve.y[index], curve.unit])),
  ])];

  chart("course", { draw: drawThroughput, rows });
})();
