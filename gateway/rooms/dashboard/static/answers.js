// The first screen: four questions about a model, answered in words.

import { byId, follow, h, setAttribute, setHidden, setStyle, setText } from "./dom.js";
import { age, duration, fixed, number, percent, templateName, times, words } from "./format.js";

const MOST_NAMED = 3;
const MOST_CHARACTERS = 26; // of a name in a headline; the pool below has all of it
const LEAST_JUDGED = 20; // requests of a class
const IN_TIME = 0.95; // share of them below which a class is late
const LOWEST = Math.log2(0.25); // the ends of the scale of the gain
const HIGHEST = Math.log2(2);
const RULES = {
  least_loaded: "Each request goes to the replica with the fewest in flight.",
  round_robin: "Each replica gets requests in turn.",
  random: "Each request goes to a replica drawn at random.",
  power_of_two: "Each request goes to the less loaded of two replicas drawn at random.",
  thresholds: "Each request goes where the first matching rule says.",
  static: "Requests go where the pool file says.",
};
const REASONS = {
  least_delay: "to the least expected delay",
  control: "to compare with least_loaded",
  fewest_in_flight: "to the fewest in flight",
};

/** Shows the answers; `advised` is what `admin/advice` says of the model, undefined where it was not told. */
export function showAnswers(model, models, advised, process) {
  showWell(model, models.filter((each) => each !== model && !each.backends.some((backend) => backend.up)), process);
  showGain(model, advised);
  showTakes(model);
  showChange(advised);
}

function answer(id, text, className = "") {
  setText(byId(`${id}-verdict`), text);
  setAttribute(byId(`${id}-verdict`), "class", `verdict ${className}`);
}

function say(id, texts) {
  const items = texts.filter(Boolean).map((text, index) => ({ text, index }));
  follow(byId(id), items, ({ index }) => index, () => h("li"), (item, { text }) => setText(item, text));
}

/** Returns the first of some things, and how many others there are. */
function first(items, textOf) {
  const rest = items.length - MOST_NAMED;
  return [...items.slice(0, MOST_NAMED).map(textOf), rest > 0 ? `and ${rest} other${rest > 1 ? "s" : ""}` : ""];
}

/** Returns what is wrong with a replica; empty where it is well. */
export function trouble(backend) {
  const { state, reason, outlier, silence, contradiction, difference } = backend;
  const why = [outlier, contradiction, difference, silence, backend.trouble, reason].filter(Boolean).join("; ");
  return state === "up" ? why : why ? `${state}: ${why}` : state;
}

/** Shows whether a model is well; `down` are the other models without a replica that is up. */
function showWell(model, down, process) {
  const { backends } = model;
  const up = backends.filter((backend) => backend.up).length;
  const wrong = backends.filter(trouble);
  const late = model.classes.filter(({ kept, requests }) => requests >= LEAST_JUDGED && kept < IN_TIME * requests);
  const sum = (value) => backends.reduce((total, backend) => total + (value(backend) ?? 0), 0);
  const failed = sum((backend) => backend.failed);
  const waiting = sum((backend) => backend.engine?.waiting) + model.waiting;
  if (up === 0) answer("well", "No: no replica is up.", "bad");
  else if (wrong.length > 0) answer("well", `Not all of it: ${up} of ${backends.length} replicas are up, ${wrong.length} need${wrong.length > 1 ? "" : "s"} a look.`, "warn");
  else if (model.load > 1) answer("well", `All ${backends.length} replicas are up, but they are too few for the traffic.`, "warn");
  else if (late.length > 0) answer("well", `All ${backends.length} replicas are up, but too many requests are late${late[0].name && `: ${short(late[0].name)}`}.`, "warn");
  else if (model.gain?.frozen) answer("well", `All ${backends.length} replicas are up, but ${model.policy} is frozen: it was worse.`, "warn");
  else if (down.length > 0) answer("well", `This model is, but ${down.length} other${down.length > 1 ? "s have" : " has"} no replica that is up.`, "warn");
  else answer("well", backends.length > 1 ? `Yes: all ${backends.length} replicas are up.` : "Yes: its replica is up.", "good");
  const measured = backends.filter((backend) => backend.ttft !== null);
  const worst = measured.toSorted((one, other) => other.ttft.p95_s - one.ttft.p95_s)[0];
  say("well-list", [
    down.length > 0 ? `No replica is up of ${first(down, ({ name }) => name).filter(Boolean).join(", ")}.` : "",
    ...first(wrong, (backend) => `${backend.name}: ${trouble(backend)}`),
    ...model.unlike,
    `${failed === 0 ? "No" : number(failed)} request${failed === 1 ? "" : "s"} failed in the last ${age(process.window_s)}.`,
    `${number(sum((each) => each.requests_per_s))} requests and ${number(sum((each) => each.output_tokens_per_s))} output tokens per second; ${number(sum((each) => each.in_flight))} in flight, ${number(waiting)} waiting.`,
    ...model.classes.map(inTime),
    model.load === null ? "" : `The traffic is ${percent(model.load)} of what these replicas carry within the targets.`,
    worst ? `Slowest first token: ${duration(worst.ttft.p95_s)} at ${worst.name} (95th percentile).` : "",
  ]);
}

