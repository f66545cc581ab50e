// The last decisions: why each request went where it did, and what was expected of every candidate.

import { byId, follow, h, setAttribute, setHidden, setText } from "./dom.js";
import { clock, duration, fixed, number, percent, templateName, words } from "./format.js";
import { bodyOf, cell, header, named, setCell, textCell } from "./methods.js";

const MOST_KEPT = 200;
const MOST_SHOWN = 20;
const COLUMNS = ["Time", "Request", "Sent to", "Reason", "Probability", "Predicted", "Measured", "Outcome"];

export class DecisionsPanel {
  constructor() {
    this.kept = new Map(); // by number, the oldest first
    this.of = "";
    this.open = new Set();
    this.paused = false;
    this.reason = "";
    this.marks = new Map();
    byId("pause").addEventListener("click", () => this.#pause(!this.paused));
    byId("reason").addEventListener("change", (event) => {
      this.reason = event.target.value;
      this.#render();
    });
  }

  show(model, marks, process) {
    const of = `${process.pid} ${process.started_s} ${model.name}`;
    if (this.of !== of) {
      this.of = of;
      this.kept.clear();
      this.open.clear();
    }
    this.marks = marks;
    this.templates = model.templates;
    for (const decision of model.decisions) {
      if (!this.paused || this.kept.has(decision.number)) this.kept.set(decision.number, decision);
    }
    for (const number of this.kept.keys()) {
      if (this.kept.size <= MOST_KEPT) break;
      this.kept.delete(number);
    }
    const none = this.kept.size === 0 ? " None yet: they are sampled while this page is open." : "";
    const several = process.workers > 1 ? " of one of the workers" : "";
    setText(byId("decisions-about"), `A sample of the requests${several}, the newest first. Scores are what the policy minimises: seconds of delay.${none}`);
    this.#render();
  }

  #pause(paused) {
    this.paused = paused;
    setAttribute(byId("pause"), "aria-pressed", String(paused));
    setText(byId("pause"), paused ? "Go on" : "Pause");
  }

  #render() {
    const all = [...this.kept.values()].reverse();
    const reasons = ["", ...new Set(all.map((each) => each.reason).sort())];
    if (this.reason && !reasons.includes(this.reason)) reasons.push(this.reason);
    follow(byId("reason"), reasons, String, (name) => h("option", { value: name }, name ? words(name) : "all"), () => {});
    byId("reason").value = this.reason;
    const shown = all.filter((each) => !this.reason || each.reason === this.reason).slice(0, MOST_SHOWN);
    const body = bodyOf(byId("decisions-table"), "Last decisions", COLUMNS);
    setHidden(byId("decisions-table"), all.length === 0);
    const rows = shown.flatMap((decision) => {
      const isOpen = this.open.has(decision.number);
      return isOpen ? [{ decision, isDetail: false }, { decision, isDetail: true }] : [{ decision, isDetail: false }];
    });
    follow(
      body,
      rows,
      ({ decision, isDetail }) => `${decision.number}${isDetail ? " detail" : ""}`,
      ({ decision, isDetail }) => (isDetail ? this.#createDetail(decision) : this.#createRow(decision)),
      (row, { decision, isDetail }) => (isDetail ? null : this.#update(row, decision)),
    );
  }

  #createRow(decision) {
    const { number: key, request } = decision;
    const look = h("button", { type: "button", class: "quiet more", on: { click: () => this.#toggle(key) } }, clock(decision.at_s));
    const kind = `${request.workload || "not declared"} at temperature ${number(request.temperature)}`;
    const size = `${number(request.prompt_tokens)} tokens in${request.max_tokens === null ? "" : `, at most ${number(request.max_tokens)} out`}`;
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, look),
      cell("Request", h("span", {}, kind), h("small", {}, size)),
      cell("Sent to", this.#named(decision.backend), decision.arm ? h("small", {}, `arm ${decision.arm}`) : null),
      cell("Reason", words(decision.reason)),
      cell("Probability", percent(decision.propensity)),
      cell("Predicted", duration(decision.predicted_s)),
      textCell("Measured"),
      textCell("Outcome"),
    );
  }

  #named(backend) {
    const mark = this.marks.get(backend);
    return mark === undefined ? backend : named(backend, mark);
  }

  #update(row, { number: key, ended }) {
    setAttribute(row.firstChild.firstChild, "aria-expanded", String(this.open.has(key)));
    setCell(row.children[6], ended === null ? "running" : duration(ended.e2e_s));
    setCell(row.children[7], ended === null ? "" : words(ended.outcome));
  }

  /** Shows or hides the candidates of a decision; the list stands still while some are shown. */
  #toggle(key) {
    if (!this.open.delete(key)) {
      this.open.add(key);
      this.#pause(true);
    }
    this.#render();
  }

  #createDetail({ candidates, backend, request, policy }) {
    const columns = ["Candidate", "Score", "Predicted to finish", "Probability", "In flight"];
    const sorted = candidates.toSorted((one, other) => (one.score ?? Infinity) - (other.score ?? Infinity));
    const rows = sorted.map((each) =>
      h(
        "tr",
        { class: each.backend === backend ? "chosen" : null },
        h("th", { scope: "row" }, this.#named(each.backend), each.backend === backend ? h("small", {}, "chosen") : null),
        h("td", {}, fixed(each.score, 3)),
        h("td", {}, duration(each.predicted_s)),
        h("td", {}, percent(each.propensity)),
        h("td", {}, number(each.in_flight)),
      ),
    );
    const features = [
      `policy ${policy}`,
      request.endpoint,
      request.stream ? "streamed" : "not streamed",
      `overlap ${fixed(request.overlap)}`,
      `code ${percent(request.code_share)}`,
      request.template ? templateName(request.template, this.templates) : "no template",
      `turns ${request.turns}`,
      request.n > 1 ? `n ${request.n}` : "",
      request.structured ? "structured" : "",
      request.tools ? "tools" : "",
    ];
    const table = h("table", {}, ...header("Candidates of this decision", columns), h("tbody", {}, ...rows));
    const about = h("p", { class: "soft" }, features.filter(Boolean).join(" · "));
    return h("tr", { class: "detail" }, h("td", { colspan: COLUMNS.length }, h("div", { class: "scroll" }, table), about));
  }
}
