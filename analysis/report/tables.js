// Makes tables sortable by their column headings, and adds buttons that copy tables and commands.
"use strict";
(() => {
  const { createElement } = Report;
  const status = document.getElementById("status");

  // Returns the text of a cell without its interval, and without text for screen readers or decoration.
  function text(cell) {
    const copy = cell.cloneNode(true);
    copy.querySelectorAll("small, .unseen, [aria-hidden]").forEach((hidden) => hidden.remove());
    return copy.textContent.replace(/\s+/g, " ").trim();
  }

  // Returns the sort key of a cell: `data-value` if the cell has it, otherwise its text, as a number if it is one.
  function sortKey(cell) {
    const content = cell.dataset.value ?? text(cell).replace(/,/g, "");
    const number = Number.parseFloat(content);
    return Number.isNaN(number) || /^[a-z]/i.test(content) ? content : number;
  }

  function compare(a, b) {
    if (typeof a === typeof b) return typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
    return typeof a === "number" ? -1 : 1;
  }

  // Returns the rows in the order of one column. Missing values come last in both directions.
  function inOrder(tableRows, index, descending) {
    const rows = tableRows.map((row) => ({ row, key: sortKey(row.cells[index]) }));
    const missing = ({ key }) => key === "" || key === "–" || /^n</.test(key);
    rows.sort((a, b) => missing(a) - missing(b) || (descending ? -1 : 1) * compare(a.key, b.key));
    return rows.map(({ row }) => row);
  }

  // Sorts the rows of a table. Rows with a parent stay below it, in the same order.
  function sort(table, index, descending) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const childrenOf = (key) => rows.filter((row) => key && row.dataset.parent === key);
    const top = inOrder(rows.filter((row) => !row.dataset.parent), index, descending);
    body.append(...top.flatMap((row) => [row, ...inOrder(childrenOf(row.dataset.row), index, descending)]));
  }

  function makeSortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, index) => {
      const button = createElement("button", undefined, "sort");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const descending = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((otherHead) => otherHead.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        sort(table, index, descending);
      });
    });
  }

  async function copy(content, button) {
    const label = button.textContent;
    try {
      await navigator.clipboard.writeText(content);
    } catch { // no permission, or an old browser
      const area = createElement("textarea", content);
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
      button.focus();
    }
    button.textContent = "Copied";
    status.textContent = "Copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  }

  function addCopyButton(table) {
    const button = createElement("button", "Copy", "copy");
    button.setAttribute("aria-label", "Copy table");
    button.type = "button";
    button.addEventListener("click", () => copy([...table.rows].map((row) => [...row.cells].map(text).join("\t")).join("\n"), button));
    table.closest(".scroll").before(button);
  }

  document.querySelectorAll("table.facts-table").forEach((table) => {
    if (table.tBodies[0].rows.length > 1) makeSortable(table);
    addCopyButton(table);
  });
  document.querySelectorAll("[data-copy]").forEach((button) =>
    button.addEventListener("click", () => copy(document.getElementById(button.dataset.copy).textContent, button)));
})();
