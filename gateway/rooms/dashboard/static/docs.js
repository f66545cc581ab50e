// The endpoints of the gateway, from its OpenAPI document: what each does, takes, and how to ask it.

import { byId, h, setHidden, setText } from "./dom.js";
import { header } from "./methods.js";
import { askForKey, get, headers, notAccepted, restoreKey } from "./session.js";

const text = (schema) => schema?.type ?? schema?.anyOf?.map(text).filter((type) => type !== "null").join(" or ") ?? "";

/** Returns an example of a schema: its default, or a value of its type. */
function example(schema, schemas) {
  if (schema.$ref) return example(schemas[schema.$ref.split("/").pop()], schemas);
  if (schema.default !== undefined) return schema.default;
  if (schema.anyOf) return example(schema.anyOf[0], schemas);
  if (schema.type === "object") {
    const needed = Object.entries(schema.properties ?? {}).filter(([name]) => schema.required?.includes(name));
    return Object.fromEntries(needed.map(([name, each]) => [name, each.type === "string" ? name.toUpperCase() : example(each, schemas)]));
  }
  return { array: [], boolean: true, integer: 1, number: 1 }[schema.type] ?? "...";
}

function command(verb, path, body, isAdmin) {
  const parts = ["curl --fail-with-body"];
  if (verb !== "get") parts.push(`-X ${verb.toUpperCase()}`);
  if (isAdmin) parts.push("-H 'Authorization: Bearer ADMIN-KEY'");
  if (body !== null) parts.push("-H 'Content-Type: application/json'", `-d '${JSON.stringify(body)}'`);
  return `${parts.join(" ")} ${location.origin}${location.pathname.replace(/\/admin\/docs\/?$/, "")}${path}`;
}

function endpoint(path, verb, operation, schemas) {
  const schema = operation.requestBody?.content?.["application/json"]?.schema;
  const line = command(verb, path, schema ? example(schema, schemas) : null, path.startsWith("/admin"));
  const rows = (operation.parameters ?? []).map((each) =>
    h("tr", {}, h("th", { scope: "row", class: "code" }, each.name), h("td", {}, text(each.schema)), h("td", {}, each.description ?? (each.required ? "needed" : ""))),
  );
  const run = verb === "get" && !path.includes("{");
  const answer = h("pre", { hidden: true, tabindex: "0", role: "region", "aria-label": `Answer of ${path}` });
  const ask = h("button", { type: "button", on: { click: () => show(answer, path) } }, "Ask");
  return h(
    "section",
    { class: "card endpoint" },
    h("h2", {}, h("span", { class: "verb" }, verb.toUpperCase()), path),
    h("p", {}, (operation.description ?? operation.summary ?? "").split("\n")[0]),
    rows.length > 0 ? h("table", {}, ...header(`Parameters of ${path}`, ["Parameter", "Type", "Meaning"]), h("tbody", {}, ...rows)) : null,
    h("pre", { tabindex: "0", role: "region", "aria-label": `Command for ${verb} ${path}` }, line),
    run ? h("p", {}, ask) : null,
    answer,
  );
}

async function show(answer, path) {
  setHidden(answer, false);
  const response = await fetch(`..${path}`, { headers: headers(), cache: "no-store" });
  const given = await response.text();
  try {
    setText(answer, JSON.stringify(JSON.parse(given), null, 2));
  } catch {
    setText(answer, given || `${response.status}`);
  }
}

async function open() {
  try {
    const { paths, components } = await get("openapi.json");
    setHidden(byId("notice"), true);
    const all = Object.entries(paths).flatMap(([path, verbs]) =>
      Object.entries(verbs).map(([verb, operation]) => endpoint(path, verb, operation, components?.schemas ?? {})),
    );
    byId("endpoints").replaceChildren(...all);
  } catch (error) {
    setHidden(byId("notice"), false);
    setText(byId("notice-text"), notAccepted(error));
    if (error.status === 401 || error.status === 403) askForKey(notAccepted(error), open);
  }
}

byId("retry").addEventListener("click", () => askForKey("", open));
byId("openapi").addEventListener("click", async (event) => {
  event.preventDefault(); // a link sends no key
  const url = URL.createObjectURL(new Blob([JSON.stringify(await get("openapi.json"), null, 2)], { type: "application/json" }));
  h("a", { href: url, download: "openapi.json" }).click();
});
restoreKey();
open();
