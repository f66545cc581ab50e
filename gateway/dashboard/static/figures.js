// The key figures of a model, and its advice.

import { byId, follow, h, setHidden, setStyle, setText } from "./dom.js";
import { NONE, duration, fixed, number, percent } from "./format.js";

const LOWEST = Math.log2(0.25); // the ends of the scale of the gain
const HIGHEST = Math.log2(2);

function tile(key) {
  return h("div", { class: key === "gain" ? "tile wide" : "tile" }, h("dt"), h("dd"), h("dd", { class: "soft" }));
}

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

/** Returns what the comparison with least_loaded says: [value, in words]. */
export function gainInWords(gain) {
  if (gain === null || gain.share === 0) return ["off", "no comparison: set guardrail.share"];
  if (gain.needed_block_s !== null) {
    return ["not measured", `requests take too long: set guardrail.block_s to ${Math.ceil(gain.needed_block_s)} or more`];
  }
  if (gain.ratio === null) return ["too early", "least_loaded has not decided for long enough"];
  const range = ` (${fixed(gain.low)} to ${fixed(gain.high)})`;
  const change = percent(Math.abs(1 - gain.ratio));
  let verdict = gain.ratio < 1 ? `${change} less time` : `${change} more time`;
  if (gain.low <= 1 && gain.high >= 1) verdict = "no difference is certain yet";
  const blocks = `${gain.control_blocks} blocks of time under least_loaded`;
  return [`${fixed(gain.ratio)}${range}`, `${verdict}; ${percent(gain.confidence)} interval from ${blocks}`];
}

export function showFigures(model) {
  const backends = model.backends;
  const up = backends.filter((backend) => backend.state === "up").length;
  const sum = (value) => backends.reduce((total, backend) => total + (value(backend) ?? 0), 0);
  const ended = sum((backend) => backend.requests_per_s);
  const queued = sum((backend) => backend.engine?.waiting) + model.waiting;
  const [gain, verdict] = gainInWords(model.gain);
  const frozen = model.gain?.frozen ?? false;
  const figures = [
    ["gain", "Time per unit of work, over least_loaded", gain, verdict],
    ["decides", "Decides", model.decides, whyItDecides(model, frozen)],
    ["backends", "Backends up", `${up} of ${backends.length}`, up < backends.length ? "see the pool" : "all healthy"],
    ["requests", "Requests", `${number(ended)} /s`, "over the last minute"],
    ["output", "Output tokens", `${number(sum((each) => each.output_tokens_per_s))} /s`, "over the last minute"],
    ["flight", "In flight", number(sum((each) => each.in_flight)), `${number(queued)} waiting`],
    ["slowest", "Slowest first token", ...slowest(backends)],
  ];
  follow(byId("figures"), figures, ([key]) => key, ([key]) => tile(key), (element, [key, term, value, detail]) => {
    const [name, figure, remark] = element.children;
    setText(name, term);
    setText(figure, value.replaceAll("_", "_\u200b")); // so that a long name is broken there
    setText(remark, detail);
    element.classList.toggle("warned", (key === "decides" && frozen) || (key === "backends" && up < backends.length));
    if (key === "gain") {
      element.querySelector(".interval")?.remove();
      if (model.gain?.ratio) element.append(h("dd", {}, interval(model.gain)));
      figure.classList.toggle("good", (model.gain?.high ?? 1) < 1);
      figure.classList.toggle("bad", (model.gain?.low ?? 1) > 1);
    }
  });
}

function whyItDecides(model, frozen) {
  if (frozen) return `${model.policy} is frozen: it was worse`;
  if (model.decides !== model.policy) return `in place of ${model.policy}`;
  return model.rules === null ? "the policy of the pool file" : "the policy; no rules are pinned";
}

function slowest(backends) {
  const measured = backends.filter((backend) => backend.ttft !== null);
  if (measured.length === 0) return [NONE, "no requests yet"];
  const worst = measured.reduce((one, other) => (one.ttft.p95_s >= other.ttft.p95_s ? one : other));
  return [duration(worst.ttft.p95_s), `${worst.name}, 95th percentile`];
}

/** Shows the findings of `gateway advise`; the panel is hidden where there are none. */
export function showAdvice(findings) {
  setHidden(byId("advice"), findings.length === 0);
  follow(byId("advice-list"), findings, (finding) => JSON.stringify(finding), adviceItem, () => {});
}

function adviceItem(finding) {
  const { backend, title, gain, evidence, change } = finding;
  const worth = gain && `saves ${percent(gain.share)} (95% interval ${percent(gain.low)} to ${percent(gain.high)}) of the ${gain.of}`;
  return h(
    "li",
    {},
    h("strong", {}, backend ? `${backend}: ${title}` : title),
    worth ? h("p", {}, worth) : null,
    h("p", { class: "soft" }, evidence),
    h("pre", { tabindex: "0", role: "region", "aria-label": `Change for ${backend || "the pool"}` }, change),
  );
}
