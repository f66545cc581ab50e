// The backends of a model: state, load, speed and acceptance.

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
  ["Slowdown", "Step time of late over the expected one"],
  ["Tokens per step", "Accepted draft tokens of a step, + 1"],
  ["Acceptance by position", "Share of the steps in which the draft token at each position was accepted"],
  ["Requests/s", "Requests that ended"],
  ["Tokens/s", "Output tokens"],
  ["KV cache", "Share of the engine's KV cache in use"],
];
const MOST_POSITIONS = 16;
const STATE_CLASS = { up: "good", starting: "warn", recovering: "warn", draining: "warn", down: "bad", ejected: "bad" };

let shownModel = null;

/** Shows the backends; `act` is that of the page: it asks, changes something, and says what came of it. */
export function showPool(model, marks, act) {
  shownModel = model;
  const body = bodyOf(byId("pool-table"), "Backends of the model", COLUMNS);
  const busiest = Math.max(1, ...model.backends.map((backend) => backend.in_flight));
  setText(byId("pool-about"), "Rates and shares are those of the last minute.");
  follow(
    body,
    model.backends,
    (backend) => `${backend.name}\n${backend.method}\n${backend.k}\n${backend.drafter_limit?.tokens}`,
    (backend) => createRow(backend, marks.get(backend.name), () => drain(backend.name, act)),
    (row, backend) => update(row, backend, marks.get(backend.name), busiest),
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
  const isLast = !backends.some((each) => each !== backend && each.state === "up");
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
  setText(why, [backend.outlier, backend.contradiction, backend.difference, backend.silence, backend.reason, backend.failed ? `${backend.failed} failed` : ""].filter(Boolean).join("; "));
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
  slowdown.classList.toggle("warned", (backend.slowdown ?? 1) >= 1.3);
  setCell(perStep, fixed(backend.acceptance?.tokens_per_step ?? (backend.k === 0 ? 1 : null)));
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
