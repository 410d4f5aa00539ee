// Charts in which single requests can be seen: first tokens, gaps between tokens, and the timeline of each request.
"use strict";
(() => {
  const { several, chart, line, colour, fade, plain, element } = Report;
  const ROWS_WITH_TOKENS = 40;
  const tag = (run) => `<extra>${several ? plain(run.name) : ""}</extra>`;
  const whole = (value) => value.toLocaleString("en");

  // Seconds with as many digits as tell something, in the unit that reads best.
  function time(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    const [factor, unit] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
    return `${(seconds * factor).toLocaleString("en", { maximumSignificantDigits: 3 })} ${unit}`;
  }

  // TTFT of single requests as points, and the median and p90 of all of them as lines.
  function firstTokens(of, by, title) {
    const traces = DATA.runs.flatMap((run) => {
      const { first } = run;
      const points = { type: "scatter", mode: "markers", x: first[of], y: first.ttft_s, showlegend: false,
        marker: { color: fade(colour(run.colour), several ? "59" : "73"), size: 5, line: { width: 0 } },
        text: first.request.map((request, index) => `request ${request}, ${whole(first.position[index])}. sent, ${whole(first.prompt[index])} prompt tokens<br>TTFT ${time(first.ttft_s[index])}`),
        hovertemplate: `%{text}${tag(run)}` };
      const trend = (share, more) => ({ ...line(run, first[by].x, first[by][share], { hovertemplate: `${share} about here %{y:.4~g} s${tag(run)}`, ...more }), mode: "lines" });
      return first[of].length ? [points, trend("p50", { name: several ? plain(run.name) : "median", line: several ? {} : { color: colour("ink") } }),
        ...(several ? [] : [trend("p90", { name: "p90", line: { color: colour("ink"), width: 1.2, dash: "dot" } })])] : [];
    });
    return { traces, layout: { showlegend: true, margin: { l: 48, r: 14, t: 34, b: 44 },
      xaxis: { title: { text: title }, ...(of === "prompt" ? {} : { rangemode: "tozero" }) }, yaxis: { title: { text: "TTFT, s" }, rangemode: "tozero" } } };
  }

  const firstRows = () => [["run", "request", "position", "prompt_tokens", "ttft_s"], ...DATA.runs.flatMap(({ name, first }) =>
    first.request.map((request, index) => [name, request, first.position[index], first.prompt[index], first.ttft_s[index]]))];

  // Percentiles of the gap before each token. A few gaps are far longer than the rest, so the axis becomes logarithmic.
  function gaps() {
    const { factor, unit } = DATA.gaps;
    const scaled = (values) => values.map((value) => (value === null ? null : value * factor));
    const traces = DATA.runs.flatMap((run) => {
      const { lifetime } = run;
      const x = lifetime.token;
      const one = (share, title, more, extra = {}) => ({ ...line(run, x, scaled(lifetime[share]), { line: more, connectgaps: false, ...extra,
        name: several ? `${plain(run.name)}, ${title}` : title, hovertemplate: `${title} before token %{x}: %{y:.4~g} ${unit}${tag(run)}` }) });
      const longest = { type: "scatter", mode: "markers", x: lifetime.longest.map((gap) => gap.token), y: scaled(lifetime.longest.map((gap) => gap.gap_s)),
        name: "longest", showlegend: !several, marker: { symbol: "diamond-open", size: 8, color: colour(several ? run.colour : "bad"), line: { width: 1.5 } },
        text: lifetime.longest.map((gap) => `${time(gap.gap_s)} before token ${gap.token}<br>of request ${gap.request}, from ${time(gap.from_s)} of the run on`), hovertemplate: `%{text}${tag(run)}` };
      return x.length ? [one("p50", "median", { width: 2.2 }), ...(several ? [] : [one("p90", "p90", { width: 1.3, dash: "dash" })]),
        one("p99", "p99", { width: 1.3, dash: "dot" }, { showlegend: !several }),
        ...(several ? [] : [one("max", "largest", { width: 1, color: colour("quiet") })]), longest] : [];
    });
    const known = traces.flatMap((trace) => trace.y).filter((value) => value > 0);
    const log = known.length > 0 && known.reduce((most, value) => Math.max(most, value), 0) > 20 * known.reduce((least, value) => Math.min(least, value), Infinity);
    return { traces, layout: { showlegend: true, margin: { l: 48, r: 14, t: 34, b: 44 },
      xaxis: { title: { text: "token of the answer" }, rangemode: "tozero" },
      yaxis: { title: { text: `gap before it, ${unit}${log ? " (log)" : ""}` }, type: log ? "log" : "linear", ...(log ? { dtick: 1 } : { rangemode: "tozero" }) } } };
  }

  const gapRows = () => [["run", "token", "gaps", "p50_s", "p90_s", "p99_s", "max_s"], ...DATA.runs.flatMap(({ name, lifetime }) =>
    lifetime.token.map((token, index) => [name, token, lifetime.n[index], lifetime.p50[index], lifetime.p90[index], lifetime.p99[index], lifetime.max[index]]))];

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
    const { timeline: drawn } = run;
    const rows = drawn.position.map((position, index) => ({ position, index }));
    const tokens = drawn.tokens;
    const words = rows.map(({ position, index }) => `request ${drawn.request[index]}, ${whole(position)}. sent<br>sent at ${time(drawn.sent_s[index])}` +
      (drawn.first_s[index] === null ? ", no token came" : `, first token after ${time(drawn.first_s[index] - drawn.sent_s[index])},<br>` +
      `last after ${time(drawn.last_s[index] - drawn.sent_s[index])}`) + (tokens?.[index]?.length ? `, ${whole(tokens[index].length)} chunks` : "") +
      (drawn.bad[index] ? "<br>not complete" : ""));
    const waited = drawn.first_s.map((first, index) => first ?? drawn.end_s[index]);
    const bad = rows.filter(({ index }) => drawn.bad[index] && drawn.end_s[index] !== null);
    const look = { type: "scatter", mode: "lines", hovertemplate: "%{text}<extra></extra>" };
    const traces = [
      { ...look, ...bars(rows, drawn.sent_s, waited, words), name: "waiting for the first token", line: { color: colour("idle"), width: 1 } },
      { ...look, ...bars(rows, drawn.first_s, drawn.last_s, words), name: "receiving tokens", line: { color: colour(run.colour), width: 1 } },
      { ...look, mode: "markers", x: [], y: [], name: "tokens", showlegend: false, hoverinfo: "skip", hovertemplate: undefined, marker: { symbol: "line-ns", size: 9, line: { width: 1.2, color: colour("ink") } } },
      { ...look, mode: "markers", x: bad.map(({ index }) => drawn.end_s[index]), y: bad.map(({ position }) => position), text: bad.map(({ index }) => words[index]),
        name: "ended without being complete", showlegend: bad.length > 0, marker: { symbol: "x", size: 7, color: colour("bad") } },
    ];
    return { traces, layout: { showlegend: true, margin: { l: 52, r: 14, t: 34, b: 44 },
      xaxis: { title: { text: "time, s" }, ...span(drawn) },
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
    const { position, sent_s, tokens, tick_s } = picked().timeline;
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
    Plotly.restyle(place, { "line.width": width }, [0, 1]);
    Plotly.restyle(place, { x: [x], y: [y], "marker.size": Math.max(4, width) }, [2]);
  }

  const timelineRows = () => [["run", "request", "order_sent", "sent_s", "first_token_s", "last_token_s", "end_s", "complete"],
    ...DATA.runs.flatMap(({ name, timeline: drawn }) => drawn.request.map((request, index) => [name, request, drawn.position[index], drawn.sent_s[index],
      drawn.first_s[index], drawn.last_s[index], drawn.end_s[index], drawn.bad[index] ? "no" : "yes"]))];

  chart("position", { draw: () => firstTokens("position", "by_position", "place in the order sent"), rows: firstRows });
  chart("prompt", { draw: () => firstTokens("prompt", "by_prompt", "prompt tokens"), rows: firstRows });
  chart("gaps", { draw: gaps, rows: gapRows });
  chart("timeline", { draw: timeline, rows: timelineRows, refine });
  document.getElementById("timeline-run")?.addEventListener("change", () => Report.draw("timeline"));
})();
