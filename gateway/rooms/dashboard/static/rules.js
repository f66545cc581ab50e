// The versions of the distilled rules: their text, and the pin.

import { byId, follow, h, setAttribute, setHidden, setText } from "./dom.js";
import { age, date } from "./format.js";
import { header } from "./methods.js";
import { get } from "./session.js";

const RETRY_MS = 10_000;

export class RulesPanel {
  /** `act` is that of the page: it asks, changes something, and says what came of it. */
  constructor(act) {
    this.act = act;
    this.model = null;
    this.chosen = null; // version shown; null follows the newest
    this.shown = "";
    this.busy = false;
    byId("distill").addEventListener("click", () => this.#distill());
    byId("unpin").addEventListener("click", () => this.#unpin());
    byId("thaw").addEventListener("click", () => this.#thaw());
  }

  show(model, nowS) {
    if (this.model?.name !== model.name) {
      this.chosen = null;
      this.shown = "";
    }
    this.model = model;
    this.nowS = nowS;
    const rules = model.rules;
    const versions = rules?.versions ?? [];
    setHidden(byId("rules-body"), versions.length === 0);
    for (const id of ["distill", "unpin"]) setHidden(byId(id), rules === null);
    setHidden(byId("thaw"), !(model.gain?.frozen ?? false));
    setText(byId("rules-about"), about(model));
    if (rules === null) return;
    this.#disable("unpin", rules.pinned === null);
    this.#disable("distill", false);
    if (versions.length > 0) {
      this.#showVersions(versions, rules.pinned, nowS);
      this.#showText();
    }
  }

  #disable(id, disabled) {
    setAttribute(byId(id), "aria-disabled", disabled || this.busy ? "true" : null);
  }

  #showVersions(versions, pinned, nowS) {
    const table = byId("versions");
    if (table.tBodies.length === 0) table.append(...header("Versions", ["Version", "Written", "Decides"]), h("tbody"));
    follow(
      table.tBodies[0],
      versions.toReversed(),
      (each) => each.version,
      (each) => this.#versionRow(each.version),
      (row, each) => {
        setText(row.children[1].firstChild, `${age(nowS - each.written_s)} ago`);
        setAttribute(row.children[1].firstChild, "title", date(each.written_s));
        const isPinned = each.version === pinned;
        const button = row.children[2].firstChild;
        setText(button, isPinned ? "pinned" : "Pin");
        setAttribute(button, "aria-label", isPinned ? `Version ${each.version} is pinned` : `Pin version ${each.version}`);
        setAttribute(button, "aria-disabled", isPinned || this.busy ? "true" : null);
        row.classList.toggle("chosen", each.version === this.#version());
      },
    );
  }

  #versionRow(version) {
    const look = h("button", { type: "button", class: "quiet", on: { click: () => this.#choose(version) } }, `Version ${version}`);
    const pin = h("button", { type: "button", on: { click: () => this.#pin(version) } }, "Pin");
    return h("tr", {}, h("th", { scope: "row" }, look), h("td", {}, h("span")), h("td", {}, pin));
  }

  #version() {
    const versions = this.model.rules.versions.map((each) => each.version);
    return versions.includes(this.chosen) ? this.chosen : versions.at(-1);
  }

  #choose(version) {
    this.chosen = version;
    this.#showText();
  }

  /** Fetches and shows the text of a version; only when that changes. */
  async #showText() {
    const model = this.model.name;
    const version = this.#version();
    const wanted = JSON.stringify([model, version]);
    if (this.shown === wanted) return;
    this.shown = wanted;
    let text;
    try {
      text = (await get("admin/policy/rules", { model, version })).text;
    } catch (error) {
      text = error.message;
      setTimeout(() => (this.shown = ""), RETRY_MS);
    }
    if (this.shown === wanted) setText(byId("rules-text"), text);
  }

  async #pin(version) {
    const rules = this.model.rules;
    if (version === rules.pinned) return;
    const instead = rules.pinned === null ? `\`${this.model.policy}\`` : `version ${rules.pinned}`;
    const text = `It then decides in all gateways in place of ${instead}, without guardrail and outlier ejection. The policy goes on learning.`;
    await this.#change([`Pin version ${version}?`, text, "Pin"], "pin", { version }, () => `Version ${version} decides.`);
  }

  async #unpin() {
    const text = `\`${this.model.policy}\` then decides again in all gateways.`;
    await this.#change(["Unpin the rules?", text, "Unpin"], "unpin", {}, () => "The policy decides.");
  }

  async #thaw() {
    const text = "The policy decides again, and the comparison with least_loaded starts over.";
    await this.#change(["Thaw the policy?", text, "Thaw"], "thaw", {}, () => "The policy decides again.");
  }

  async #distill() {
    const done = (made) => `Version ${made.version}: ${made.leaves} rules.`;
    await this.#change(null, "distill", {}, done);
  }

  async #change(question, path, body, done) {
    if (this.busy || document.activeElement?.getAttribute("aria-disabled") === "true") return;
    this.#setBusy(true);
    await this.act(question, `admin/policy/${path}`, { model: this.model.name, ...body }, done);
    this.#setBusy(false);
  }

  #setBusy(busy) {
    this.busy = busy;
    this.show(this.model, this.nowS);
  }
}

function about(model) {
  if (model.rules === null) return `The policy ${model.policy} has no rules to distill.`;
  const { versions, pinned } = model.rules;
  if (versions.length === 0) return "No rules have been distilled yet. They write down what was learned, and change nothing until one is pinned.";
  return pinned === null ? `No version is pinned: ${model.decides} decides.` : `Version ${pinned} decides in place of ${model.policy}.`;
}
