// The speedup over the baseline that the policy expects, by workload, template and temperature.

import { byId, follow, h, setAttribute, setHidden, setStyle, setText } from "./dom.js";
import { count, fixed, number, templateName, times } from "./format.js";
import { header, named } from "./methods.js";

let shownBackends = null; // not the empty text, which stands for none

export function showBeliefs(model, marks) {
  const belief = model.belief;
  setHidden(byId("beliefs-table"), belief === null || belief.groups.length === 0);
  if (belief === null) {
    setText(byId("beliefs-about"), `The policy ${model.policy} tells nothing about what it expects.`);
    return;
  }
  if (belief.groups.length === 0) {
    setText(byId("beliefs-about"), "Nothing has been learned yet.");
    return;
  }
  const batch = number(belief.batch);
  setText(
    byId("beliefs-about"),
    `Output tokens per second relative to ${belief.baseline}, with ${batch} in flight; below it tokens per step, expected / observed.`,
  );
  const table = byId("beliefs-table");
  const names = belief.groups[0].backends.map((each) => each.backend);
  const heads = names.map((name) => `${name} ${marks.get(name)?.color}`).join("\n");
  if (heads !== shownBackends) {
    shownBackends = heads;
    table.replaceChildren(...header("Expected speedup", ["Workload", "Template", "Temperature", "Requests"]), h("tbody"));
    for (const name of names) {
      const mark = marks.get(name);
      table.tHead.rows[0].append(h("th", { scope: "col" }, mark ? named(name, mark) : name));
    }
  }
  follow(
    table.tBodies[0],
    belief.groups,
    (group) => JSON.stringify([group.workload, group.template, group.temperature]),
    (group) => row(group, names.length),
    (element, group) => update(element, group, model.templates),
  );
}

function row(group, count) {
  const cells = Array.from({ length: count }, () => h("td", { class: "belief" }, h("span"), h("small")));
  const workload = h("th", { scope: "row" }, group.workload || h("span", { class: "soft" }, "not declared"));
  const template = h("td", { class: "code", title: group.template }, h("span"));
  return h("tr", {}, workload, template, h("td", {}, group.temperature), h("td", {}, h("span")), ...cells);
}

function update(element, group, templates) {
  setText(element.children[1].firstChild, group.template ? templateName(group.template, templates, "") : "–");
  setText(element.children[3].firstChild, count(group.requests));
  const best = Math.max(...group.backends.map((each) => each.speedup));
  group.backends.forEach((each, index) => {
    const cell = element.children[4 + index];
    if (cell === undefined) return;
    const [speedup, tokens] = cell.children;
    setText(speedup, times(each.speedup));
    setText(tokens, `${fixed(each.tokens_per_step)} / ${fixed(each.observed_tokens_per_step)}`);
    const strength = Math.min(1, Math.abs(Math.log2(Math.max(0.05, each.speedup))) / 1.6);
    setStyle(cell, "--strength", `${(strength * 42).toFixed(0)}%`);
    setAttribute(cell, "class", `belief ${each.speedup < 1 ? "slower" : "faster"}${each.speedup === best ? " best" : ""}`);
  });
}
