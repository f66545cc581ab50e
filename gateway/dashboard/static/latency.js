// TTFT and TPOT by backend, and how well the policy predicts.

import { byId, follow, h, setAttribute, setStyle, setText } from "./dom.js";
import { age, duration, fixed, number } from "./format.js";
import { bodyOf, named, setCell, textCell } from "./methods.js";

const QUANTILES = ["p50_s", "p95_s", "p99_s"];
const LATENCY = ["Backend", "TTFT p50", "TTFT p95", "TTFT p99", "TPOT p50", "TPOT p95", "TPOT p99"];
const PREDICTIONS = ["Backend", "Step predicted", "Step measured", "Finish, measured/predicted", "10% to 90%"];
const LOW = Math.log2(0.4);
const HIGH = Math.log2(2.5);

const keyOf = (backend) => `${backend.name}\n${backend.method}`;

export function showLatency(model, marks, process) {
  const about = `Time to the first token (TTFT) and per token after it (TPOT), over the last ${age(process.window_s)}.`;
  setText(byId("latency-about"), about);
  const body = bodyOf(byId("latency-table"), "Latency of each backend, in percentiles", LATENCY);
  const worst = Object.fromEntries(
    ["ttft", "tpot"].map((name) => [name, Math.max(...model.backends.map((each) => each[name]?.p99_s ?? 0))]),
  );
  follow(body, model.backends, keyOf, (backend) => latencyRow(backend, marks), (row, backend) => {
    let place = 1;
    for (const name of ["ttft", "tpot"]) {
      for (const quantile of QUANTILES) {
        const element = row.children[place++];
        const value = backend[name]?.[quantile] ?? null;
        setCell(element, duration(value));
        setStyle(element, "--share", worst[name] > 0 && value !== null ? (value / worst[name]).toFixed(3) : 0);
      }
    }
    setText(row.querySelector("small"), `${number(backend.ttft?.count ?? 0)} requests`);
  });
}

function latencyRow(backend, marks) {
  const mark = marks.get(backend.name);
  const cells = LATENCY.slice(1).map((label) => textCell(label, "filled"));
  for (const each of cells) setStyle(each, "--c", `var(${mark.color})`);
  return h("tr", {}, h("th", { scope: "row" }, named(backend.name, mark, "0 requests")), ...cells);
}

export function showPredictions(model, marks) {
  const body = bodyOf(byId("predictions-table"), "What the policy predicted, and what was measured", PREDICTIONS);
  follow(body, model.backends, keyOf, (backend) => predictionRow(backend, marks), (row, backend) => {
    const [, predicted, measured, ratio, spread] = row.children;
    setCell(predicted, duration(backend.fitted_step_s));
    setCell(measured, duration(backend.step_s));
    const found = backend.accuracy;
    setCell(ratio, fixed(found?.p50));
    setText(row.querySelector("small"), `${number(found?.count ?? 0)} sampled`);
    const [picture, text] = spread.children;
    setAttribute(picture, "class", found === null ? "scale empty" : "scale");
    if (found !== null) {
      setStyle(picture, "--from", place(found.p10));
      setStyle(picture, "--to", place(found.p90));
      setStyle(picture, "--at", place(found.p50));
    }
    setText(text, found === null ? "–" : `${fixed(found.p10)} to ${fixed(found.p90)}`);
  });
}

function place(ratio) {
  return `${(100 * (Math.min(HIGH, Math.max(LOW, Math.log2(ratio))) - LOW)) / (HIGH - LOW)}%`;
}

function predictionRow(backend, marks) {
  const mark = marks.get(backend.name);
  const scale = h("span", { class: "scale", "aria-hidden": "true" }, h("i"), h("b"));
  setStyle(scale, "--c", `var(${mark.color})`);
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, named(backend.name, mark, "0 sampled")),
    textCell("Step predicted"),
    textCell("Step measured"),
    textCell("Finish, measured/predicted"),
    h("td", { class: "spread" }, scale, h("span")),
  );
}
