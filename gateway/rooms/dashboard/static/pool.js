// The backends of a model: state, load, speed and acceptance; sorted by a column, and grouped by method.

import { keep, shown } from "./address.js";
import { byId, follow, h, setAttribute, setHidden, setStyle, setText } from "./dom.js";
import { duration, fixed, number, percent, times, words } from "./format.js";
import { bar, bodyOf, cell, named, setBar, setCell, textCell } from "./methods.js";

const COLUMNS = [
  "Backend",
  "State",
  ["In flight", "Requests there, of all gateways and other clients"],
  ["Waiting", "Requests queued inside the engine"],
  ["Share", "Of the model's requests, over the last minute"],
  ["Step", "Measured seconds per engine step, and what the policy expects at this load"],
  ["Slowdown", "How many times slower than expected the policy takes it for, as its last steps were"],
  ["Tokens per step", "Output tokens per engine step of a request over the last minute, steps that drafted nothing included"],
  ["Acceptance by position", "Share of the drafts that were accepted up to each position"],
  ["Requests/s", "Requests that ended"],
  ["Tokens/s", "Output tokens"],
  ["KV cache", "Share of the engine's KV cache in use"],
];
// What each column sorts by; the others are in the order of the pool file.
const ORDERS = {
  Backend: (backend) => backend.name,
  State: (backend) => backend.state,
  "In flight": (backend) => backend.in_flight,
  Waiting: (backend) => backend.engine?.waiting,
  Share: (backend) => backend.share,
  Step: (backend) => backend.step_s,
  Slowdown: (backend) => backend.slowdown,
  "Tokens per step": (backend) => backend.acceptance?.tokens_per_step,
  "Requests/s": (backend) => backend.requests_per_s,
  "Tokens/s": (backend) => backend.output_tokens_per_s,
  "KV cache": (backend) => backend.engine?.kv_usage,
};
const MOST_POSITIONS = 16;
const STATE_CLASS = { up: "good", starting: "warn", recovering: "warn", draining: "warn", down: "bad", ejected: "bad" };

let shownModel = null;
let again = () => {};

/** Returns the column that the table is sorted by, and whether its largest value comes first. */
function order() {
  const said = shown("sort");
  const column = said.replace(/^-/, "");
  return { column: column in ORDERS ? column : "", descends: said.startsWith("-") };
}

/** Sorts by a column: numbers the largest first, names the first first; a second time the other way around. */
function sortBy(column) {
  const { column: present, descends } = order();
  const isText = column === "Backend" || column === "State";
  keep("sort", column && (column === present ? !descends : !isText) ? `-${column}` : column);
  again();
}

const names = new Intl.Collator("en", { numeric: true });

function sorted(backends) {
  const { column, descends } = order();
  if (column === "") return backends;
  const value = ORDERS[column];
  const known = backends.filter((backend) => (value(backend) ?? null) !== null);
  const compare = (one, other) => (typeof value(one) === "string" ? names.compare(value(one), value(other)) : value(one) - value(other));
  known.sort((one, other) => (descends ? compare(other, one) : compare(one, other)));
  return [...known, ...backends.filter((backend) => !known.includes(backend))];
}

/** Returns the rows: backends, below the row of their method where they are grouped. */
function rowsOf(backends) {
  if (shown("group") !== "method") return backends.map((backend) => ({ backend }));
  return [...Map.groupBy(backends, (backend) => backend.method)].flatMap(([method, members]) => [{ method, members }, ...members.map((backend) => ({ backend }))]);
}

function showControls(table) {
  const { column, descends } = order();
  if (byId("sort").options.length === 0) {
    byId("sort").append(h("option", { value: "" }, "pool file"), ...Object.keys(ORDERS).map((name) => h("option", { value: name }, name)));
    byId("sort").addEventListener("change", (event) => sortBy(event.target.value));
    byId("group").addEventListener("click", () => {
      keep("group", shown("group") === "method" ? "" : "method");
      again();
    });
    for (const head of table.tHead.rows[0].cells) {
      const name = head.textContent;
      if (name in ORDERS) head.replaceChildren(h("button", { type: "button", class: "quiet", on: { click: () => sortBy(name) } }, name));
    }
  }
  if (byId("sort").value !== column) byId("sort").value = column;
  setAttribute(byId("group"), "aria-pressed", String(shown("group") === "method"));
  for (const head of table.tHead.rows[0].cells) {
    setAttribute(head, "aria-sort", head.textContent !== column ? null : descends ? "descending" : "ascending");
  }
}

function groupRow() {
  return h("tr", { class: "group" }, h("th", { scope: "rowgroup", colspan: COLUMNS.length }));
}

function aboutGroup({ method, members }) {
  const share = members.reduce((sum, backend) => sum + (backend.share ?? 0), 0);
  const flight = members.reduce((sum, backend) => sum + backend.in_flight, 0);
  return `${words(method)}: ${members.length} backend${members.length > 1 ? "s" : ""}, ${percent(share)} of the requests, ${number(flight)} in flight`;
}

