// Builds elements, and changes them only where something differs. Data of others is only ever set as text, never parsed.

const SVG = "http://www.w3.org/2000/svg";

/** Returns an element. Attributes that are null or false are left out; `on` holds listeners; children are nodes or text. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Returns an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Sets the text of an element that holds nothing but text. */
export function setText(element, text) {
  const wanted = String(text);
  const node = element.firstChild;
  if (node === null || node.nodeType !== Node.TEXT_NODE || node.nextSibling !== null) element.textContent = wanted;
  else if (node.data !== wanted) node.data = wanted;
}

/** Sets an attribute, or removes it where the value is null or false. */
export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else {
    const text = value === true ? "" : String(value);
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
}

/** Sets a custom property that the style sheet uses: a width, or a colour. */
export function setStyle(element, name, value) {
  if (element.style.getPropertyValue(name) !== String(value)) element.style.setProperty(name, value);
}

export function setHidden(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

const rowsOf = new WeakMap();

/**
 * Makes the children of `parent` follow `items`: one element for each, kept as long as its key is there, so that focus and
 * opened details stay. `create(item)` returns the element, `update(element, item)` changes it.
 */
export function follow(parent, items, keyOf, create, update) {
  let rows = rowsOf.get(parent);
  if (rows === undefined) rowsOf.set(parent, (rows = new Map()));
  const wanted = new Set();
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    wanted.add(key);
    let row = rows.get(key);
    if (row === undefined) rows.set(key, (row = create(item)));
    update(row, item);
    if (row === place) place = place.nextElementSibling;
    else parent.insertBefore(row, place);
  }
  for (const [key, row] of rows) {
    if (!wanted.has(key)) {
      row.remove();
      rows.delete(key);
    }
  }
}

/** Returns an element of the page by its id. */
export function byId(id) {
  return document.getElementById(id);
}
