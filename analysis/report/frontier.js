// Draws the charts of the page of sweeps: throughput against speed per user and against TTFT, and goodput by load.
// Check boxes select the sweeps and the hardware limit. A click on a point opens the report of its run.
"use strict";
(() => {
  const { DATA: data, several, chart, draw, colour, fade, plain, element, logarithmic } = Report;
  const rateUnit = `tokens/s${data.per}`;
  const symbols = { met: "circle", "": "circle", inconclusive: "circle-open-dot", "not met": "circle-open" };
  const noLegend = { showlegend: false, margin: { l: 60, r: 16, t: 18, b: 44 } }; // the legend of the frontier chart is valid for all
  const names = ["frontier", "first", "goodput"];
  const isChecked = (name, value) => document.querySelector(`input[name=${name}][value="${value}"]`)?.checked ?? false;
  const shownRuns = () => data.runs.filter((_, index) => !several || isChecked("shown", index));

  // Returns the name of a verdict in the legend. Without objectives, a verdict says whether the server keeps up.
  function verdictName(run, verdict) {
    if (verdict === "") return "measured";
    if (run.judged) return verdict;
    return { met: "keeps up", inconclusive: "unclear", "not met": "queue grows" }[verdict];
  }

  // Returns the steps that no other step beats in both figures, from best to worst x.
  function paretoFront(steps, x, lowerIsBetter) {
    const sorted = [...steps].sort((a, b) => (lowerIsBetter ? a[x] - b[x] : b[x] - a[x]) || b.rate - a.rate);
    const front = [];
    for (const step of sorted) if (!front.length || step.rate > front.at(-1).rate) front.push(step);
    return front;
  }

  // Returns an entry of the legend that explains a symbol or a line. It has no point of its own.
  const legendEntry = (name, style) => ({ type: "scatter", x: [null], y: [null], name, hoverinfo: "skip", ...style });

  const emptyTrace = legendEntry("", { showlegend: false }); // keeps the axes if no sweep is selected

  const points = (run, steps, x, y) => ({
    type: "scatter", mode: "markers", name: "steps", showlegend: false,
    x: steps.map((step) => step[x]), y: steps.map((step) => step[y]), customdata: steps.map((step) => step.report),
    text: steps.map((step) => [...(several ? [plain(run.name)] : []), ...step.hover].join("<br>")), hovertemplate: "%{text}<extra></extra>",
    marker: { size: 10, color: colour(run.colour), symbol: steps.map((step) => symbols[step.verdict]), line: { width: 2, color: colour(run.colour) },
      opacity: steps.map((step) => (step.verdict === "not met" ? 0.75 : 1)) },
  });

  const path = (steps, x, y, name, line) => ({ type: "scatter", mode: "lines", name, showlegend: false, hoverinfo: "skip",
    x: steps.map((step) => step[x]), y: steps.map((step) => step[y]), line });

  const star = (run, steps, x, y) => ({ type: "scatter", mode: "markers", name: "star", showlegend: false, hoverinfo: "skip",
    x: steps.map((step) => step[x]), y: steps.map((step) => step[y]), marker: { symbol: "star", size: 19, color: colour(run.colour), line: { color: colour("paper"), width: 1.5 } } });

  // Labels points with their loads. Labels that would overlap are left out, except those of the star and of the
  // capacity's bracket.
  function labels(name, runs, known, x, y, isLog) {
    const all = runs.flatMap((run) => known(run).map((step) => ({ step, run, weight: step.best ? 0 : run.bracket.includes(step.step) ? 1 : 2 })));
    const scaled = (value) => (isLog ? Math.log(value) : value);
    const span = (figure, scale) => {
      const values = all.map(({ step }) => scale(step[figure]));
      return (Math.max(...values) - (isLog && figure === x ? Math.min(...values) : Math.min(0, ...values))) || 1;
    };
    const [width, height] = [span(x, scaled), span(y, Number)];
    const { clientWidth, clientHeight } = element(name);
    const [wide, high] = [34 / Math.max(clientWidth - 90, 200), 18 / Math.max(clientHeight - 90, 150)]; // size of a label, as shares
    const kept = [];
    for (const entry of all.sort((a, b) => a.weight - b.weight)) {
      const overlaps = kept.some((other) => Math.abs(scaled(other.step[x]) - scaled(entry.step[x])) / width < wide
        && Math.abs(other.step[y] - entry.step[y]) / height < high);
      if (!overlaps) kept.push(entry);
    }
    return { type: "scatter", mode: "markers+text", name: "loads", showlegend: false, hoverinfo: "skip", cliponaxis: false, textposition: "top right",
      x: kept.map(({ step }) => step[x]), y: kept.map(({ step }) => step[y]), text: kept.map(({ step }) => step.label),
      marker: { size: 12, opacity: 0 }, // keeps the labels clear of the points
      textfont: { size: 11.5, color: kept.map(({ run }) => (several ? colour(run.colour) : colour("ink"))) } };
  }

  // Returns the entries of the legend: one per sweep, then one per symbol and line that the chart contains.
  function legendOf(runs, parts) {
    const quiet = colour("quiet");
    const entries = several ? runs.map((run) => legendEntry(plain(run.name), { mode: "lines+markers", marker: { size: 9, color: colour(run.colour) }, line: { color: fade(colour(run.colour), "90"), dash: run.dash } })) : [];
    const verdicts = new Map(runs.flatMap((run) => parts.known(run).map((step) => [verdictName(run, step.verdict), step.verdict])));
    verdicts.forEach((verdict, name) => entries.push(legendEntry(name, { mode: "markers", marker: { size: 10, color: quiet, symbol: symbols[verdict], line: { width: 2, color: quiet } } })));
    if (parts.star) entries.push(legendEntry("largest load within the capacity", { mode: "markers", marker: { symbol: "star", size: 13, color: quiet } }));
    if (parts.bracket) entries.push(legendEntry("capacity between", { mode: "lines", line: { color: fade(quiet, "50"), width: 9 } }));
    if (parts.front) entries.push(legendEntry("Pareto frontier", { mode: "lines", line: { color: quiet, width: 1.5 } }));
    if (parts.limit) entries.push(legendEntry("hardware limit", { mode: "lines", line: { color: quiet, width: 1.5, dash: "dot" } }));
    if (parts.predicted) entries.push(legendEntry("predicted", { mode: "lines", line: { color: quiet, width: 1.5, dash: "dash" } }));
    return entries;
  }

  // Draws throughput against another figure of the steps: `speed` or `ttft`. Steps that ended early have no throughput.
  function throughput(name, x, axis, isLog) {
    const runs = shownRuns();
    const known = (run) => run.steps.filter((step) => !step.overload && step[x] && step.rate);
    const traces = [];
    const parts = { known };
    const front = paretoFront(runs.flatMap(known), x, x === "ttft");
    if (several && runs.length > 1 && front.length > 1) {
      parts.front = true;
      traces.push(path(front, x, "rate", "frontier", { color: fade(colour("quiet"), "90"), width: 1.5 }));
    }
    for (const run of runs) {
      const hue = colour(run.colour);
      const steps = known(run);
      const limits = x === "speed" && isChecked("limit", "limit") ? run.steps.filter((step) => step.limit_speed && step.limit_rate && !step.overload).sort((a, b) => a.limit_speed - b.limit_speed) : [];
      if (limits.length) {
        parts.limit = true;
        traces.push({ ...path(limits, "limit_speed", "limit_rate", "hardware limit", { color: fade(hue, "b0"), width: 1.5, dash: "dot" }),
          mode: "lines+text", text: limits.map((_, index) => (index ? "" : "hardware limit")), textposition: "middle left", textfont: { size: 11.5, color: hue } });
      }
      const predicted = run.predicted.filter((point) => point[x] && point.rate);
      if (predicted.length) {
        parts.predicted = true;
        traces.push(path(predicted, x, "rate", "predicted", { color: hue, width: 1.5, dash: "dash" }));
      }
      traces.push(path(steps, x, "rate", "loads in order", { color: fade(hue, "70"), width: 1.5, dash: run.dash }));
      const bracket = steps.filter((step) => run.bracket.includes(step.step));
      if (bracket.length === 2) {
        parts.bracket = true;
        traces.push(path(bracket, x, "rate", "capacity", { color: fade(hue, "40"), width: 10 }));
      }
      traces.push(points(run, steps, x, "rate"));
      const best = steps.filter((step) => step.best);
      if (best.length) {
        parts.star = true;
        traces.push(star(run, best, x, "rate"));
      }
    }
    if (runs.some((run) => known(run).length)) traces.push(labels(name, runs, known, x, "rate", isLog));
    const scale = isLog ? { type: "log", ...logarithmic(traces) } : { rangemode: "tozero" };
    const legend = isLog ? [] : legendOf(runs, parts);
    return { traces: [emptyTrace, ...traces, ...legend], layout: { ...(isLog ? noLegend : { showlegend: true }), xaxis: { title: { text: axis }, ...scale },
      yaxis: { title: { text: `output ${rateUnit}` }, rangemode: "tozero" } } };
  }

  // Draws the good requests per second by load. The band is the interval of the capacity.
  function goodput() {
    const runs = shownRuns();
    const known = (run) => run.steps.filter((step) => step.goodput !== null);
    const traces = [];
    const shapes = [];
    const loads = [...new Set(runs.flatMap((run) => run.steps.map((step) => step.load)))].sort((a, b) => a - b);
    const isLog = loads.length > 4 && loads.at(-1) / loads[0] > 20;
    for (const run of runs) {
      const hue = colour(run.colour);
      const steps = known(run);
      if (run.capacity) {
        shapes.push({ type: "rect", xref: "x", yref: "paper", x0: run.capacity.low, x1: run.capacity.high, y0: 0, y1: 1, line: { width: 0 }, fillcolor: fade(hue, "24"), layer: "below" });
        if (run.capacity.at !== null) shapes.push({ type: "line", xref: "x", yref: "paper", x0: run.capacity.at, x1: run.capacity.at, y0: 0, y1: 1, line: { width: 1.5, color: fade(hue, "b0"), dash: "dot" } });
      }
      if (run.over === "rate") traces.push({ ...path(steps, "load", "load", "requested", { color: colour("line"), width: 1.5 }) });
      const predicted = run.predicted.filter((point) => point.goodput);
      if (predicted.length) traces.push(path(predicted, "load", "goodput", "predicted", { color: hue, width: 1.5, dash: "dash" }));
      traces.push(path(steps, "load", "goodput", "loads in order", { color: fade(hue, "70"), width: 1.5, dash: run.dash }), points(run, steps, "load", "goodput"));
      const best = steps.filter((step) => step.best);
      if (best.length) traces.push(star(run, best, "load", "goodput"));
    }
    const ticks = isLog ? { type: "log", tickvals: loads, ticktext: loads.map((load) => load.toLocaleString("en", { maximumSignificantDigits: 3 })) } : { rangemode: "tozero" };
    const judged = runs.some((run) => run.judged);
    return { traces: [emptyTrace, ...traces], layout: { ...noLegend, shapes, xaxis: { title: { text: data.load }, ...ticks },
      yaxis: { title: { text: `${judged ? "good" : "complete"} requests/s` }, rangemode: "tozero" } } };
  }

  const rows = (columns) => () => [["sweep", "load", "verdict", ...Object.keys(columns), "report"],
    ...data.runs.flatMap((run) => run.steps.map((step) => [run.name, step.load, verdictName(run, step.verdict), ...Object.values(columns).map((column) => step[column]), step.report]))];

  const first = { "median TTFT, s": "ttft", [rateUnit]: "rate" };
  chart("frontier", { draw: () => throughput("frontier", "speed", "tokens/s per user (1 / median TPOT)", false), rows: rows({ "tokens/s per user": "speed", [rateUnit]: "rate" }) });
  chart("first", { draw: () => throughput("first", "ttft", "TTFT (median), s", true), rows: rows(first) });
  chart("goodput", { draw: goodput, rows: rows({ "good requests/s": "goodput" }) });

  document.querySelectorAll("input[name=shown], input[name=limit]").forEach((input) => input.addEventListener("change", () => names.forEach((name) => draw(name))));
  names.forEach((name) => {
    const addClickHandler = () => {
      if (!element(name).on) return void setTimeout(addClickHandler, 100); // the chart is drawn only when it comes into view
      element(name).on("plotly_click", ({ points: [{ customdata }] }) => { if (customdata) location.href = encodeURI(customdata); });
    };
    addClickHandler();
  });
})();
