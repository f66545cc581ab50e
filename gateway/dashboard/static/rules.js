// The versions of the distilled rules: their text, a comparison, and the pin.

import { byId, follow, h, setAttribute, setHidden, setText } from "./dom.js";
import { age, date, percent } from "./format.js";
import { header } from "./methods.js";
import { confirmed, get, mayWrite, post } from "./session.js";

const NOTHING = "none";
const RETRY_MS = 10_000;

export class RulesPanel {
  /** `say(text)` announces what was done; `needKey(message)` asks for a key that may change something. */
  constructor(say, needKey) {
    this.say = say;
    this.needKey = needKey;
    this.model = null;
    this.chosen = null; // version shown; null follows the newest
    this.against = null; // version compared with; null follows the one before, or the pinned one
    this.shown = "";
    this.busy = false;
    byId("rules-version").addEventListener("change", (event) => this.#choose(Number(event.target.value)));
    byId("rules-against").addEventListener("change", (event) => {
      this.against = event.target.value === NOTHING ? NOTHING : Number(event.target.value);
      this.#showText();
    });
    byId("distill").addEventListener("click", () => this.#distill());
    byId("unpin").addEventListener("click", () => this.#unpin());
    byId("thaw").addEventListener("click", () => this.#thaw());
  }

  show(model, nowS) {
    if (this.model?.name !== model.name) {
      this.chosen = this.against = null;
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
      this.#fillChoices(versions);
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

  #fillChoices(versions) {
    const newestFirst = versions.toReversed().map((each) => each.version);
    const option = (value) => h("option", { value }, value === NOTHING ? "nothing" : `version ${value}`);
    const fill = (select, values) => follow(select, values, String, option, () => {});
    fill(byId("rules-version"), newestFirst);
    fill(byId("rules-against"), [NOTHING, ...newestFirst]);
  }

  #version() {
    const versions = this.model.rules.versions.map((each) => each.version);
    return versions.includes(this.chosen) ? this.chosen : versions.at(-1);
  }

  #other(version) {
    const versions = this.model.rules.versions.map((each) => each.version);
    if (this.against === NOTHING || versions.includes(this.against)) return this.against;
    const pinned = this.model.rules.pinned;
    if (pinned !== null && pinned !== version && versions.includes(pinned)) return pinned;
    return versions.filter((each) => each < version).at(-1) ?? NOTHING;
  }

  #choose(version) {
    this.chosen = version;
    this.#showText();
  }

  /** Fetches and shows the text of a version, or the lines in which it differs from another; only when that changes. */
  async #showText() {
    const model = this.model.name;
    const version = this.#version();
    const against = this.#other(version);
    byId("rules-version").value = String(version);
    byId("rules-against").value = String(against);
    const wanted = JSON.stringify([model, version, against]);
    if (this.shown === wanted) return;
    this.shown = wanted;
    const alone = against === NOTHING || against === version;
    let lines;
    try {
      if (alone) lines = (await get("admin/dashboard/rules", { model, version })).text.trimEnd().split("\n").map((line) => ` ${line}`);
      else lines = (await get("admin/dashboard/diff", { model, old: against, new: version })).lines;
      if (!alone && lines.length === 0) lines = [" The two versions are the same."];
    } catch (error) {
      lines = [` ${error.message}`];
      setTimeout(() => (this.shown = ""), RETRY_MS);
    }
    if (this.shown === wanted) byId("rules-text").replaceChildren(...lines.map((line) => lineOf(line, !alone)));
  }

  async #pin(version) {
    const rules = this.model.rules;
    if (version === rules.pinned) return;
    const instead = rules.pinned === null ? `\`${this.model.policy}\`` : `version ${rules.pinned}`;
    await this.#change(
      `Pin version ${version}?`,
      `It then decides in all gateways in place of ${instead}, without guardrail and outlier ejection. The policy goes on learning.`,
      "Pin",
      "pin",
      { version },
      `Version ${version} decides.`,
    );
  }

  async #unpin() {
    const text = `\`${this.model.policy}\` then decides again in all gateways.`;
    await this.#change("Unpin the rules?", text, "Unpin", "unpin", {}, "The policy decides.");
  }

  async #thaw() {
    const text = "The policy decides again, and the comparison with least_loaded starts over.";
    await this.#change("Thaw the policy?", text, "Thaw", "thaw", {}, "The policy decides again.");
  }

  async #distill() {
    const done = (made) => `Version ${made.version}: ${made.leaves} rules, ${percent(made.kept_share)} of the learned gain kept.`;
    await this.#change(null, "", "", "distill", {}, done);
  }

  /** Asks, unless there is no title; then changes something, and announces what came of it. */
  async #change(title, text, action, path, body, done) {
    const button = document.activeElement;
    if (this.busy || button?.getAttribute("aria-disabled") === "true") return;
    if (!(await mayWrite())) {
      this.needKey("This needs a key that may change the pool.");
      return;
    }
    if (title !== null && !(await confirmed(title, text, action))) return;
    this.#setBusy(true);
    try {
      const answer = await post(`admin/policy/${path}`, { model: this.model.name, ...body });
      this.say(typeof done === "function" ? done(answer) : done);
    } catch (error) {
      this.say(`Not done: ${error.message}`);
    }
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

function lineOf(line, isDiff) {
  const mark = line[0];
  const text = `${isDiff ? line : line.slice(1)}\n`;
  if (isDiff && mark === "+") return h("ins", {}, text);
  if (isDiff && mark === "-") return h("del", {}, text);
  const quiet = line.startsWith("@@") || line.slice(1).trimStart().startsWith("#");
  return h("span", { class: quiet ? "soft" : null }, text);
}