/** Shows the backends; `act` is that of the page: it asks, changes something, and says what came of it. */
export function showPool(model, marks, act) {
  shownModel = model;
  const body = bodyOf(byId("pool-table"), "Backends of the model", COLUMNS);
  const busiest = Math.max(1, ...model.backends.map((backend) => backend.in_flight));
  setText(byId("pool-about"), "Rates and shares are those of the last minute.");
  again = () => showPool(model, marks, act);
  showControls(byId("pool-table"));
  follow(
    body,
    rowsOf(sorted(model.backends)),
    ({ backend, method }) => (backend ? `${backend.name}\n${backend.method}\n${backend.k}\n${backend.drafter_limit?.tokens}` : `\n${method}`),
    ({ backend }) => (backend ? createRow(backend, marks.get(backend.name), () => drain(backend.name, act)) : groupRow()),
    (row, item) => (item.backend ? update(row, item.backend, marks.get(item.backend.name), busiest) : setText(row.firstChild, aboutGroup(item))),
  );
}

/** Drains a backend of the model shown, or resumes it. */
function drain(name, act) {
  const { name: model, backends } = shownModel;
  const backend = backends.find((each) => each.name === name);
  const reference = { model, backend: name };
  if (backend.state === "draining") {
    const done = ({ state }) => `${name} is ${state}${state === "up" ? "." : ", until its engine has answered."}`;
    act([`Resume ${name}?`, "It gets requests again.", "Resume"], "admin/resume", reference, done);
    return;
  }
  const isLast = !backends.some((each) => each !== backend && each.up);
  const text = `It gets no more requests; those in flight finish.${isLast ? ` No other replica of ${model} is up: its requests are then refused.` : ""}`;
  const done = (answer) => `${name} is ${answer.state}; requests in flight there: ${answer.in_flight}.`;
  act([`Drain ${name}?`, text, "Drain"], "admin/drain", reference, done);
}

function createRow(backend, mark, onDrain) {
  const limit = backend.drafter_limit;
  const most = limit ? `, to ${number(limit.tokens)} tokens` : "";
  const detail = `${words(backend.method)}${backend.k ? `, k ${backend.k}` : ""}${most}`;
  const flight = cell("In flight", h("span"), bar());
  const share = cell("Share", h("span"), bar());
  const state = cell("State", h("span", { class: "state" }), h("small"), h("button", { type: "button", class: "quiet", on: { click: onDrain } }));
  const step = cell("Step", h("span"), h("small"));
  const positions = cell("Acceptance by position", h("span", { class: "positions", role: "img" }));
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, named(backend.name, mark, detail)),
    state,
    flight,
    textCell("Waiting"),
    share,
    step,
    textCell("Slowdown"),
    textCell("Tokens per step"),
    positions,
    textCell("Requests/s"),
    textCell("Tokens/s"),
    textCell("KV cache"),
  );
}

function update(row, backend, mark, busiest) {
  const [, state, flight, waiting, share, step, slowdown, perStep, positions, requests, tokens, kv] = row.children;
  const outlier = backend.outlier !== null;
  const silent = backend.silence !== null;
  const contradicted = backend.contradiction !== null;
  const [stateText, why, button] = state.children;
  setText(stateText, backend.state !== "up" ? backend.state : outlier ? "outlier" : silent ? "silent drafter" : contradicted ? "not as said" : "up");
  setAttribute(stateText, "class", `state ${outlier || silent || contradicted ? "bad" : (STATE_CLASS[backend.state] ?? "warn")}`);
  setText(why, [backend.outlier, backend.contradiction, backend.difference, backend.silence, backend.trouble, backend.reason, backend.failed ? `${backend.failed} failed` : ""].filter(Boolean).join("; "));
  const action = backend.state === "draining" ? "Resume" : "Drain";
  setText(button, action);
  setAttribute(button, "aria-label", `${action} ${backend.name}`);
  setText(flight.firstChild, number(backend.in_flight));
  setBar(flight.lastChild, backend.in_flight / busiest, mark.color);
  setCell(waiting, number(backend.engine?.waiting));
  setText(share.firstChild, percent(backend.share));
  setBar(share.lastChild, backend.share, mark.color);
  setText(step.firstChild, duration(backend.step_s));
  setText(step.lastChild, backend.fitted_step_s === null ? "" : `expected ${duration(backend.fitted_step_s)}`);
  setCell(slowdown, times(backend.slowdown));
  slowdown.classList.toggle("warned", backend.slowdown > 1);
  setCell(perStep, fixed(backend.acceptance?.tokens_per_step));
  showPositions(positions.firstChild, backend.acceptance, mark);
  setCell(requests, number(backend.requests_per_s));
  setCell(tokens, number(backend.output_tokens_per_s));
  setCell(kv, percent(backend.engine?.kv_usage));
  setHidden(why, why.textContent === "");
}

function showPositions(picture, acceptance, mark) {
  const shares = (acceptance?.by_position ?? []).slice(0, MOST_POSITIONS);
  const items = shares.map((share, index) => ({ share, index }));
  follow(picture, items, ({ index }) => index, () => h("i"), (element, { share }) => setBar(element, share, mark.color));
  setStyle(picture, "--count", shares.length);
  const text = shares.length === 0 ? "no drafts" : `by position: ${shares.map(percent).join(", ")}`;
  setAttribute(picture, "aria-label", text);
  setAttribute(picture, "title", shares.length === 0 ? null : text);
}
