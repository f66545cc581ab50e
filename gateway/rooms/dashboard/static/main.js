// The dashboard: takes the live data, and shows the chosen model.

import { keep, shown } from "./address.js";
import { showAnswers } from "./answers.js";
import { showBeliefs } from "./beliefs.js";
import { Charts } from "./charts.js";
import { DecisionsPanel } from "./decisions.js";
import { byId, follow, h, setAttribute, setHidden, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { age, date } from "./format.js";
import { showLatency } from "./latency.js";
import { marksOf } from "./methods.js";
import { Past } from "./past.js";
import { showPool } from "./pool.js";
import { RulesPanel } from "./rules.js";
import { askForKey, confirmed, get, hasKey, headers, keepKey, notAccepted, post, restoreKey } from "./session.js";

const FORMAT = 2;
const STALE_S = 5;
const DONE_MS = 20_000;
const HIDDEN_MS = 60_000; // a page that nobody sees asks no more after this
const ADVICE_MS = 60_000;

const past = new Past();
const charts = new Charts(past);
const decisions = new DecisionsPanel();
const rules = new RulesPanel(act);
const feed = new Feed("admin/dashboard", headers, {
  history: takeHistory,
  snapshot: takeSnapshot,
  state: followConnection,
  refused,
});

let snapshot = null;
let advice = {}; // findings by model
let takenMs = 0; // when the snapshot came, by performance.now()
let connection = "connecting";
let nextAttemptMs = 0;
let chosenModel = shown("model");
let charted = ""; // the model that the charts show; empty where its past has been replaced
let hiddenTimer = 0;
let doneTimer = 0;

/** Says what was done, for a while. */
function announce(text) {
  setText(byId("done"), text);
  clearTimeout(doneTimer);
  doneTimer = setTimeout(() => setText(byId("done"), ""), DONE_MS);
}

/** Asks a question, unless it is null; then changes something, and says what came of it, `done(answer)`. */
async function act(question, path, body, done) {
  if (question !== null && !(await confirmed(...question))) return;
  try {
    announce(done(await post(path, body)));
  } catch (error) {
    if (error.status === 401 || error.status === 403) askForKey("This needs a key that may change the pool.", () => feed.open());
    else announce(`Not done: ${error.message}`);
  }
}

function isKnown(data) {
  if (data.format === FORMAT) return true;
  feed.close();
  refused(0, "The gateway has another version than this page: load the page again.");
  return false;
}

function takeHistory(data) {
  if (!isKnown(data)) return;
  past.load(data);
  charted = "";
}

function takeSnapshot(data) {
  if (!isKnown(data)) return;
  snapshot = data;
  takenMs = performance.now();
  if (connection !== "live") followConnection("live", 0);
  const hasPoint = past.append(data);
  if (!document.hidden) render(hasPoint);
}

/** Asks for the findings of `gateway advise`, if there is a key: they take a fit, so they are no part of the live data. */
async function takeAdvice() {
  if (document.hidden || !hasKey() || connection !== "live") return;
  try {
    advice = (await get("admin/advice")).models;
  } catch (error) {
    advice = {}; // the key may not see it, or this gateway gives none
  }
}

function render(withCharts) {
  if (snapshot === null || snapshot.models.length === 0) return;
  const { models, process } = snapshot;
  const model = models.find((each) => each.name === chosenModel) ?? models[0];
  const marks = marksOf(model.backends);
  showModels(models, model);
  setHidden(byId("main"), false);
  const panels = [
    () => showAnswers(model, models, advice[model.name], process),
    () => showPool(model, marks, act),
    () => showLatency(model, marks, process),
    () => showBeliefs(model, marks),
    () => rules.show(model, snapshot.at_s),
    () => decisions.show(model, marks, process),
  ];
  if (withCharts || charted !== model.name) panels.push(() => charts.show(model, marks));
  charted = model.name;
  for (const show of panels) {
    try {
      show();
    } catch (error) {
      console.error(error); // the others go on
    }
  }
  const workers = process.workers > 1 ? `${process.workers} workers, process ${process.pid} shown` : `process ${process.pid}`;
  setText(byId("process"), `Gateway ${process.version}, ${workers}, started ${date(process.started_s)}`);
}

function showModels(models, model) {
  setHidden(byId("model-choice"), models.length === 1);
  setHidden(byId("model-name"), models.length > 1);
  setText(byId("model-name"), model.name);
  follow(byId("model"), models, (each) => each.name, (each) => h("option", { value: each.name }, each.name), () => {});
  if (byId("model").value !== model.name) byId("model").value = model.name;
  setHidden(byId("simulated"), !model.simulated);
}

function followConnection(state, untilMs) {
  if (state === "connecting" && snapshot !== null) return; // stays lost until there is data
  connection = state;
  nextAttemptMs = untilMs;
  const lost = state === "lost";
  setAttribute(byId("live"), "data-state", state);
  setText(byId("live-text"), { connecting: "Connecting", live: "Live", lost: "No connection" }[state]);
  setHidden(byId("notice"), !lost);
  setHidden(byId("forget"), !hasKey());
  if (state === "live") takeAdvice();
  setText(byId("notice-text"), lost ? "The connection to the gateway is lost." : "");
  tick();
}

function refused(status, message) {
  setHidden(byId("forget"), true);
  setText(byId("live-text"), "Not connected");
  if (status === 401 || status === 403) {
    askForKey(hasKey() ? notAccepted({ status, message }) : "", () => feed.open());
  } else {
    setHidden(byId("notice"), false);
    setText(byId("notice-text"), message);
    setText(byId("notice-detail"), "");
  }
}

/** Shows how old the figures are; each second. */
function tick() {
  const nowMs = performance.now();
  const ageS = (nowMs - takenMs) / 1e3;
  const stale = snapshot !== null && (connection !== "live" || ageS > STALE_S);
  document.body.classList.toggle("stale", stale);
  setText(byId("live-age"), snapshot === null ? "" : stale ? `figures are ${age(ageS)} old` : "");
  if (connection === "lost") {
    const waitS = Math.max(0, Math.ceil((nextAttemptMs - nowMs) / 1e3));
    setText(byId("notice-detail"), waitS > 0 ? `Trying again in ${waitS} s.` : "Trying again.");
  }
}

byId("model").addEventListener("change", (event) => {
  chosenModel = event.target.value;
  keep("model", chosenModel);
  render(true);
});
byId("retry").addEventListener("click", () => feed.open());
byId("forget").addEventListener("click", () => {
  keepKey("");
  location.reload();
});
addEventListener("online", () => connection === "lost" && feed.open());
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiddenTimer);
  if (document.hidden) {
    hiddenTimer = setTimeout(() => feed.close(), HIDDEN_MS);
  } else if (feed.isClosed && snapshot !== null) {
    feed.open();
  } else {
    render(true);
  }
});
addEventListener("pagehide", () => feed.close());
addEventListener("pageshow", (event) => event.persisted && feed.open());
setInterval(tick, 1000);
setInterval(takeAdvice, ADVICE_MS);
restoreKey();
feed.open();
