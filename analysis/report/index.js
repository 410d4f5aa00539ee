// A folder of runs: the table's filter, the runs picked beside each other, and one figure over the runs of a label.
"use strict";
(() => {
  const { chart, draw, colour, plain, made, element } = Report;
  const { runs, figures, latencies, points } = DATA.index;
  const COLOURS = 6; // of the palette
  const byId = (id) => document.getElementById(id);
  const legend = { showlegend: true, margin: { l: 68, r: 14, t: 40, b: 48 } };
  const rows = [...document.querySelector("table.overview").tBodies[0].rows];
  const words = rows.map((row) => row.textContent.toLowerCase());
  const picked = runs.map((_, index) => index).slice(0, 2); // in the order in which they were picked, the newest two first
  const look = (place) => ({ color: colour(`run-${(place % COLOURS) + 1}`), dash: place < COLOURS ? "solid" : "dash" });
  const beside = made("div", undefined, "scroll");
  const command = document.querySelector("#compare pre code");

  function percentiles() {
    const latency = latencies.find(({ name }) => name === document.querySelector("input[name=metric]:checked").value);
    const traces = picked.map((index, place) => ({ type: "scatter", mode: "lines+markers", connectgaps: true, name: plain(runs[index].name), x: points,
      y: runs[index].percentiles[latency.name].map((value) => value === null ? null : value * latency.factor), line: { ...look(place), width: 2 },
      hovertemplate: `%{x}: %{y:.4~g} ${latency.unit}<extra>${plain(runs[index].name)}</extra>` }));
    return { traces, layout: { ...legend, xaxis: { type: "category", title: { text: "percentile" } },
      yaxis: { rangemode: "tozero", title: { text: `${latency.title}, ${latency.unit}` } } } };
  }

  const shown = (value, { factor }) => value === null ? "–" : (value * factor).toLocaleString("en", { maximumSignificantDigits: 4 });

  // Every figure of the runs picked, and by how much it is not that of the first one.
  function besides() {
    return [["figure", "unit", ...picked.map((index) => runs[index].name)], ...figures.map((figure) => {
      const values = picked.map((index) => runs[index].figures[figure.name]);
      const by = (value) => value !== null && values[0] ? ` (${((value / values[0] - 1) * 100).toFixed(1).replace(/^(?=\d)/, "+")} %)` : "";
      const mark = (place) => runs[picked[place]].thin.includes(figure.name) ? "*" : "";
      return [figure.title, figure.unit, ...values.map((value, place) => shown(value, figure) + mark(place) + (place ? by(value) : ""))];
    })];
  }

  // Runs of two servers, versions or labels are two groups of repeats; else each is compared with the first one.
  function commands() {
    const groups = Map.groupBy ? Map.groupBy(picked, (index) => runs[index].group) : new Map();
    const paths = (indices) => indices.map((index) => runs[index].path).join(" ");
    if (picked.length < 2) return "Pick two or more runs above.";
    if (picked.length > 2 && groups.size === 2) return `loadgen compare --html compare.html ${[...groups.values()].map(paths).join(" -- ")}`;
    return picked.slice(1).map((index, place) => `loadgen compare --html compare${place ? `-${place + 1}` : ""}.html ${paths([picked[0], index])}`).join("\n");
  }

  function compare() {
    const table = made("table", undefined, "facts-table");
    const [head, ...body] = besides();
    table.createCaption().textContent = "Figures of the runs picked, against the first of them";
    const line = (part, values, tag) => {
      const row = part.insertRow();
      values.forEach((value, index) => {
        const cell = made(index ? tag : "th", value, index > 1 ? "number" : "");
        if (cell.tagName === "TH") cell.scope = tag === "th" ? "col" : "row";
        row.append(cell);
      });
    };
    line(table.createTHead(), head, "th");
    const rest = table.createTBody();
    body.forEach((values) => line(rest, values, "td"));
    beside.replaceChildren(table);
    command.textContent = commands();
  }

  function again() {
    const place = element("picked");
    if (place.classList.contains("empty")) place.replaceChildren();
    place.classList.remove("empty");
    draw("picked");
    compare();
  }

  function trend() {
    const figure = figures.find(({ name }) => name === byId("figure").value);
    const own = runs.filter((run) => run.label === byId("label").value && run.figures[figure.name] !== null).reverse();
    const servers = [...new Set(own.map((run) => run.server))];
    const traces = servers.map((server, place) => {
      const of = own.filter((run) => run.server === server);
      return { type: "scatter", mode: "lines+markers", name: plain(server), x: of.map((run) => run.at), y: of.map((run) => run.figures[figure.name] * figure.factor),
        line: { ...look(place), width: 1.5 }, marker: { size: 9, symbol: of.map((run) => run.valid ? "circle" : "circle-open") }, customdata: of.map((run) => plain(run.name)),
        hovertemplate: `%{customdata}: %{y:.4~g} ${figure.unit}<extra>${plain(server)}</extra>` };
    });
    return { traces, layout: { ...legend, xaxis: { type: "date", nticks: 5, tickangle: 0, title: { text: "run started, UTC" } },
      yaxis: { rangemode: "tozero", title: { text: `${figure.title}, ${figure.unit}` } } } };
  }

  function trendRows() {
    return [["run", "label", "server", "began", ...figures.map(({ name }) => name)],
      ...runs.map((run) => [run.name, run.label, run.server, run.at, ...figures.map(({ name }) => run.figures[name])])];
  }

  rows.forEach((row, index) => {
    const box = made("input");
    Object.assign(box, { type: "checkbox", checked: picked.includes(index) });
    box.setAttribute("aria-label", `Compare ${runs[index].name}`);
    box.addEventListener("change", () => {
      if (box.checked) picked.push(index);
      else picked.splice(picked.indexOf(index), 1);
      again();
    });
    row.cells[0].prepend(box, " ");
  });
  byId("filter").addEventListener("input", ({ target }) => {
    const wanted = target.value.toLowerCase().split(/\s+/);
    rows.forEach((row, index) => { row.hidden = !wanted.every((word) => words[index].includes(word)); });
    byId("said").textContent = `${rows.filter((row) => !row.hidden).length} runs shown`;
  });
  beside.tabIndex = 0;
  beside.setAttribute("role", "region");
  beside.setAttribute("aria-label", "Figures of the runs picked");
  element("picked").closest("figure").after(beside);
  chart("picked", { draw: percentiles, rows: besides });
  chart("trend", { draw: trend, rows: trendRows });
  compare();
  document.querySelectorAll("input[name=metric]").forEach((input) => input.addEventListener("change", () => draw("picked")));
  for (const id of ["figure", "label"]) byId(id).addEventListener("change", () => draw("trend"));
})();
