// The run over time: tokens per second and streams, and below them, on the same axis, what server, GPUs and host said.
"use strict";
(() => {
  const { several, chart, line, colour, fade, plain } = Report;
  const [PANEL, TOP, BOTTOM, GAP, LEGEND_LINE, PAGE] = [165, 30, 48, 34, 19, 900]; // heights in pixels
  const tag = (run) => `<extra>${several ? plain(run.name) : ""}</extra>`;
  const shape = { shape: "hv" };
  const UNITS = { requests: "requests", "%": "share, %" };

  const onPaper = () => document.documentElement.classList.contains("on-paper");
  const panels = ["output tokens/s", "streams", ...new Set(DATA.runs.flatMap((run) => run.data.course.series.map((each) => each.panel)))];
  const axisName = (index, letter = "yaxis") => `${letter}${index ? index + 1 : ""}`;

  function own(run) {
    const { course } = run.data.course;
    const stepped = (values) => [...values, ...values.slice(-1)];
    const x = course.start_s.length ? [...course.start_s, course.start_s.at(-1) + course.bin_s] : [];
    return [
      line(run, x, stepped(course.tokens_per_s), { line: shape, showlegend: several, fill: several ? "none" : "tozeroy", fillcolor: fade(colour(run.colour)),
        hovertemplate: `%{y:,.0f} tokens/s from %{x:.4~g} s${tag(run)}` }),
      line(run, x, stepped(course.in_flight), { line: shape, yaxis: "y2", legend: "legend2", showlegend: !several, name: "in flight",
        hovertemplate: `%{y:,} in flight from %{x:.4~g} s${tag(run)}` }),
      line(run, x, stepped(course.receiving), { line: { ...shape, dash: "dot", width: 1.5 }, yaxis: "y2", legend: "legend2", showlegend: !several, name: "receiving tokens",
        hovertemplate: `%{y:,} receiving from %{x:.4~g} s${tag(run)}` }),
    ];
  }

  // Curves of one panel are told apart by colour and dash; with several runs a run keeps its own.
  function told(run) {
    const looks = [[run.colour, "solid"], ["ink", "solid"], ["quiet", "dash"], ["other-1", "solid"], ["other-2", "dash"], ["ink", "dot"], ["other-1", "dot"], ["quiet", "dot"]];
    const seen = new Map();
    return run.data.course.series.map((each) => {
      const index = panels.indexOf(each.panel, 2);
      const place = seen.get(index) ?? 0;
      seen.set(index, place + 1);
      const [hue, dash] = several ? [run.colour, run.dash] : looks[place % looks.length];
      const name = `${each.title}, ${plain(each.of)}`;
      return line(run, each.x, each.y, { line: { color: colour(hue), dash, width: 1.6 }, yaxis: axisName(index, "y"), legend: axisName(index, "legend"),
        name, showlegend: !several, connectgaps: false, hovertemplate: `${name}: %{y:,.4~g} ${each.unit} at %{x:.4~g} s${tag(run)}` });
    });
  }

  // Warm-up, and whatever lies outside the window. Several runs would shade each other.
  function shades() {
    const [{ data: { course: { course } }, window: measured }] = DATA.runs;
    if (several || !course.start_s.length) return [];
    const first = course.start_s[0];
    const last = course.start_s.at(-1) + course.bin_s;
    return [[first, measured?.[0] ?? 0], [measured?.[1] ?? last, last]].filter(([from, to]) => to > from)
      .map(([from, to]) => ({ type: "rect", xref: "x", yref: "paper", x0: from, x1: to, y0: 0, y1: 1, layer: "below",
        fillcolor: fade(colour("quiet")), line: { width: 0 } }));
  }

  // How high each panel's legend is: curves stand side by side where there is room, and else have a line each.
  function gaps(place, traces) {
    const room = (onPaper() ? 660 : place.clientWidth || 900) - 70;
    return panels.map((_, index) => {
      const names = traces.filter((trace) => trace.showlegend && (trace.legend ?? "legend") === axisName(index, "legend")).map((trace) => trace.name.length);
      const wide = names.reduce((sum, length) => sum + length * 6.6 + 45, 0) > room;
      return Math.max(index ? GAP : TOP, (wide ? names.length : 1) * LEGEND_LINE + GAP - LEGEND_LINE);
    });
  }

  function course(place) {
    const traces = DATA.runs.flatMap((run) => [...own(run), ...told(run)]);
    const above = gaps(place, traces);
    const panel = onPaper() ? // one page holds them all
      Math.max(40, Math.min(PANEL, (PAGE - BOTTOM - above.reduce((sum, gap) => sum + gap, 0)) / panels.length)) : PANEL;
    const inner = panels.length * panel + above.slice(1).reduce((sum, gap) => sum + gap, 0);
    const height = above[0] + BOTTOM + inner;
    let filled = 0;
    if (DATA.runs.some((run) => run.data.course.course.start_s.length)) place.style.height = `${height}px`;
    const axes = Object.fromEntries(panels.flatMap((unit, index) => {
      filled += index ? panel + above[index] : 0;
      const top = 1 - filled / inner;
      const legend = { orientation: "h", x: 0, y: top, yanchor: "bottom", font: { size: 12 } };
      return [[axisName(index), { domain: [Math.max(0, top - panel / inner), top], title: { text: UNITS[unit] ?? plain(unit), font: { size: onPaper() ? 9.5 : 12.5 } }, rangemode: "tozero", nticks: 5 }],
        [axisName(index, "legend"), legend]];
    }));
    return { traces, layout: {
      showlegend: true, height, margin: { l: 60, r: 16, t: above[0], b: BOTTOM }, shapes: shades(),
      xaxis: { title: { text: "time, s" }, rangemode: "tozero", anchor: axisName(panels.length - 1, "y") }, ...axes,
    } };
  }

  // One row per interval of the run's own curves, then one per reading of each other curve.
  const rows = () => [["run", "from_s", "figure", "of", "value", "unit"], ...DATA.runs.flatMap(({ name, data: { course: { course: own, series } } }) => [
    ...own.start_s.flatMap((start, index) => [[name, start, "output_tokens", "client", own.tokens_per_s[index], "tokens/s"],
      [name, start, "in_flight", "client", own.in_flight[index], "streams"], [name, start, "receiving", "client", own.receiving[index], "streams"]]),
    ...series.flatMap((each) => each.x.map((at, index) => [name, at, each.title, each.of, each.y[index], each.unit])),
  ])];

  chart("course", { draw: course, rows });
})();