const inTime = ({ name, kept, requests }) => `${name || "With an objective"}: ${percent(kept / requests)} of ${number(requests)} requests in time.`;

/** Returns what the comparison with least_loaded says: the verdict, its class, and what it rests on. */
function overBalancing(gain) {
  if (gain === null || gain.share === 0) return ["Not compared with plain balancing.", "", "Set guardrail.share for a comparison with least_loaded."];
  if (gain.needed_block_s !== null) {
    return ["Over plain balancing: not known.", "", `Requests take too long to compare: set guardrail.block_s to ${Math.ceil(gain.needed_block_s)} or more.`];
  }
  if (gain.ratio === null) return ["Over plain balancing: not known yet.", "", `least_loaded has not decided for long enough: it does in ${percent(gain.share)} of the time.`];
  const rests = `${fixed(gain.ratio)} times the time of least_loaded (${percent(gain.confidence)} interval ${fixed(gain.low)} to ${fixed(gain.high)}), from ${gain.control_blocks} blocks of time under it.`;
  if (gain.low <= 1 && gain.high >= 1) return ["Over plain balancing: no difference is certain yet.", "", rests];
  const change = percent(Math.abs(1 - gain.ratio));
  return gain.ratio < 1 ? [`${change} less time than plain balancing.`, "good", rests] : [`${change} more time than plain balancing.`, "bad", rests];
}

/** Returns the same of the comparison with no speculation at all. */
function overNone(advised) {
  const title = "Over no speculation";
  if (advised === undefined) return [`${title}: not shown.`, "", "It needs an admin key, and is asked for once a minute."];
  if (!advised.learns) return [`${title}: not known.`, "", "The policy learns no step times."];
  const { gain, baseline, missing } = advised.speculation;
  if (gain === null) return [`${title}: not known yet.`, "", `${sentence(missing)}.`];
  const than = baseline ? `the measured steps of ${baseline}` : "a baseline of the calibration that the pool file names";
  const [sign, is] = gain.share < 0 ? [-1, "added"] : [1, "saved"];
  const ends = [sign * gain.low, sign * gain.high].sort((a, b) => a - b).map(percent);
  const rests = `Estimated from ${than}: ${percent(sign * gain.share)} of the ${gain.of} ${is} (${percent(gain.confidence)} interval ${ends.join(" to ")}).`;
  if (gain.low <= 0 && gain.high >= 0) return [`${title}: no difference is certain.`, "", rests];
  const change = percent(Math.abs(gain.share));
  return gain.share > 0 ? [`${change} less time than without speculation.`, "good", rests] : [`${change} more time than without speculation.`, "bad", rests];
}

