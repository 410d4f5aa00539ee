// The page of a folder of runs: expands and filters its table, compares selected runs, and draws a figure over the runs of a label.
"use strict";
(() => {
  const { chart, draw, colour, plain, createElement, element } = Report;
  const { runs, figures, latencies, points } = DATA.index;
  const COLOURS = 6; // number of colours in the palette
  const byId = (id) => document.getElementById(id);
  const legend = { showlegend: true, margin: { l: 68, r: 14, t: 40, b: 48 } };
  const table = document.querySelector("table.index");
  const rows = [...table.tBodies[0].rows];
  const rowTexts = rows.map((row) => row.textContent.toLowerCase());
  const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent.trim());
  const expanded = new Set(); // keys of the groups whose rows are shown
  // Returns the index in `runs` of a row, or undefined for a row that cannot be selected.
  function indexOf(row) {
    const [kind, number] = row.dataset.row.split("-");
    return kind === "entry" ? Number(number) : undefined;
  }

  const selectable = (tableRows) => tableRows.map(indexOf).filter((index) => index !== undefined);
  const shownAtFirst = selectable(rows.filter((row) => !row.dataset.parent));
  const selected = (shownAtFirst.length > 1 ? shownAtFirst : selectable(rows)).slice(0, 2); // in the order of selection
  const style = (index) => ({ color: colour(`run-${(index % COLOURS) + 1}`), dash: index < COLOURS ? "solid" : "dash" });
  const comparison = createElement("div", undefined, "scroll");
  const command = document.querySelector("#compare pre code");

  function percentiles() {
    const latency = latencies.find(({ name }) => name === document.querySelector("input[name=metric]:checked").value);
    const traces = selected.map((index, position) => ({ type: "scatter", mode: "lines+markers", connectgaps: true, name: plain(runs[index].name), x: points,
      y: runs[index].percentiles[latency.name].map((value) => value === null ? null : value * latency.factor), line: { ...style(position), width: 2 },
      hovertemplate: `%{x}: %{y:.4~g} ${latency.unit}<extra>${plain(runs[index].name)}</extra>` }));
    return { traces, layout: { ...legend, xaxis: { type: "category", title: { text: "percentile" } },
      yaxis: { rangemode: "tozero", title: { text: `${latency.title}, ${latency.unit}` } } } };
  }

  const shown = (value, { factor }) => value === null ? "–" : (value * factor).toLocaleString("en", { maximumSignificantDigits: 4 });

  // Returns a ratio as a change in percent, such as +3.2%, or as a factor such as 6.3x from 2 on.
  function relative(ratio) {
    if (ratio >= 2) return `${ratio.toLocaleString("en", { maximumSignificantDigits: 3 })}x`;
    return `${((ratio - 1) * 100).toFixed(1).replace(/^(?=\d)/, "+").replace("-", "\u2212")}%`;
  }

  // Returns every figure of the selected runs, with the change from the first run.
  function comparisonRows() {
    return [["figure", "unit", ...selected.map((index) => runs[index].name)], ...figures.map((figure) => {
      const values = selected.map((index) => runs[index].figures[figure.name]);
      const difference = (value) => value !== null && values[0] ? ` (${relative(value / values[0])})` : "";
      const mark = (position) => runs[selected[position]].thin.includes(figure.name) ? "*" : "";
      return [figure.title, figure.unit, ...values.map((value, position) => shown(value, figure) + mark(position) + (position ? difference(value) : ""))];
    })];
  }

  // Returns the commands that compare the selected runs. Runs of exactly two servers, versions or labels are compared as
  // two groups of repeats. Otherwise each run is compared with the first one.
  function commands() {
    const groups = Map.groupBy ? Map.groupBy(selected, (index) => runs[index].group) : new Map();
    const paths = (indices) => indices.map((index) => runs[index].path).join(" ");
    if (selected.length < 2) return "Select two or more runs above.";
    if (selected.length > 2 && groups.size === 2) return `loadgen compare --html compare.html ${[...groups.values()].map(paths).join(" -- ")}`;
    return selected.slice(1).map((index, position) => `loadgen compare --html compare${position ? `-${position + 1}` : ""}.html ${paths([selected[0], index])}`).join("\n");
  }

  function updateComparison() {
    const result = createElement("table", undefined, "facts-table");
    const [head, ...body] = comparisonRows();
    result.createCaption().textContent = "Figures of the selected runs, compared with the first one";
    const addRow = (part, values, tag) => {
      const row = part.insertRow();
      values.forEach((value, index) => {
        const cell = createElement(index ? tag : "th", value, index > 1 ? "number" : "");
        if (cell.tagName === "TH") cell.scope = tag === "th" ? "col" : "row";
        row.append(cell);
      });
    };
    addRow(result.createTHead(), head, "th");
    const tableBody = result.createTBody();
    body.forEach((values) => addRow(tableBody, values, "td"));
    comparison.replaceChildren(result);
    command.textContent = commands();
  }

  function updateSelection() {
    const container = element("picked");
    if (container.classList.contains("empty")) container.replaceChildren();
    container.classList.remove("empty");
    draw("picked");
    updateComparison();
  }

  function trend() {
    const figure = figures.find(({ name }) => name === byId("figure").value);
    const labelled = runs.filter((run) => run.top && run.label === byId("label").value && run.figures[figure.name] !== null).reverse();
    const servers = [...new Set(labelled.map((run) => run.server))];
    const traces = servers.map((server, index) => {
      const serverRuns = labelled.filter((run) => run.server === server);
      return { type: "scatter", mode: "lines+markers", name: plain(server), x: serverRuns.map((run) => run.at), y: serverRuns.map((run) => run.figures[figure.name] * figure.factor),
        line: { ...style(index), width: 1.5 }, marker: { size: 9, symbol: serverRuns.map((run) => run.valid ? "circle" : "circle-open") }, customdata: serverRuns.map((run) => plain(run.name)),
        hovertemplate: `%{customdata}: %{y:.4~g} ${figure.unit}<extra>${plain(server)}</extra>` };
    });
    return { traces, layout: { ...legend, xaxis: { type: "date", nticks: 5, tickangle: 0, title: { text: "run started, UTC" } },
      yaxis: { rangemode: "tozero", title: { text: `${figure.title}, ${figure.unit}` } } } };
  }

  function trendRows() {
    return [["run", "label", "server", "began", ...figures.map(({ name }) => name)],
      ...runs.map((run) => [run.name, run.label, run.server, run.at, ...figures.map(({ name }) => run.figures[name])])];
  }

  function addCheckbox(row) {
    const index = indexOf(row);
    const checkbox = createElement("input");
    Object.assign(checkbox, { type: "checkbox", checked: selected.includes(index) });
    checkbox.setAttribute("aria-label", `Compare ${runs[index].name}`);
    checkbox.addEventListener("change", () => {
      if (checkbox.checked) selected.push(index);
      else selected.splice(selected.indexOf(index), 1);
      updateSelection();
    });
    row.cells[0].prepend(checkbox, " ");
  }

  // Adds the button that shows and hides the rows of a group.
  function addToggle(row) {
    const key = row.dataset.row;
    const note = row.cells[0].querySelector("small");
    const button = createElement("button", note.textContent, "toggle");
    button.type = "button";
    button.setAttribute("aria-expanded", "false");
    button.addEventListener("click", () => {
      if (!expanded.delete(key)) expanded.add(key);
      button.setAttribute("aria-expanded", String(expanded.has(key)));
      showRows();
    });
    note.replaceChildren(button);
  }

  // Shows the rows that match the filter. Rows of a group are hidden until the group is expanded or the filter is used.
  function showRows() {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter((word) => word);
    const matches = rows.map((_, index) => words.every((word) => rowTexts[index].includes(word)));
    const matchingParents = new Set(rows.filter((row, index) => matches[index] && row.dataset.parent).map((row) => row.dataset.parent));
    rows.forEach((row, index) => {
      const { parent, row: key } = row.dataset;
      if (parent) row.hidden = !matches[index] || !(words.length || expanded.has(parent));
      else row.hidden = !matches[index] && !matchingParents.has(key);
    });
    if (words.length) byId("status").textContent = `${rows.filter((row) => !row.hidden).length} rows shown`;
  }

  const parents = new Set(rows.map((row) => row.dataset.parent).filter((key) => key));
  for (const row of rows) {
    [...row.cells].forEach((cell, index) => { cell.dataset.label = heads[index]; }); // headings of narrow screens
    if (parents.has(row.dataset.row)) addToggle(row);
    if (indexOf(row) !== undefined) addCheckbox(row);
  }
  showRows();
  byId("filter").addEventListener("input", showRows);
  comparison.tabIndex = 0;
  comparison.setAttribute("role", "region");
  comparison.setAttribute("aria-label", "Figures of the selected runs");
  element("picked").closest("figure").after(comparison);
  chart("picked", { draw: percentiles, rows: comparisonRows });
  chart("trend", { draw: trend, rows: trendRows });
  updateComparison();
  document.querySelectorAll("input[name=metric]").forEach((input) => input.addEventListener("change", () => draw("picked")));
  for (const id of ["figure", "label"]) byId(id).addEventListener("change", () => draw("trend"));
})();
