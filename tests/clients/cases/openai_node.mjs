// OpenAI's client for Node.js.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const require = createRequire(`${process.env.CLIENTS_NODE}/package.json`);
const OpenAI = require("openai").default;
const { CLIENTS_URL: url, CLIENTS_MODEL: model, CLIENTS_KEY: key, CLIENTS_LIMITED_KEY: limitedKey } = process.env;

const messages = [{ role: "user", content: "Tell me about sequence types." }];
const weather = [{ role: "user", content: "What is the weather in Oslo, in celsius?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const client = (apiKey = key) => new OpenAI({ baseURL: `${url}/v1`, apiKey });

function check(condition, seen) {
  if (!condition) throw new Error(`unexpected: ${JSON.stringify(seen)}`);
}

async function raises(kind, ask) {
  try {
    await ask();
  } catch (error) {
    if (error instanceof kind) return;
    throw error;
  }
  throw new Error(`no ${kind.name}`);
}

async function refused() {
  const page = await (await fetch(`${url}/metrics`)).text();
  const lines = page.split("\n").filter((line) => /^gateway_requests_total\{.*outcome="refused"/.test(line));
  return lines.reduce((sum, line) => sum + Number(line.split(" ").pop()), 0);
}

const cases = {
  models: async () => {
    const ids = [];
    for await (const each of client().models.list()) ids.push(each.id);
    check(ids.includes(model), ids);
    check((await client().models.retrieve(model)).id === model);
  },
  chat: async () => {
    const answer = await client().chat.completions.create({ model, messages, max_tokens: 20 });
    check(answer.choices[0].message.content, answer);
  },
  stream: async () => {
    const events = await client().chat.completions.create({ model, messages, max_tokens: 20, stream: true });
    let text = "";
    for await (const chunk of events) text += chunk.choices[0]?.delta?.content ?? "";
    check(text);
  },
  completions: async () => {
    const answer = await client().completions.create({ model, prompt: "def f(", max_tokens: 8 });
    check(answer.choices[0].text, answer);
  },
  responses: async () => {
    const asked = { model, input: "Tell me about sequence types.", max_output_tokens: 20 };
    check((await client().responses.create(asked)).output_text);
    const stream = client().responses.stream(asked);
    const final = await stream.finalResponse();
    check(final.output_text, final);
  },
  tools: async () => {
    const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
    const asked = { model, messages: weather, tools, tool_choice: "required", max_tokens: 100 };
    const [call] = (await client().chat.completions.create(asked)).choices[0].message.tool_calls;
    check("city" in JSON.parse(call.function.arguments), call);
    const final = await client().chat.completions.stream(asked).finalChatCompletion();
    check("city" in JSON.parse(final.choices[0].message.tool_calls[0].function.arguments), final);
  },
  structured: async () => {
    const format = { type: "json_schema", json_schema: { name: "city", strict: true, schema: parameters } };
    const asked = { model, messages: weather, response_format: format, max_tokens: 100 };
    const answer = await client().chat.completions.parse(asked);
    check("city" in answer.choices[0].message.parsed, answer);
  },
  "unknown model": () =>
    raises(OpenAI.NotFoundError, () => client().chat.completions.create({ model: "no-such-model", messages })),
  "wrong key": () =>
    raises(OpenAI.AuthenticationError, () => client("wrong").chat.completions.create({ model, messages })),
  "retry after 429": async () => {
    const before = await refused();
    const ask = () => client(limitedKey).chat.completions.create({ model, messages, max_tokens: 60 });
    await Promise.all([ask(), ask()]);
    check((await refused()) > before, "no request was refused");
  },
};

const manifest = readFileSync(`${process.env.CLIENTS_NODE}/node_modules/openai/package.json`, "utf8");
console.log(JSON.stringify({ version: JSON.parse(manifest).version }));
for (const [name, run] of Object.entries(cases)) {
  let error = null;
  try {
    await run();
  } catch (raised) {
    console.error(raised);
    error = `${raised.name}: ${raised.message}`;
  }
  console.log(JSON.stringify({ case: name, error }));
}