function showGain(model, advised) {
  const [verdict, className, rests] = overBalancing(model.gain);
  answer("gain", verdict, className);
  setText(byId("gain-rests"), rests);
  byId("gain-interval").replaceChildren(...(model.gain?.ratio ? [interval(model.gain)] : []));
  const [over, overClass, overRests] = overNone(advised);
  answer("speculation", over, overClass);
  setText(byId("speculation-rests"), overRests);
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

const place = (ratio) => (100 * (Math.min(HIGHEST, Math.max(LOWEST, Math.log2(ratio))) - LOWEST)) / (HIGHEST - LOWEST);

function interval(gain) {
  const ticks = [0.25, 0.5, 1, 2].map((tick) => {
    const mark = h("span", { class: tick === 1 ? "tick one" : "tick" }, String(tick));
    setStyle(mark, "--at", `${place(tick)}%`);
    return mark;
  });
  const range = h("span", { class: "range" });
  const dot = h("span", { class: "dot" });
  setStyle(range, "--from", `${place(gain.low)}%`);
  setStyle(range, "--to", `${place(gain.high)}%`);
  setStyle(dot, "--at", `${place(gain.ratio)}%`);
  return h("div", { class: "interval", "aria-hidden": "true" }, ...ticks, range, dot);
}

const short = (name) => (name.length > MOST_CHARACTERS ? `${name.slice(0, MOST_CHARACTERS - 1)}…` : name);

function showTakes(model) {
  const takers = model.backends.filter((each) => each.share > 0).toSorted((one, other) => other.share - one.share);
  const shares = takers.slice(0, MOST_NAMED).map((each) => `${short(each.name)} ${percent(each.share)}`);
  const rest = takers.slice(MOST_NAMED);
  if (rest.length > 0) shares.push(`${rest.length} other${rest.length > 1 ? "s" : ""} ${percent(rest.reduce((sum, each) => sum + each.share, 0))}`);
  answer("takes", shares.length > 0 ? `${shares.join(", ")}.` : "No requests in the last minute.");
  const groups = (model.belief?.groups ?? []).filter((group) => group.backends.length > 0).toSorted((one, other) => other.requests - one.requests);
  const over = model.belief?.baseline;
  const instead = model.decides === model.policy ? "" : `, in place of ${model.policy}`;
  const learns = groups.length > 0;
  say("takes-list", [
    `${model.decides} decides${instead}. ${RULES[model.decides] ?? (learns ? "What it expects to be fastest, before load:" : "")}`,
    ...(model.decides in RULES ? [] : groups.slice(0, MOST_NAMED).map((group) => fastest(group, over, model.templates))),
    ...first(model.backends.filter((each) => each.slowdown > 1), (each) => `${each.name} counts as ${times(each.slowdown)} as slow as fitted, as its last steps were.`),
    tally(model.decisions),
  ]);
}

function fastest(group, over, templates) {
  const best = group.backends.reduce((one, other) => (one.speedup >= other.speedup ? one : other));
  const template = group.template ? `, ${templateName(group.template, templates)}` : "";
  const how = best.backend === over ? "nothing is faster" : `${times(best.speedup)} the tokens per second of ${over}`;
  return `${group.workload || "Not declared"} at temperature ${group.temperature}${template}: ${best.backend}, ${how}.`;
}

/** Returns how many of the last decisions had which reason. */
function tally(decisions) {
  const counts = new Map();
  for (const { reason } of decisions) counts.set(reason, (counts.get(reason) ?? 0) + 1);
  const parts = [...counts].toSorted((one, other) => other[1] - one[1]).map(([reason, many]) => `${many} ${REASONS[reason] ?? words(reason)}`);
  const given = decisions.filter(({ arm }) => arm).length;
  const first = given > 0 ? ` ${given} of them in an arm of a comparison.` : "";
  return parts.length > 0 ? `Of the last ${decisions.length} decisions seen: ${parts.join(", ")}.${first}` : "";
}

function showChange(advised) {
  const findings = advised?.findings ?? [];
  const { gain, missing } = advised?.speculation ?? {};
  if (advised === undefined) answer("change", "Not shown: advice needs an admin key.");
  else if (findings.length > 0) answer("change", `${titleOf(findings[0])}.${worthOf(findings[0])}`, "warn");
  else if (!advised.learns) answer("change", "Not known: the policy learns no step times.");
  else if (gain?.high < 0) answer("change", "Not known yet which replica should not speculate, though speculation costs time.", "warn");
  else answer("change", "Nothing, as far as was measured.");
  setText(byId("change-rests"), findings.length > 1 ? `The first of ${findings.length}: make it, and measure again before the next.` : missing && gain?.high < 0 ? `${sentence(missing)}.` : "");
  setHidden(byId("change-how"), findings.length === 0);
  follow(byId("change-list"), findings.slice(0, 1), (finding) => JSON.stringify(finding), adviceItem, () => {});
}

function worthOf({ gain, worth }) {
  if (gain !== null) return ` Saves about ${percent(gain.share)} of the ${gain.of}.`;
  return worth && ` What it brings: ${worth}.`;
}

function titleOf({ backend, title }) {
  return backend ? `${backend}: ${title}` : title;
}

function adviceItem({ backend, gain, evidence, change }) {
  const worth = gain && `Calculated from what was measured: saves ${percent(gain.share)} (${percent(gain.confidence)} interval ${percent(gain.low)} to ${percent(gain.high)}) of the ${gain.of}.`;
  return h(
    "div",
    {},
    worth ? h("p", {}, worth) : null,
    h("p", { class: "soft" }, evidence),
    h("pre", { tabindex: "0", role: "region", "aria-label": `Change for ${backend || "the pool"}` }, change),
  );
}
