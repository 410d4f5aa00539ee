// Tables that sort by a click or a key on their heads, and everything that can be copied.
"use strict";
(() => {
  const { made } = Report;
  const said = document.getElementById("said");

  // What a cell says, without its interval or a mark for the eye only.
  function text(cell) {
    const copy = cell.cloneNode(true);
    copy.querySelectorAll("small, .unseen, [aria-hidden]").forEach((each) => each.remove());
    return copy.textContent.replace(/\s+/g, " ").trim();
  }

  // `data-value` where the text is in a unit of its row or is no number; missing values come last either way.
  function value(cell) {
    const given = cell.dataset.value ?? text(cell).replace(/,/g, "");
    const number = Number.parseFloat(given);
    return Number.isNaN(number) || /^[a-z]/i.test(given) ? given : number;
  }

  function compare(one, other) {
    if (typeof one === typeof other) return typeof one === "number" ? one - other : one.localeCompare(other, "en", { numeric: true });
    return typeof one === "number" ? -1 : 1;
  }

  function sort(table, index, descending) {
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => ({ row, key: value(row.cells[index]) }));
    const missing = ({ key }) => key === "" || key === "–" || /^n</.test(key);
    rows.sort((one, other) => missing(one) - missing(other) || (descending ? -1 : 1) * compare(one.key, other.key));
    body.append(...rows.map(({ row }) => row));
  }

  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, index) => {
      const button = made("button", undefined, "sort");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const descending = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        sort(table, index, descending);
      });
    });
  }

  async function copy(words, button) {
    const before = button.textContent;
    try {
      await navigator.clipboard.writeText(words);
    } catch { // no permission, or an old browser
      const area = made("textarea", words);
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
      button.focus();
    }
    button.textContent = "Copied";
    said.textContent = "Copied";
    setTimeout(() => { button.textContent = before; }, 1500);
  }

  function copyable(table) {
    const button = made("button", "Copy table", "copy");
    button.type = "button";
    button.addEventListener("click", () => copy([...table.rows].map((row) => [...row.cells].map(text).join("\t")).join("\n"), button));
    table.closest(".scroll").before(button);
  }

  document.querySelectorAll("table.facts-table").forEach((table) => {
    if (table.tBodies[0].rows.length > 1) sortable(table);
    copyable(table);
  });
  document.querySelectorAll("[data-copy]").forEach((button) =>
    button.addEventListener("click", () => copy(document.getElementById(button.dataset.copy).textContent, button)));
})();
