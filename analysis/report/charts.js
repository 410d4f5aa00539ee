// Draws the charts that analysis/report/charts.py describes by traces, and provides what all charts share: colours,
// layout, redrawing when the colour scheme changes or the page is printed, keyboard control, and the data as a table and
// as files. Later scripts add their charts with Report.chart.
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const Report = (() => {
  const PAPER_WIDTH = 660; // fits A4 and Letter between the usual margins
  const HALF_PAPER_WIDTH = 322; // charts that stand side by side
  const PAPER_HEIGHT = { high: 560, tall: 420, wide: 270 };
  const ROWS_SHOWN = 400;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const charts = new Map();
  const drawn = new Set();
  const several = DATA.runs.length > 1;
  const root = document.documentElement;

  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const fade = (hex, alpha = "2e") => `${hex}${alpha}`;
  // Plotly interprets tags, entities and %{...} in text, and names may contain text from a server.
  const plain = (text) => String(text).replace(/[<>&%{}]/g, " ");
  const element = (name) => document.getElementById(`chart-${name}`);

  // On a narrow screen the legend has one line per run, and charts grow by that height (page.css).
  if (several) root.style.setProperty("--legend", `${1.1 * new Set(DATA.runs.map(({ name }) => name)).size}rem`);

  const paperWidth = (container) => container.closest(".charts") ? HALF_PAPER_WIDTH : PAPER_WIDTH;

  // Returns the number of lines that the legend needs at the current width.
  function legendLines(container, traces) {
    const widths = traces.filter(({ showlegend = true, name }) => showlegend && name).map(({ name }) => name.length * 6.6 + 45);
    const available = (root.classList.contains("on-paper") ? paperWidth(container) : container.clientWidth || 700) - 76;
    if (widths.reduce((sum, width) => sum + width, 0) <= available) return 1;
    return Math.ceil(widths.length / Math.max(1, Math.floor(available / Math.max(...widths))));
  }

  // Returns true if the values of an axis, such as `yaxis2`, are names. Each of them needs a label.
  const hasCategories = (axis, traces) => traces.some((trace) => (trace[axis.slice(0, 5)] ?? axis[0]) === axis.replace("axis", "") && typeof trace[axis[0]]?.[0] === "string");

  function layout(container, traces, changes) {
    const axis = { color: colour("quiet"), gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false, automargin: false,
      title: { standoff: 8 }, separatethousands: true, exponentformat: "SI", minexponent: 3 };
    const merged = {
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colour("ink") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 60, r: 16, t: several || changes.showlegend ? 15 + 19 * legendLines(container, traces) : 10, b: 44 },
      showlegend: several, legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal", font: { size: 12 } },
      hoverlabel: { bgcolor: colour("raised"), bordercolor: colour("line"), font: { color: colour("ink") }, align: "left" },
      dragmode: touch.matches ? false : "zoom", hovermode: "closest",
      ...(root.classList.contains("on-paper") ? { width: paperWidth(container), height: PAPER_HEIGHT[container.className.split(" ")[1]] ?? 240 } : { autosize: true }),
      ...changes,
    };
    for (const name of Object.keys(merged)) {
      if (/^[xy]axis/.test(name)) merged[name] = { ...axis, nticks: hasCategories(name, traces) ? 0 : 5, ...merged[name], title: { ...axis.title, ...merged[name].title } };
    }
    return merged;
  }

  // Unpacks and runs Plotly after the first screen is shown. The page's policy allows the script by its hash.
  async function loadPlotly() {
    const stream = new Blob([packedPlotly()]).stream().pipeThrough(new DecompressionStream("gzip"));
    const source = await new Response(stream).text();
    if (!window.Plotly) document.head.append(createElement("script", source));
  }

  // Unpacks and runs Plotly before this function returns, for a page that is printed right after it is loaded.
  function loadPlotlyNow() {
    document.head.append(createElement("script", new TextDecoder().decode(gunzip(packedPlotly()))));
  }

  const bytes = (base64) => Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const packedPlotly = () => bytes(document.getElementById("plotly").textContent);

  // Returns the value of packed JSON (packing.py).
  const unpacked = (text) => JSON.parse(new TextDecoder().decode(gunzip(bytes(text))));

  function draw(name) {
    if (!window.Plotly) return; // charts in view are drawn once Plotly is loaded
    const { draw: drawing, refine } = charts.get(name);
    const container = element(name);
    const first = !container.data;
    const { traces, layout: changes = {} } = drawing(container);
    visibility.unobserve(container);
    drawn.add(name);
    if (traces.some((trace) => trace.x.length)) {
      Plotly.react(container, traces, layout(container, traces, changes), { displayModeBar: false, responsive: true, showTips: false });
      if (first && refine) container.on("plotly_relayout", refine);
      refine?.();
    } else {
      container.classList.add("empty");
      container.removeAttribute("tabindex");
      container.textContent = "No data to draw.";
    }
    if (drawn.size === charts.size) root.dataset.drawn = "all";
  }

  // A chart is drawn shortly before it comes into view, and again when its colours have changed.
  const visibility = new IntersectionObserver((entries) => entries.filter(({ isIntersecting }) => isIntersecting)
    .forEach(({ target }) => ready.then(() => draw(target.id.slice("chart-".length)))), { rootMargin: "400px" });

  // Registers a chart. `draw` returns new traces and layout changes on each call. `rows` returns the data table, with
  // its heading first. The optional `refine` adapts the chart to the visible range, after each drawing and each zoom.
  function chart(name, parts) {
    if (!element(name)) return;
    charts.set(name, parts);
    visibility.observe(element(name));
  }

  const redraw = () => charts.forEach((_, name) => { visibility.unobserve(element(name)); visibility.observe(element(name)); });

  async function drawAll() {
    await ready;
    charts.forEach((_, name) => draw(name));
  }

  function line(run, x, y, options) {
    const { line: style, ...rest } = options;
    return { type: "scatter", mode: x.length > 1 ? "lines" : "markers", name: plain(run.name), x, y,
      line: { color: colour(run.colour), dash: run.dash, width: 2, ...style }, ...rest };
  }

  const column = (data, path) => path.split(".").reduce((part, name) => part[name], data);

  // Replaces the references in a trace or layout. charts.py documents them.
  function resolve(value, run, spec) {
    if (Array.isArray(value)) return value.map((item) => resolve(item, run, spec));
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, resolve(item, run, spec)]));
    if (typeof value !== "string") return value;
    if (value[0] === "$" && run) {
      const columns = value.slice(1).split(",").map((path) => column(run.data[spec.id], path));
      return columns.length === 1 ? columns[0] : columns[0].map((_, index) => columns.map((values) => values[index]));
    }
    if (value === "@dash") return run.dash;
    const [colourName, alpha = ""] = value.slice(1).split(":");
    const isColour = value[0] === "@" && (colourName === "run" || (/^[\w-]+$/.test(colourName) && colour(colourName)));
    if (isColour) return fade(colour(colourName === "run" ? run.colour : colourName), alpha);
    const words = { name: run && several ? plain(run.name) : "", xunit: spec.scales.x?.unit ?? "s", yunit: spec.scales.y?.unit ?? "s" };
    return value.replace(/@(name|xunit|yunit)\b/g, (_, word) => words[word]);
  }

  // Returns the traces and layout of a chart that charts.py describes.
  function drawSpec(spec) {
    const traces = DATA.runs.filter((run) => run.data[spec.id]).flatMap((run) => spec.traces
      .filter(({ single_run = !several }) => single_run === !several)
      .map(({ single_run: _, ...trace }) => {
        const result = resolve(trace, run, spec);
        if (result.mode === "lines" && result.x.length === 1) result.mode = "markers";
        for (const [axis, { factor }] of Object.entries(spec.scales)) result[axis] = result[axis].map((value) => value === null ? null : value * factor);
        return result;
      })).filter(({ x }) => x.length);
    traces.forEach((trace, index) => { // runs with the same name share a legend entry
      if (!several || !traces.some(({ name }, other) => other !== index && name === trace.name)) return;
      trace.legendgroup = trace.name;
      if (traces.findIndex(({ name, showlegend }) => name === trace.name && showlegend !== false) !== index) trace.showlegend = false;
    });
    const changes = resolve(spec.layout, null, spec);
    const chosen = (name) => element(spec.id).closest("section").querySelector(`input[name=${name}]:checked`)?.value;
    if (chosen("axis") === "log" || changes.xaxis?.type === "log") changes.xaxis = { ...changes.xaxis, type: "log", ...logarithmic(traces) };
    if (chosen("shares") === "tails") changes.yaxis = tails(traces);
    return { traces, layout: changes };
  }

  // Scales percentiles as HdrHistogram does: 90%, 99% and 99.9% are equally far apart.
  function tails(traces) {
    const shares = [0, 0.5, 0.9, 0.99, 0.999, 0.9999];
    const height = (share) => -Math.log10(1 - share);
    for (const trace of traces) {
      const highest = trace.y.reduce((largest, share) => share < 1 ? Math.max(largest, share) : largest, 0);
      trace.customdata = trace.y;
      trace.hovertemplate = trace.hovertemplate?.replace("%{y", "%{customdata");
      trace.y = trace.y.map((share) => height(share < 1 ? share : (1 + highest) / 2)); // 100% would be infinitely high
    }
    return { tickvals: shares.map(height), ticktext: shares.map((share) => `${Number((share * 100).toFixed(2))}%`), rangemode: "tozero" };
  }

  function rowsOf(spec) {
    const heads = Object.keys(spec.table);
    return [["run", ...heads], ...DATA.runs.filter((run) => run.data[spec.id]).flatMap((run) => {
      const columns = heads.map((head) => column(run.data[spec.id], spec.table[head]));
      return columns[0].map((_, index) => [run.name, ...columns.map((values) => values[index])]);
    })];
  }

  // Plotly labels a logarithmic axis with single digits between the powers of ten. Full numbers are easier to read.
  function logarithmic(traces) {
    const values = traces.flatMap((trace) => trace.x).filter((value) => value > 0);
    const low = values.reduce((minimum, value) => Math.min(minimum, value), Infinity);
    const high = values.reduce((maximum, value) => Math.max(maximum, value), 0);
    const tickvals = high / low > 4 ? powers(low, high) : steps(low, high);
    return { tickvals, ticktext: tickvals.map((value) => value.toLocaleString("en", { maximumSignificantDigits: 3 })) };
  }

  function powers(low, high) {
    const wide = high / low > 100;
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

  // Quotes text cells, and prefixes an apostrophe if a spreadsheet would interpret the text as a formula.
  function cell(value) {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return String(value);
    return `"${value.replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"`;
  }

  function save(name, blob) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  // Saves a chart as an image. Its title names the chart and states whether the figures are simulated.
  async function saveImage(name, format) {
    await ready;
    if (!drawn.has(name)) draw(name);
    const container = element(name);
    const [width, height] = [container.clientWidth, container.clientHeight + 30];
    const mark = document.querySelector(".bar .badge")?.textContent;
    const title = { text: plain([mark, document.getElementById(`title-${name}`).textContent].filter(Boolean).join("  ")), font: { size: 14 }, x: 0.01, y: 1, yref: "container", yanchor: "top", pad: { t: 8 } };
    const marginTop = container.layout.margin.t + 30;
    const url = await Plotly.toImage({ data: container.data, layout: { ...container.layout, title, height, margin: { ...container.layout.margin, t: marginTop }, paper_bgcolor: colour("paper") } },
      { format, width, height, scale: 2 });
    const [head, body] = [url.slice(0, url.indexOf(",")), url.slice(url.indexOf(",") + 1)];
    const content = head.endsWith("base64") ? bytes(body) : decodeURIComponent(body);
    save(`${name}.${format}`, new Blob([content], { type: format === "svg" ? "image/svg+xml" : "image/png" }));
  }

  const csv = (rows) => rows.map((row) => row.map(cell).join(",")).join("\r\n");

  function createElement(tag, text, name = "") {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (name) node.className = name;
    return node;
  }

  const sixDigits = new Intl.NumberFormat("en", { maximumSignificantDigits: 6 }).format; // `toLocaleString` is slower
  const shown = (value) => value === null || value === undefined ? "–" : typeof value === "number" ? sixDigits(value) : value;

  function tableOf(name) {
    const [head, ...body] = charts.get(name).rows();
    const table = createElement("table", undefined, "small");
    const shownRows = body.slice(0, ROWS_SHOWN);
    const numeric = head.map((_, index) => shownRows.every((row) => typeof row[index] !== "string"));
    const createRow = (values, tag) => {
      const row = createElement("tr");
      values.forEach((value, index) => {
        const item = createElement(tag, shown(value), numeric[index] ? "number" : "");
        if (tag === "th") item.scope = "col";
        row.append(item);
      });
      return row;
    };
    const caption = createElement("caption", body.length > ROWS_SHOWN
      ? `The first ${ROWS_SHOWN} of ${body.length.toLocaleString("en")} rows. The CSV file has all of them.` : `${body.length.toLocaleString("en")} rows`);
    const [tableHead, tableBody] = [createElement("thead"), createElement("tbody")];
    tableHead.append(createRow(head, "th"));
    tableBody.append(...shownRows.map((row) => createRow(row, "td")));
    table.append(caption, tableHead, tableBody);
    return table;
  }

  // Scales the range of each axis by a factor around its middle, and shifts it by a share of its length.
  function changeRange(container, names, factor, shift) {
    const changes = {};
    for (const name of names) {
      const [from, to] = container._fullLayout[name].range;
      const [middle, half] = [(from + to) / 2 + shift * (to - from), ((to - from) / 2) * factor];
      changes[`${name}.range`] = [middle - half, middle + half];
    }
    Plotly.relayout(container, changes);
  }

  // Zooms or moves a chart. Returns false for a key without a function.
  function zoom(container, key) {
    const axes = Object.keys(container._fullLayout ?? {}).filter((name) => /^[xy]axis\d*$/.test(name));
    const zoomsBoth = container.dataset.zoom === "both";
    const xAxes = axes.filter((name) => name[0] === "x");
    const yAxes = axes.filter((name) => name[0] === "y");
    const zoomed = zoomsBoth ? axes : xAxes;
    const actions = {
      "+": () => changeRange(container, zoomed, 0.5, 0), "=": () => changeRange(container, zoomed, 0.5, 0), "-": () => changeRange(container, zoomed, 2, 0),
      ArrowLeft: () => changeRange(container, xAxes, 1, -0.25),
      ArrowRight: () => changeRange(container, xAxes, 1, 0.25),
      ...(zoomsBoth ? { ArrowUp: () => changeRange(container, yAxes, 1, 0.25), ArrowDown: () => changeRange(container, yAxes, 1, -0.25) } : {}),
      0: () => draw(container.id.slice("chart-".length)),
    };
    actions[key]?.();
    return key in actions;
  }

  // Prepares the page for printing: opens every folded part and draws all charts at once.
  function setPrinting(printing) {
    root.classList.toggle("on-paper", printing);
    document.querySelectorAll(".fold").forEach((fold) => {
      if (printing) fold.dataset.closed = fold.open ? "" : "yes";
      fold.open = printing || fold.dataset.closed !== "yes";
    });
    if (printing) {
      if (!window.Plotly && charts.size) loadPlotlyNow();
      charts.forEach((_, name) => {
        Plotly.purge(element(name)); // otherwise the legend keeps its line breaks from the screen
        draw(name);
      });
    }
    else redraw();
  }

  document.querySelectorAll("[data-save]").forEach((button) => button.addEventListener("click", () => {
    const { of: name, save: format } = button.dataset;
    if (format === "csv") save(`${name}.csv`, new Blob([csv(charts.get(name).rows())], { type: "text/csv" }));
    else saveImage(name, format);
  }));
  document.querySelectorAll("[data-rows]").forEach((container) =>
    container.closest("details").addEventListener("toggle", () => { if (!container.firstChild) container.append(tableOf(container.dataset.rows)); }));
  document.querySelectorAll(".chart").forEach((container) => container.addEventListener("keydown", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.altKey && container.data && zoom(container, event.key)) event.preventDefault();
  }));
  document.querySelectorAll("[data-zoom-of]").forEach((button) =>
    button.addEventListener("click", () => zoom(element(button.dataset.zoomOf), button.dataset.key)));
  // A chart that was drawn while its part of the page was folded does not have the width of the page.
  document.querySelectorAll(".fold").forEach((fold) => fold.addEventListener("toggle", () =>
    fold.querySelectorAll(".chart").forEach(({ id }) => { if (fold.open && drawn.has(id.slice("chart-".length))) draw(id.slice("chart-".length)); })));
  // A link to a folded section opens it.
  document.querySelectorAll('a[href^="#"]').forEach((link) => link.addEventListener("click", () => {
    const fold = document.querySelector(`${link.hash} > .whole`);
    if (fold) fold.open = true;
  }));
  const specs = (DATA.charts ?? []).filter(({ script }) => !script);
  const ready = new Promise((done) => { addEventListener("load", () => setTimeout(done, 0)); }).then(loadPlotly);
  specs.forEach((spec) => chart(spec.id, { draw: () => drawSpec(spec), rows: () => rowsOf(spec) }));
  document.querySelectorAll("input[name=axis], input[name=shares]").forEach((input) => input.addEventListener("change", () =>
    specs.filter(({ id }) => input.closest("section").contains(element(id))).forEach(({ id }) => draw(id))));
  dark.addEventListener("change", redraw);
  addEventListener("beforeprint", () => setPrinting(true));
  addEventListener("afterprint", () => setPrinting(false));

  return { DATA, several, chart, draw, drawAll, ready, line, colour, fade, plain, csv, save, createElement, element, logarithmic, unpacked };
})();
