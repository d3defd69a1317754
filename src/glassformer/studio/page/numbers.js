// Tables of numbers, shaded by size.
import { h, t } from "./dom.js";

/** A table of numbers. With `chosen` its numbers are one stop of the Tab key, and arrows go from number to number. */
export function matrix(one, name, chosen) {
  const cells = one.texts.map((row, i) => row.map((text, j) => h("td", {
    class: shade(one.levels[i][j]), tabindex: chosen ? "-1" : null,
    onclick: chosen && (() => choose(i, j)),
    onkeydown: chosen && ((event) => {
      const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
      if (!step) return;
      event.preventDefault();
      if (cells[i + step[0]]?.[j + step[1]]) choose(i + step[0], j + step[1]).focus();
    }),
  }, text)));

  function mark(row, column) {
    cells.forEach((some, i) => some.forEach((cell, j) => cell.classList.toggle("used", i === row || j === column)));
  }

  function choose(row, column) {
    cells.flat().forEach((cell) => { cell.setAttribute("tabindex", "-1"); cell.setAttribute("aria-selected", "false"); });
    cells[row][column].setAttribute("tabindex", "0");
    cells[row][column].setAttribute("aria-selected", "true");
    chosen(row, column);
    return cells[row][column];
  }

  const element = h("div", { class: "matrix" }, h("p", { class: "quiet" }, name),
    h("div", { class: "scroll", role: chosen ? null : "group", tabindex: chosen ? null : "0", "aria-label": chosen ? null : name },
      h("table", { role: chosen ? "grid" : null, "aria-label": name },
        h("thead", {}, h("tr", {}, h("td", {}, ""), ...one.columns.map((words) => h("th", { scope: "col" }, words)))),
        h("tbody", {}, ...cells.map((row, i) => h("tr", {}, h("th", { scope: "row" }, one.rows[i]), ...row))))),
    one.left_out ? h("p", { class: "quiet" }, t("columns-cut", { n: one.left_out })) : null);
  return { element, mark, choose };
}

/** Class of a number by its shade. */
export function shade(level) {
  return level === 0 ? "number" : `number ${level > 0 ? "above" : "below"}${Math.abs(level)}`;
}
