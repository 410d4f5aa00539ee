// Draws the timeline of requests. Bars are as thick as the space allows, and tokens appear when few rows are in view.
"use strict";
(() => {
  const { chart, colour, draw, element, plain, ready, unpacked } = Report;
  const ROWS_WITH_TOKENS = 40;
  const LEGEND_AND_AXIS = 80; // height in pixels, approximately
  // Number formats are created once, because `toLocaleString` creates one on each call.
  const integer = new Intl.NumberFormat("en").format;
  const threeDigits = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 }).format;
  const unpackedTokens = new Map();

  // Formats a duration with three significant digits in a suitable unit.
  function duration(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    const [factor, unit] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
    return `${threeDigits(seconds * factor)} ${unit}`;
  }

  // Returns the steps between the tokens of each request. They are unpacked when they are needed for the first time.
  function tokensOf(run) {
    if (!unpackedTokens.has(run)) unpackedTokens.set(run, unpacked(run.data.timeline.tokens));
    return unpackedTokens.get(run);
  }

  const selectedRun = () => DATA.runs[Number(document.getElementById("timeline-run")?.value ?? 0)];

  // Returns one line per row. Each line has a point in its middle, because Plotly shows hover text only at points.
  function bars(rows, from, to, texts) {
    const [x, y, text] = [[], [], []];
    rows.forEach(({ position, index }) => {
      if (from[index] === null || to[index] === null) return;
      x.push(from[index], (from[index] + to[index]) / 2, to[index], null);
      y.push(position, position, position, null);
      text.push(texts[index], texts[index], texts[index], "");
    });
    return { x, y, text };
  }

  // Returns the hover text of a request.
  function requestText(timeline, index) {
    const sent_s = timeline.sent_s[index];
    let text = `request ${timeline.request[index]} (sent as number ${integer(timeline.position[index])})<br>sent at ${duration(sent_s)}`;
    if (timeline.first_s[index] === null) text += ", no token received";
    else {
      text += `, first token after ${duration(timeline.first_s[index] - sent_s)},<br>last token after ${duration(timeline.last_s[index] - sent_s)}`;
    }
    if (timeline.chunks?.[index]) text += `, ${integer(timeline.chunks[index])} chunks`;
    if (timeline.bad[index]) text += `<br>${plain(timeline.bad[index])}`;
    return text;
  }

  // Returns the thickness of a bar in pixels.
  const thickness = (height, rows) => Math.min(14, Math.max(0.8, (height / Math.max(1, rows)) * 0.65));

  function drawTimeline(container) {
    const run = selectedRun();
    const { timeline } = run.data;
    const rows = timeline.position.map((position, index) => ({ position, index }));
    const texts = rows.map(({ index }) => requestText(timeline, index));
    const waitEnds = timeline.first_s.map((first, index) => first ?? timeline.end_s[index]);
    const incomplete = rows.filter(({ index }) => timeline.bad[index] && timeline.end_s[index] !== null);
    const width = thickness(container.clientHeight - LEGEND_AND_AXIS, rows.length);
    const base = { type: "scatter", mode: "lines", hovertemplate: "%{text}<extra></extra>" };
    const traces = [
      { ...base, ...bars(rows, timeline.sent_s, waitEnds, texts), name: run.data.course.generates ? "waiting for the first token" : "waiting for the response", line: { color: colour("idle"), width } },
      { ...base, ...bars(rows, timeline.first_s, timeline.last_s, texts), name: "receiving tokens", showlegend: run.data.course.generates, line: { color: colour(run.colour), width } },
      { ...base, mode: "markers", x: [], y: [], name: "tokens", showlegend: false, hoverinfo: "skip", hovertemplate: undefined, marker: { symbol: "line-ns", size: 9, line: { width: 1.2, color: colour("ink") } } },
      { ...base, mode: "markers", x: incomplete.map(({ index }) => timeline.end_s[index]), y: incomplete.map(({ position }) => position), text: incomplete.map(({ index }) => texts[index]),
        name: "not complete", showlegend: incomplete.length > 0, marker: { symbol: "x", size: 7, color: colour("bad") } },
    ];
    return { traces, layout: { showlegend: true, xaxis: { title: { text: "time, s" }, ...timeRange(timeline) },
      yaxis: { title: { text: "order sent" }, range: [timeline.n + 0.5 + timeline.n * 0.01, 0.5 - timeline.n * 0.01] } } };
  }

  function timeRange({ sent_s, end_s, last_s }) {
    const from = sent_s.reduce((minimum, value) => Math.min(minimum, value), Infinity);
    const to = sent_s.reduce((maximum, sent, index) => Math.max(maximum, end_s[index] ?? last_s[index] ?? sent), -Infinity);
    return from < to ? { range: [from - (to - from) * 0.01, to + (to - from) * 0.01] } : {};
  }

  // Adapts the thickness of the bars to the rows in view, and draws their tokens if there are few of them.
  function refine() {
    const container = element("timeline");
    if (!container._fullLayout?.yaxis) return;
    const run = selectedRun();
    const { position, sent_s, tokens, tick_s } = run.data.timeline;
    const [bottom, top] = container._fullLayout.yaxis.range;
    const inView = position.map((row, index) => ({ row, index })).filter(({ row }) => row <= bottom && row >= top);
    const width = thickness(container._fullLayout.yaxis._length, inView.length);
    const [x, y] = [[], []];
    if (inView.length <= ROWS_WITH_TOKENS && tokens) {
      const steps = tokensOf(run);
      inView.forEach(({ row, index }) => {
        let time = sent_s[index];
        steps[index].forEach((step) => { time += step * tick_s; x.push(time); y.push(row); });
      });
    }
    const [{ line: barLine }, , { x: drawnTokens }] = container.data;
    if (Math.abs(barLine.width - width) <= 0.1 * width && !drawnTokens.length && !x.length) return;
    const thirdTrace = (value) => [undefined, undefined, value]; // the first two traces keep their values
    Plotly.restyle(container, { "line.width": [width, width], x: thirdTrace(x), y: thirdTrace(y), "marker.size": thirdTrace(Math.max(4, width)) }, [0, 1, 2]);
  }

  const timelineRows = () => [["run", "request", "order_sent", "sent_s", "first_token_s", "last_token_s", "end_s", "complete", "reason"],
    ...DATA.runs.flatMap(({ name, data: { timeline } }) => timeline.request.map((request, index) => [name, request, timeline.position[index], timeline.sent_s[index],
      timeline.first_s[index], timeline.last_s[index], timeline.end_s[index], timeline.bad[index] ? "no" : "yes", timeline.bad[index]]))];

  chart("timeline", { draw: drawTimeline, rows: timelineRows, refine });
  document.getElementById("timeline-run")?.addEventListener("change", () => draw("timeline"));

  // A link in the table of incomplete requests zooms the timeline to its request and shows the reason there.
  document.querySelectorAll("[data-request]").forEach((link) => link.addEventListener("click", () => ready.then(() => {
    const { timeline } = selectedRun().data;
    const index = timeline.request.indexOf(Number(link.dataset.request));
    if (index < 0) return;
    draw("timeline");
    const row = timeline.position[index];
    const from = timeline.sent_s[index];
    const to = timeline.end_s[index] ?? from;
    const padding = Math.max((to - from) * 0.2, 1e-3);
    const note = { x: to, y: row, text: plain(`request ${link.dataset.request}: ${timeline.bad[index]}`), showarrow: true, ax: 0, ay: -28, xanchor: "right", bgcolor: colour("raised"), bordercolor: colour("bad") };
    Plotly.relayout(element("timeline"), { "xaxis.range": [from - padding, to + padding], "yaxis.range": [row + 12, row - 12], annotations: [note] });
  })));
})();
