// TTFT and TPOT by backend.

import { byId, follow, h, setStyle, setText } from "./dom.js";
import { age, duration, number } from "./format.js";
import { bodyOf, named, setCell, textCell } from "./methods.js";

const QUANTILES = ["p50_s", "p95_s", "p99_s"];
const LATENCY = ["Backend", "TTFT p50", "TTFT p95", "TTFT p99", "TPOT p50", "TPOT p95", "TPOT p99"];

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
    setText(row.querySelector("small"), `${number(Math.max(backend.ttft?.count ?? 0, backend.tpot?.count ?? 0))} requests`);
  });
}

function latencyRow(backend, marks) {
  const mark = marks.get(backend.name);
  const cells = LATENCY.slice(1).map((label) => textCell(label, "filled"));
  for (const each of cells) setStyle(each, "--c", `var(${mark.color})`);
  return h("tr", {}, h("th", { scope: "row" }, named(backend.name, mark, "0 requests")), ...cells);
}
