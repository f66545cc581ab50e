// The mark of each backend: the colour of its method, and dashes that tell backends of one colour apart.

import { h, setStyle, setText, svg } from "./dom.js";

const COLORS = new Map([
  ["baseline", "--m-baseline"],
  ["ngram", "--m-ngram"],
  ["suffix", "--m-suffix"],
  ["eagle", "--m-eagle"],
  ["eagle3", "--m-eagle3"],
  ["draft_model", "--m-draft-model"],
]);
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [14, 4], [1, 5]];

/** Returns the mark of each backend by its name: `color` is the name of a custom property. */
export function marksOf(backends) {
  const used = new Map();
  const marks = new Map();
  for (const { name, method } of backends) {
    const color = COLORS.get(method) ?? "--m-other";
    const number = used.get(color) ?? 0;
    used.set(color, number + 1);
    marks.set(name, { color, dash: DASHES[number % DASHES.length] });
  }
  return marks;
}

/** Returns a short line in the colour and dashes of a backend. */
export function swatch(mark) {
  const line = svg("path", { d: "M1 5H21", "stroke-dasharray": mark.dash.join(" ") || null });
  const picture = svg("svg", { class: "swatch", viewBox: "0 0 22 10", "aria-hidden": "true" }, line);
  setStyle(picture, "--c", `var(${mark.color})`);
  return picture;
}

/** Returns the name of a backend beside its mark. */
export function named(name, mark, detail = "") {
  return h("span", { class: "named" }, swatch(mark), h("span", {}, name, detail ? h("small", {}, detail) : null));
}

/** Returns a bar whose length is set with `setBar`. */
export function bar() {
  return h("span", { class: "meter", "aria-hidden": "true" });
}

export function setBar(element, share, color = "--accent") {
  setStyle(element, "--share", Math.max(0, Math.min(1, share || 0)).toFixed(3));
  setStyle(element, "--c", `var(${color})`);
}

/** Returns a cell with a label for narrow screens. */
export function cell(label, ...children) {
  return h("td", { "data-label": label }, ...children);
}

/** Returns the header of a table; `columns` are texts, or [text, explanation]. */
export function header(caption, columns) {
  const cells = columns.map((column) => {
    const [text, title] = Array.isArray(column) ? column : [column, null];
    return h("th", { scope: "col", title }, text);
  });
  return [h("caption", { class: "hidden" }, caption), h("thead", {}, h("tr", {}, ...cells))];
}

/** Makes a table of its header and body, once, and returns the body. */
export function bodyOf(table, caption, columns) {
  if (table.tBodies.length === 0) table.append(...header(caption, columns), h("tbody"));
  return table.tBodies[0];
}

/** Returns a cell with one text, which `setText` of its first child changes. */
export function textCell(label, className = null) {
  return h("td", { "data-label": label, class: className }, h("span"));
}

export function setCell(cellElement, text) {
  setText(cellElement.firstElementChild, text);
}
