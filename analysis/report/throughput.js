// Draws the run over time: a column of panels on one time axis. The panels show the load, the output, the server's queue
// and KV cache, the latencies, and the requests that did not complete. A vertical line follows the pointer through all
// panels. A second column has the other readings, such as those of GPUs.
"use strict";
(() => {
  const { several, chart, line, colour, fade, plain } = Report;
  const [PANEL, TOP, BOTTOM, TITLE_LINE, LEGEND_LINE, PAGE, MARK] = [108, 30, 44, 32, 19, 860, 8]; // heights in pixels
  const MARGIN = { l: 56, r: 16 };
  const SEND_PANEL = "requests/s";
  const TELLING_TITLES = /^(KV cache|server's)/; // these panels need no legend for a single curve
  const MIN_SEND_INTERVALS = 4; // the send rate of a burst is one spike, which shows nothing
  const LATENCIES = [["ttft", "TTFT", 1], ["tpot", "TPOT", 1e-3], ["e2e", "E2E", 1]]; // key, title, unit of the data in s
  const tag = (run) => `<extra>${several ? plain(run.name) : ""}</extra>`;
  const steps = { shape: "hv" };
  // Returns true if a value has no neighbour, because a line alone would not show this value.
  const hasIsolated = (values) => values.some((value, index) => value !== null && (values[index - 1] ?? null) === null && (values[index + 1] ?? null) === null);
  const largest = (values) => values.reduce((maximum, value) => Math.max(maximum, value ?? 0), 0);

  const onPaper = () => document.documentElement.classList.contains("on-paper");
  const axisName = (index, prefix = "yaxis") => `${prefix}${index ? index + 1 : ""}`;

  // Returns a curve of loadgen's own measurements in equal intervals.
  function intervalCurve(run, values, unit, options) {
    const { course: throughput } = run.data.course;
    const { line: style, ...rest } = options;
    const x = throughput.start_s.length ? [...throughput.start_s, throughput.start_s.at(-1) + throughput.bin_s] : [];
    return line(run, x, [...values, ...values.slice(-1)], { line: { ...steps, ...style }, hovertemplate: `%{y:,.4~g} ${unit}${tag(run)}`, ...rest });
  }

  // Returns true for a run whose responses have tokens. Embeddings, for example, have none.
  const generates = (run) => run.data.course.generates;

  function throughputPanel(showRunNames) {
    const curves = DATA.runs.filter(generates).map((run) => intervalCurve(run, run.data.course.course.tokens_per_s, "output tokens/s",
      { fill: several ? "none" : "tozeroy", fillcolor: fade(colour(run.colour)), showlegend: showRunNames }));
    return { key: "output tokens/s", title: "output tokens/s", curves };
  }

  // The panel of send rates. The server's rate of finished requests joins it, because it has the same unit.
  function sendPanel() {
    const curves = DATA.runs.filter((run) => run.data.course.course.sent_per_s.filter(Boolean).length >= MIN_SEND_INTERVALS)
      .map((run) => intervalCurve(run, run.data.course.course.sent_per_s, "requests/s sent", { name: several ? plain(run.name) : "sent", showlegend: true, line: { width: 1.6 } }));
    return { key: SEND_PANEL, title: SEND_PANEL, curves };
  }

  function streamPanel() {
    const curves = DATA.runs.flatMap((run) => [
      intervalCurve(run, run.data.course.course.in_flight, "in flight", { name: "in flight", showlegend: !several }),
      ...(!generates(run) ? [] : [intervalCurve(run, run.data.course.course.receiving, "receiving tokens", { name: "receiving tokens", showlegend: !several, line: { dash: "dot", width: 1.5 } })]),
    ]);
    return { key: "in flight", title: "requests in flight", curves };
  }

  // Returns the panels of telemetry. On a page of one run, the curves of a panel differ in colour and line style. On a
  // page of several runs, each run keeps its own colour and line style. Curves that are 0 in every run are left out.
  function telemetryPanels() {
    const styles = [[null, "solid"], ["ink", "solid"], ["quiet", "dash"], ["other-1", "solid"], ["other-2", "dash"], ["ink", "dot"], ["other-1", "dot"], ["quiet", "dot"]];
    const panels = new Map();
    const curves = DATA.runs.flatMap((run) => run.data.course.series.map((curve) => ({ run, curve })));
    const nonZero = new Set(curves.filter(({ curve }) => largest(curve.y) > 0).map(({ curve }) => curve.title));
    for (const { run, curve } of curves.filter(({ curve: { title } }) => nonZero.has(title))) {
      const panel = panels.get(curve.panel) ?? { key: curve.panel, title: curve.panel, curves: [] };
      panels.set(curve.panel, panel);
      const [colourName, dash] = several ? [run.colour, run.dash] : styles[panel.curves.length % styles.length];
      const name = curve.of === "server" ? curve.title : `${curve.title}, ${plain(curve.of)}`;
      panel.curves.push(line(run, curve.x, curve.y, { line: { color: colour(colourName ?? run.colour), dash, width: 1.6 }, name, showlegend: !several,
        connectgaps: false, hovertemplate: `${name}: %{y:,.4~g} ${curve.unit}${tag(run)}` }));
    }
    const named = [...panels.values()].filter(({ key, curves: { length } }) => length === 1 && TELLING_TITLES.test(key));
    named.forEach(({ curves: [curve] }) => { curve.showlegend = false; });
    return [...panels.values()];
  }

  // Returns the panel of one latency, with p50 and p99 of each interval. The unit is ms if all values are below 1 s.
  function latencyPanel([key, title, data_s]) {
    const runs = DATA.runs.filter((run) => run.data.latencies);
    const unit = largest(runs.flatMap((run) => run.data.latencies[`${key}_p99`])) * data_s < 1 ? ["ms", 1e3] : ["s", 1];
    const curves = runs.flatMap((run) => [["p50", 2, run.dash], ["p99", several ? 1 : 1.4, several ? run.dash : "dot"]].map(([figure, width, dash]) => {
      const { latencies } = run.data;
      const middles = latencies.x.map((from) => from + latencies.bin_s / 2);
      const y = latencies[`${key}_${figure}`].map((value) => value === null ? null : value * data_s * unit[1]);
      return line(run, middles, y, { mode: hasIsolated(y) ? "lines+markers" : "lines", marker: { size: 3, color: colour(run.colour) }, line: { width, dash }, connectgaps: false, name: figure, showlegend: !several,
        customdata: latencies[`${key}_n`], hovertemplate: `${title} ${figure} %{y:,.4~g} ${unit[0]} of %{customdata:,}${tag(run)}` });
    }));
    return { key, title: `${title}, ${unit[0]}${several ? " (p50, thin: p99)" : ""}`, curves };
  }

  // Returns the panel of requests that did not complete.
  function incompletePanel() {
    const curves = DATA.runs.filter((run) => run.data.latencies).flatMap((run) => [["failed", "solid"], ["rejected", "dot"]]
      .filter(([state]) => largest(run.data.latencies[`${state}_per_s`]) > 0).map(([state, dash]) => {
        const { latencies } = run.data;
        const values = latencies[`${state}_per_s`];
        return line(run, [...latencies.x, latencies.x.at(-1) + latencies.bin_s], [...values, ...values.slice(-1)], { line: { ...steps, color: colour("bad"), dash, width: 1.6 },
          name: state, showlegend: !several, hovertemplate: `%{y:,.4~g} ${state}/s${tag(run)}` });
      }));
    return { key: "incomplete", title: "not complete/s", curves };
  }

  const withValues = (panels) => panels.filter(({ curves }) => curves.some(({ y }) => y.some((value) => value !== null)));

  // Orders the panels: the load and the server's queue directly above the latencies.
  function mainPanels() {
    const telemetry = new Map(telemetryPanels().map((panel) => [panel.key, panel]));
    const take = (key) => telemetry.has(key) ? [telemetry.get(key)] : [];
    const sends = sendPanel();
    const throughput = throughputPanel(several && !sends.curves.length);
    const finished = take(SEND_PANEL).flatMap(({ curves }) => curves);
    if (!several) finished.forEach((curve) => { curve.line.color = colour("ink"); });
    sends.curves.push(...finished);
    return withValues([sends, throughput, streamPanel(), ...take("requests at the server"), ...take("KV cache, %"), ...LATENCIES.map(latencyPanel), incompletePanel()]);
  }

  // Returns the panels of readings that the first column does not have.
  const otherPanels = () => withValues(telemetryPanels().filter(({ key }) => ![SEND_PANEL, "requests at the server", "KV cache, %"].includes(key)));

  // Returns the trace that marks the end of each request that did not complete, still without points. Its axis is the
  // first one after those of the panels.
  function failureMarks(panels) {
    if (!DATA.runs.some((run) => run.data.latencies?.incomplete_s.length)) return [];
    return [{ type: "scatter", mode: "lines", x: [], y: [], yaxis: axisName(panels.length, "y"), name: "not complete", hoverinfo: "skip",
      showlegend: true, legend: axisName(0, "legend"), line: { color: colour("bad"), width: 1.2 } }];
  }

  // Places the marks on the baseline of every panel. The marks of all panels are one line, because a path for each mark
  // would be slow. Their axis spans the whole column.
  function placeMarks(trace, axes, panels, markHeight) {
    const at = DATA.runs.flatMap((run) => run.data.latencies?.incomplete_s ?? []);
    const baselines = panels.map((_, index) => axes[axisName(index)].domain[0]);
    trace.x = baselines.flatMap(() => at.flatMap((time) => [time, time, null]));
    trace.y = baselines.flatMap((from) => at.flatMap(() => [from, from + markHeight, null]));
    axes[axisName(panels.length)] = { domain: [0, 1], range: [0, 1], overlaying: "y", visible: false, fixedrange: true };
  }

  function timeRange() {
    const throughputs = DATA.runs.map((run) => run.data.course.course).filter(({ start_s }) => start_s.length);
    const first = Math.min(...throughputs.map(({ start_s }) => start_s[0]));
    const last = Math.max(...throughputs.map(({ start_s, bin_s }) => start_s.at(-1) + bin_s));
    return [first, last];
  }

  // Shades the warm-up and the time outside the measurement window, on pages of one run only.
  function shadedAreas([first, last]) {
    if (several || !(last > first)) return [];
    const [{ window: measured }] = DATA.runs;
    return [[first, measured?.[0] ?? 0], [measured?.[1] ?? last, last]].filter(([from, to]) => to > from)
      .map(([from, to]) => ({ type: "rect", xref: "x", yref: "paper", x0: from, x1: to, y0: 0, y1: 1, layer: "below",
        fillcolor: fade(colour("quiet")), line: { width: 0 } }));
  }

  // Marks the events of the run on all panels, on pages of one run only: a line, and a label at the bottom. Hovering over it shows the sentence.
  const eventMarks = () => several ? [] : DATA.runs[0].data.course.marks ?? [];
  const eventLines = () => eventMarks().map(({ x, bad }) => ({ type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1,
    line: { color: colour(bad ? "bad" : "quiet"), width: 1.2, dash: "dash" } }));
  const eventLabels = () => eventMarks().map(({ x, label, text, bad }) => ({ text: plain(label), hovertext: plain(text), xref: "x", yref: "paper", x, y: 0,
    xanchor: "left", yanchor: "bottom", showarrow: false, captureevents: true, font: { size: 11, color: colour(bad ? "bad" : "quiet") } }));

  const legendWidth = (names) => names.reduce((sum, name) => sum + name.length * 6.6 + 45, 0);

  // Returns the place of the legend of each panel: next to its title if both fit on one line, otherwise below the title.
  function legendPlaces(container, panels, traces) {
    const available = (onPaper() ? 660 : container.clientWidth || 900) - MARGIN.l - MARGIN.r;
    return panels.map(({ title }, index) => {
      const names = traces.filter((trace) => trace.showlegend && trace.legend === axisName(index, "legend")).map(({ name }) => name);
      const beside = legendWidth(names) + title.length * 7 + 20 <= available;
      const lines = beside || !names.length ? 0 : legendWidth(names) <= available ? 1 : names.length;
      return { beside, above: (index ? TITLE_LINE : TOP) + lines * LEGEND_LINE };
    });
  }

  function drawColumn(container, panels, withFailures) {
    panels.forEach(({ curves }, index) => curves.forEach((curve) => Object.assign(curve, { yaxis: axisName(index, "y"), legend: axisName(index, "legend") })));
    const marks = withFailures ? failureMarks(panels) : [];
    const traces = [...panels.flatMap(({ curves }) => curves).filter(({ x }) => x.length), ...marks];
    if (!DATA.runs.some((run) => run.data.course.course.start_s.length)) return { traces: [] };
    const places = legendPlaces(container, panels, traces);
    const above = places.map((place) => place.above);
    const gaps = above.reduce((sum, gap) => sum + gap, 0);
    const panelHeight = onPaper() ? Math.max(28, Math.min(PANEL, (PAGE - BOTTOM - gaps) / panels.length)) : PANEL; // one sheet of paper
    const inner = panels.length * panelHeight + gaps - above[0];
    const height = above[0] + BOTTOM + inner;
    container.style.height = `${height}px`;
    const range = timeRange();
    const padding = (range[1] - range[0]) * 0.01;
    let filled = 0;
    const titles = [];
    const axes = Object.fromEntries(panels.flatMap(({ title }, index) => {
      filled += index ? panelHeight + above[index] : 0;
      const top = Math.min(1, Math.max(0, 1 - filled / inner));
      const titleHeight = places[index].above - (index ? TITLE_LINE : TOP);
      titles.push({ text: `<b>${title}</b>`, xref: "paper", yref: "paper", x: 0, y: top, xanchor: "left", yanchor: "bottom", yshift: titleHeight + 1, showarrow: false, font: { size: 12.5 } });
      const legend = { orientation: "h", x: places[index].beside ? 1 : 0, xanchor: places[index].beside ? "right" : "left", y: top, yanchor: "bottom", font: { size: 12 } };
      const axis = { domain: [Math.max(0, top - panelHeight / inner), top], rangemode: "tozero", nticks: 3 };
      return [[axisName(index), axis], [axisName(index, "legend"), legend]];
    }));
    marks.forEach((trace) => placeMarks(trace, axes, panels, MARK / inner));
    const crosshair = { showspikes: true, spikemode: "across", spikesnap: "cursor", spikethickness: 1, spikedash: "solid", spikecolor: colour("quiet") };
    return { traces, layout: {
      showlegend: true, height, margin: { ...MARGIN, t: above[0], b: BOTTOM }, shapes: [...shadedAreas(range), ...eventLines()], annotations: [...titles, ...eventLabels()],
      paper_bgcolor: colour("paper"), // the crosshair is drawn on a line of this colour
      hovermode: "x", hoversubplots: "axis", hoverdistance: 12, spikedistance: -1,
      xaxis: { title: { text: "time, s" }, range: [range[0] - padding, range[1] + padding], anchor: axisName(panels.length - 1, "y"), hoverformat: ".4~g", ...crosshair }, ...axes,
    } };
  }

  // Returns one row per interval and figure that loadgen measured, followed by one row per telemetry reading.
  const rows = () => [["run", "from_s", "figure", "of", "value", "unit"], ...DATA.runs.flatMap((run) => [...clientRows(run), ...latencyRows(run), ...readingRows(run)])];

  const readingRows = (run) => run.data.course.series.flatMap((curve) => curve.x.map((time, index) => [run.name, time, curve.title, curve.of, curve.y[index], curve.unit]));

  const clientRows = ({ name, data: { course: { course: throughput } } }) => throughput.start_s.flatMap((start, index) => [
    [name, start, "sent", "client", throughput.sent_per_s[index], "requests/s"], [name, start, "output_tokens", "client", throughput.tokens_per_s[index], "tokens/s"],
    [name, start, "in_flight", "client", throughput.in_flight[index], "streams"], [name, start, "receiving", "client", throughput.receiving[index], "streams"]]);

  const latencyRows = ({ name, data: { latencies } }) => (latencies?.x ?? []).flatMap((start, index) => [
    ...LATENCIES.flatMap(([key, , data_s]) => [[name, start, `${key}_n`, "client", latencies[`${key}_n`][index], "requests"],
      ...["p50", "p99"].map((figure) => [name, start, `${key}_${figure}`, "client", latencies[`${key}_${figure}`][index], data_s === 1 ? "s" : "ms"])]),
    ...["failed", "rejected"].map((state) => [name, start, state, "client", latencies[`${state}_per_s`][index], "requests/s"])]);

  chart("course", { draw: (container) => drawColumn(container, mainPanels(), true), rows });
  chart("telemetry", { draw: (container) => drawColumn(container, otherPanels(), false), rows: () => [["run", "at_s", "figure", "of", "value", "unit"], ...DATA.runs.flatMap(readingRows)] });
})();
