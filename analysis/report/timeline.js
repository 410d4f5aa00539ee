// The timeline of each request: bars as thick as there is room for, and single tokens once few rows are in view.
"use strict";
(() => {
  const { chart, colour, draw, element, plain, ready } = Report;
  const ROWS_WITH_TOKENS = 40;
  const whole = (value) => value.toLocaleString("en");

  // Seconds with as many digits as tell something, in the unit that reads best.
  function time(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    const [factor, unit] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
    return `${(seconds * factor).toLocaleString("en", { maximumSignificantDigits: 3 })} ${unit}`;
  }

  const picked = () => DATA.runs[Number(document.getElementById("timeline-run")?.value ?? 0)];

  // A line from x0 to x1 per row, with its middle, because a pointer finds points and not what lies between them.
  function bars(rows, from, to, words) {
    const [x, y, text] = [[], [], []];
    rows.forEach(({ position, index }) => {
      if (from[index] === null || to[index] === null) return;
      x.push(from[index], (from[index] + to[index]) / 2, to[index], null);
      y.push(position, position, position, null);
      text.push(words[index], words[index], words[index], "");
    });
    return { x, y, text };
  }

  function timeline() {
    const run = picked();
    const { timeline: drawn } = run.data;
    const rows = drawn.position.map((position, index) => ({ position, index }));
    const tokens = drawn.tokens;
    const words = rows.map(({ position, index }) => `request ${drawn.request[index]}, ${whole(position)}. sent<br>sent at ${time(drawn.sent_s[index])}` +
      (drawn.first_s[index] === null ? ", no token came" : `, first token after ${time(drawn.first_s[index] - drawn.sent_s[index])},<br>` +
      `last after ${time(drawn.last_s[index] - drawn.sent_s[index])}`) + (tokens?.[index]?.length ? `, ${whole(tokens[index].length)} chunks` : "") +
      (drawn.bad[index] ? `<br>${plain(drawn.bad[index])}` : ""));
    const waited = drawn.first_s.map((first, index) => first ?? drawn.end_s[index]);
    const bad = rows.filter(({ index }) => drawn.bad[index] && drawn.end_s[index] !== null);
    const look = { type: "scatter", mode: "lines", hovertemplate: "%{text}<extra></extra>" };
    const traces = [
      { ...look, ...bars(rows, drawn.sent_s, waited, words), name: "waiting for the first token", line: { color: colour("idle"), width: 0.8 } },
      { ...look, ...bars(rows, drawn.first_s, drawn.last_s, words), name: "receiving tokens", line: { color: colour(run.colour), width: 0.8 } },
      { ...look, mode: "markers", x: [], y: [], name: "tokens", showlegend: false, hoverinfo: "skip", hovertemplate: undefined, marker: { symbol: "line-ns", size: 9, line: { width: 1.2, color: colour("ink") } } },
      { ...look, mode: "markers", x: bad.map(({ index }) => drawn.end_s[index]), y: bad.map(({ position }) => position), text: bad.map(({ index }) => words[index]),
        name: "ended without being complete", showlegend: bad.length > 0, marker: { symbol: "x", size: 7, color: colour("bad") } },
    ];
    return { traces, layout: { showlegend: true, xaxis: { title: { text: "time, s" }, ...span(drawn) },
      yaxis: { title: { text: "order sent" }, range: [drawn.n + 0.5 + drawn.n * 0.01, 0.5 - drawn.n * 0.01] } } };
  }

  function span({ sent_s, end_s, last_s }) {
    const from = sent_s.reduce((least, value) => Math.min(least, value), Infinity);
    const to = sent_s.reduce((most, sent, index) => Math.max(most, end_s[index] ?? last_s[index] ?? sent), -Infinity);
    return from < to ? { range: [from - (to - from) * 0.01, to + (to - from) * 0.01] } : {};
  }

  // Bars as thick as there is room for, and single tokens once few rows are in view.
  function refine() {
    const place = element("timeline");
    if (!place._fullLayout?.yaxis) return;
    const { position, sent_s, tokens, tick_s } = picked().data.timeline;
    const [bottom, top] = place._fullLayout.yaxis.range;
    const inView = position.map((at, index) => ({ at, index })).filter(({ at }) => at <= bottom && at >= top);
    const width = Math.min(14, Math.max(0.8, (place._fullLayout.yaxis._length / Math.max(1, inView.length)) * 0.65));
    const [x, y] = [[], []];
    if (inView.length <= ROWS_WITH_TOKENS && tokens) {
      inView.forEach(({ at, index }) => {
        let now = sent_s[index];
        tokens[index].forEach((step) => { now += step * tick_s; x.push(now); y.push(at); });
      });
    }
    const [{ line: bars }, , { x: before }] = place.data;
    if (bars.width.toFixed(1) === width.toFixed(1) && !before.length && !x.length) return;
    const third = (value) => [undefined, undefined, value]; // of the three traces, the first two keep theirs
    Plotly.restyle(place, { "line.width": [width, width], x: third(x), y: third(y), "marker.size": third(Math.max(4, width)) }, [0, 1, 2]);
  }

  const timelineRows = () => [["run", "request", "order_sent", "sent_s", "first_token_s", "last_token_s", "end_s", "complete", "reason"],
    ...DATA.runs.flatMap(({ name, data: { timeline: drawn } }) => drawn.request.map((request, index) => [name, request, drawn.position[index], drawn.sent_s[index],
      drawn.first_s[index], drawn.last_s[index], drawn.end_s[index], drawn.bad[index] ? "no" : "yes", drawn.bad[index]]))];

  chart("timeline", { draw: timeline, rows: timelineRows, refine });
  document.getElementById("timeline-run")?.addEventListener("change", () => draw("timeline"));

  // From a reason to the request that had it, in the middle of its neighbours, with its words.
  document.querySelectorAll("[data-request]").forEach((link) => link.addEventListener("click", () => ready.then(() => {
    const { timeline: drawn } = picked().data;
    const index = drawn.request.indexOf(Number(link.dataset.request));
    if (index < 0) return;
    draw("timeline");
    const [at, from, to] = [drawn.position[index], drawn.sent_s[index], drawn.end_s[index] ?? drawn.sent_s[index]];
    const room = Math.max((to - from) * 0.2, 1e-3);
    const note = { x: to, y: at, text: plain(`request ${link.dataset.request}: ${drawn.bad[index]}`), showarrow: true, ax: 0, ay: -28, xanchor: "right", bgcolor: colour("raised"), bordercolor: colour("bad") };
    Plotly.relayout(element("timeline"), { "xaxis.range": [from - room, to + room], "yaxis.range": [at + 12, at - 12], annotations: [note] });
  })));
})();
