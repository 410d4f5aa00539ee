// The charts of the page: those that analysis/report/charts.py describes by traces, and what all share: colours, layout,
// drawing again when the reader's scheme or the paper changes, the keyboard, and the data as a table and as a file.
// Scripts after this one add charts with Report.chart.
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const Report = (() => {
  const PAPER_WIDTH = 660; // fits A4 and Letter between the usual margins
  const PAPER_HEIGHT = { tall: 420, wide: 270 };
  const ROWS_SHOWN = 400;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const charts = new Map();
  const drawn = new Set();
  const several = DATA.runs.length > 1;
  const root = document.documentElement;

  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const fade = (hex, much = "2e") => `${hex}${much}`;
  // Plotly reads tags, entities and %{...} in text; names hold a server's own words.
  const plain = (text) => String(text).replace(/[<>&%{}]/g, " ");
  const element = (name) => document.getElementById(`chart-${name}`);

  // On a narrow screen each run has a line of the legend to itself, and charts grow by it (page.css).
  if (several) root.style.setProperty("--legend", `${1.1 * new Set(DATA.runs.map(({ name }) => name)).size}rem`);

  // How many lines a legend takes on a screen this wide.
  function legendLines(place, traces) {
    const names = traces.filter(({ showlegend = true, name }) => showlegend && name).map(({ name }) => name.length * 6.6 + 45);
    const room = (root.classList.contains("on-paper") ? PAPER_WIDTH : place.clientWidth || 700) - 76;
    return names.reduce((sum, width) => sum + width, 0) > room ? Math.ceil(names.length / Math.max(1, Math.floor(room / Math.max(...names)))) : 1;
  }

  function layout(place, traces, changes) {
    const axis = { color: colour("quiet"), gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false, automargin: false,
      title: { standoff: 8 }, separatethousands: true, exponentformat: "SI", minexponent: 3 };
    const merged = {
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colour("ink") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 60, r: 16, t: several || changes.showlegend ? 15 + 19 * legendLines(place, traces) : 10, b: 44 },
      showlegend: several, legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal", font: { size: 12 } },
      hoverlabel: { bgcolor: colour("raised"), bordercolor: colour("line"), font: { color: colour("ink") }, align: "left" },
      dragmode: touch.matches ? false : "zoom", hovermode: "closest",
      ...(root.classList.contains("on-paper") ? { width: PAPER_WIDTH, height: PAPER_HEIGHT[place.className.split(" ")[1]] ?? 240 } : { autosize: true }),
      ...changes,
    };
    for (const name of Object.keys(merged)) {
      if (/^[xy]axis/.test(name)) merged[name] = { ...axis, ...merged[name], title: { ...axis.title, ...merged[name].title } };
    }
    return merged;
  }

  // Plotly is unpacked after the first screen, as a script that the page's policy names by its hash.
  async function unpacked() {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (each) => each.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = made("script", await new Response(stream).text());
    document.head.append(script);
  }

  function draw(name) {
    if (!window.Plotly) return; // it will be: charts in view wait for it
    const { draw: drawing, refine } = charts.get(name);
    const place = element(name);
    const first = !place.data;
    const { traces, layout: changes = {} } = drawing(place);
    near.unobserve(place);
    drawn.add(name);
    if (traces.some((trace) => trace.x.length)) {
      Plotly.react(place, traces, layout(place, traces, changes), { displayModeBar: false, responsive: true, showTips: false });
      if (first && refine) place.on("plotly_relayout", refine);
      refine?.();
    } else {
      place.classList.add("empty");
      place.removeAttribute("tabindex");
      place.textContent = "Nothing to draw: there is no sample.";
    }
    if (drawn.size === charts.size) root.dataset.drawn = "all";
  }

  // A chart is drawn when it is about to come into view, and again when its colours have changed.
  const near = new IntersectionObserver((entries) => entries.filter(({ isIntersecting }) => isIntersecting)
    .forEach(({ target }) => ready.then(() => draw(target.id.slice("chart-".length)))), { rootMargin: "400px" });

  // `draw` gives traces and changes to the layout, each time anew; `rows` gives the chart's data, its header first;
  // `refine`, if there is one, looks at what is in view, after each drawing and each zoom.
  function chart(name, parts) {
    if (!element(name)) return;
    charts.set(name, parts);
    near.observe(element(name));
  }

  const redrawn = () => charts.forEach((_, name) => { near.unobserve(element(name)); near.observe(element(name)); });

  async function drawAll() {
    await ready;
    charts.forEach((_, name) => draw(name));
  }

  function line(run, x, y, more) {
    const { line: look, ...rest } = more;
    return { type: "scatter", mode: x.length > 1 ? "lines" : "markers", name: plain(run.name), x, y,
      line: { color: colour(run.colour), dash: run.dash, width: 2, ...look }, ...rest };
  }

  const column = (data, path) => path.split(".").reduce((part, name) => part[name], data);

  // A trace or a layout of charts.py with its references replaced: see there.
  function resolved(value, run, spec) {
    if (Array.isArray(value)) return value.map((each) => resolved(each, run, spec));
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, resolved(each, run, spec)]));
    if (typeof value !== "string") return value;
    if (value[0] === "$" && run) {
      const columns = value.slice(1).split(",").map((path) => column(run.data[spec.id], path));
      return columns.length === 1 ? columns[0] : columns[0].map((_, index) => columns.map((each) => each[index]));
    }
    if (value === "@dash") return run.dash;
    const [hue, faded = ""] = value.slice(1).split(":");
    if (value[0] === "@" && (hue === "run" || (/^[\w-]+$/.test(hue) && colour(hue)))) return fade(colour(hue === "run" ? run.colour : hue), faded);
    const words = { name: run && several ? plain(run.name) : "", xunit: spec.scales.x?.unit ?? "s", yunit: spec.scales.y?.unit ?? "s" };
    return value.replace(/@(name|xunit|yunit)\b/g, (_, word) => words[word]);
  }

  function described(spec) {
    const traces = DATA.runs.filter((run) => run.data[spec.id]).flatMap((run) => spec.traces
      .filter(({ single_run = !several }) => single_run === !several)
      .map(({ single_run: _, ...trace }) => {
        const found = resolved(trace, run, spec);
        if (found.mode === "lines" && found.x.length === 1) found.mode = "markers";
        for (const [axis, { factor }] of Object.entries(spec.scales)) found[axis] = found[axis].map((each) => each === null ? null : each * factor);
        return found;
      })).filter(({ x }) => x.length);
    traces.forEach((trace, index) => { // runs of one name are one entry of the legend
      if (!several || !traces.some(({ name }, other) => other !== index && name === trace.name)) return;
      trace.legendgroup = trace.name;
      if (traces.findIndex(({ name, showlegend }) => name === trace.name && showlegend !== false) !== index) trace.showlegend = false;
    });
    const changes = resolved(spec.layout, null, spec);
    const chosen = (name) => element(spec.id).closest("section").querySelector(`input[name=${name}]:checked`)?.value;
    if (chosen("axis") === "log" || changes.xaxis?.type === "log") changes.xaxis = { ...changes.xaxis, type: "log", ...logarithmic(traces) };
    if (chosen("shares") === "tails") changes.yaxis = tails(traces);
    return { traces, layout: changes };
  }

  // As HdrHistogram draws them: each nine of a percentile is as high as the one before.
  function tails(traces) {
    const shares = [0, 0.5, 0.9, 0.99, 0.999, 0.9999];
    const height = (share) => -Math.log10(1 - share);
    for (const trace of traces) {
      const most = trace.y.reduce((largest, share) => share < 1 ? Math.max(largest, share) : largest, 0);
      trace.customdata = trace.y;
      trace.hovertemplate = trace.hovertemplate?.replace("%{y", "%{customdata");
      trace.y = trace.y.map((share) => height(share < 1 ? share : (1 + most) / 2));
    }
    return { tickvals: shares.map(height), ticktext: shares.map((share) => `${Number((share * 100).toFixed(2))}%`), rangemode: "tozero" };
  }

  function rowsOf(spec) {
    const heads = Object.keys(spec.table);
    return [["run", ...heads], ...DATA.runs.filter((run) => run.data[spec.id]).flatMap((run) => {
      const columns = heads.map((head) => column(run.data[spec.id], spec.table[head]));
      return columns[0].map((_, index) => [run.name, ...columns.map((each) => each[index])]);
    })];
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

  // Text cells are quoted, and one that a spreadsheet would take for a formula gets an apostrophe.
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

  // A picture says by itself what it shows, and whether that was simulated.
  async function picture(name, format) {
    await ready;
    if (!drawn.has(name)) draw(name);
    const place = element(name);
    const [width, height] = [place.clientWidth, place.clientHeight + 30];
    const mark = document.querySelector(".bar .badge")?.textContent;
    const title = { text: plain([mark, document.getElementById(`title-${name}`).textContent].filter(Boolean).join("  ")), font: { size: 14 }, x: 0.01, y: 1, yref: "container", yanchor: "top", pad: { t: 8 } };
    const above = place.layout.margin.t + 30;
    const url = await Plotly.toImage({ data: place.data, layout: { ...place.layout, title, height, margin: { ...place.layout.margin, t: above }, paper_bgcolor: colour("paper") } },
      { format, width, height, scale: 2 });
    const [head, body] = [url.slice(0, url.indexOf(",")), url.slice(url.indexOf(",") + 1)];
    const bytes = head.endsWith("base64") ? Uint8Array.from(atob(body), (each) => each.charCodeAt(0)) : decodeURIComponent(body);
    save(`${name}.${format}`, new Blob([bytes], { type: format === "svg" ? "image/svg+xml" : "image/png" }));
  }

  const csv = (rows) => rows.map((row) => row.map(cell).join(",")).join("\r\n");

  function made(tag, text, name = "") {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (name) node.className = name;
    return node;
  }

  const shown = (value) => value === null || value === undefined ? "–"
    : typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 6 }) : value;

  function tableOf(name) {
    const [head, ...body] = charts.get(name).rows();
    const table = made("table", undefined, "small");
    const drawnRows = body.slice(0, ROWS_SHOWN);
    const numeric = head.map((_, index) => drawnRows.every((row) => typeof row[index] !== "string"));
    const line = (values, tag) => {
      const row = made("tr");
      values.forEach((value, index) => {
        const item = made(tag, shown(value), numeric[index] ? "number" : "");
        if (tag === "th") item.scope = "col";
        row.append(item);
      });
      return row;
    };
    const caption = made("caption", body.length > ROWS_SHOWN
      ? `The first ${ROWS_SHOWN} of ${body.length.toLocaleString("en")} rows; the file has all.` : `${body.length.toLocaleString("en")} rows`);
    const [top, rest] = [made("thead"), made("tbody")];
    top.append(line(head, "th"));
    rest.append(...drawnRows.map((row) => line(row, "td")));
    table.append(caption, top, rest);
    return table;
  }

  // Each axis's range by a factor around its middle, or moved by a part of itself.
  function moved(place, names, factor, shift) {
    const changes = {};
    for (const name of names) {
      const [from, to] = place._fullLayout[name].range;
      const [middle, half] = [(from + to) / 2 + shift * (to - from), ((to - from) / 2) * factor];
      changes[`${name}.range`] = [middle - half, middle + half];
    }
    Plotly.relayout(place, changes);
  }

  function zoom(place, key) {
    const axes = Object.keys(place._fullLayout ?? {}).filter((name) => /^[xy]axis\d*$/.test(name));
    const both = axes.filter((name) => name[0] === "x" || place.dataset.zoom === "both");
    const down = axes.filter((name) => name[0] === "y");
    const known = {
      "+": () => moved(place, both, 0.5, 0), "=": () => moved(place, both, 0.5, 0), "-": () => moved(place, both, 2, 0),
      ArrowLeft: () => moved(place, axes.filter((name) => name[0] === "x"), 1, -0.25),
      ArrowRight: () => moved(place, axes.filter((name) => name[0] === "x"), 1, 0.25),
      ...(place.dataset.zoom === "both" ? { ArrowUp: () => moved(place, down, 1, 0.25), ArrowDown: () => moved(place, down, 1, -0.25) } : {}),
      0: () => draw(place.id.slice("chart-".length)),
    };
    known[key]?.();
    return key in known;
  }

  // The paper waits for nobody: all charts are drawn at once.
  function onPaper(printing) {
    root.classList.toggle("on-paper", printing);
    document.querySelectorAll(".fold").forEach((each) => {
      if (printing) each.dataset.closed = each.open ? "" : "yes";
      each.open = printing || each.dataset.closed !== "yes";
    });
    if (printing) {
      charts.forEach((_, name) => {
        window.Plotly?.purge(element(name)); // or a legend keeps the lines that it had on the screen
        draw(name);
      });
    }
    else redrawn();
  }

  document.querySelectorAll("[data-save]").forEach((button) => button.addEventListener("click", () => {
    const { of, save: format } = button.dataset;
    if (format === "csv") save(`${of}.csv`, new Blob([csv(charts.get(of).rows())], { type: "text/csv" }));
    else picture(of, format);
  }));
  document.querySelectorAll("[data-rows]").forEach((place) =>
    place.closest("details").addEventListener("toggle", () => { if (!place.firstChild) place.append(tableOf(place.dataset.rows)); }));
  document.querySelectorAll(".chart").forEach((place) => place.addEventListener("keydown", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.altKey && place.data && zoom(place, event.key)) event.preventDefault();
  }));
  document.querySelectorAll("[data-zoom-of]").forEach((button) =>
    button.addEventListener("click", () => zoom(element(button.dataset.zoomOf), button.dataset.key)));
  const specs = (DATA.charts ?? []).filter(({ script }) => !script);
  const ready = new Promise((done) => { addEventListener("load", () => setTimeout(done, 0)); }).then(unpacked);
  specs.forEach((spec) => chart(spec.id, { draw: () => described(spec), rows: () => rowsOf(spec) }));
  document.querySelectorAll("input[name=axis], input[name=shares]").forEach((input) => input.addEventListener("change", () =>
    specs.filter(({ id }) => input.closest("section").contains(element(id))).forEach(({ id }) => draw(id))));
  dark.addEventListener("change", redrawn);
  addEventListener("beforeprint", () => onPaper(true));
  addEventListener("afterprint", () => onPaper(false));

  return { DATA, several, chart, draw, drawAll, ready, line, colour, fade, plain, csv, save, made, element };
})();
