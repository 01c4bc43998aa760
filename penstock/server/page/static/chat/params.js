// The parameters of a request: what they are called, what they do, and how they are read from the panel.

const number = (name, label, hint, limits) => ({ name, label, hint, kind: "number", ...limits });

export const SAMPLING = [
  number("temperature", "Temperature", "How freely tokens are chosen. 0 always takes the likeliest; 1 follows the model's own odds; above, answers become wilder.", { min: 0, max: 2, step: 0.05 }),
  number("top_p", "Top p", "Chooses among the likeliest tokens that together have this share. 1 keeps all.", { min: 0.01, max: 1, step: 0.01 }),
  number("top_k", "Top k", "Chooses among this many of the likeliest tokens. 0 keeps all.", { min: 0, max: 1000000, step: 1 }),
  number("min_p", "Min p", "Drops tokens less likely than this share of the likeliest one. 0 drops none.", { min: 0, max: 1, step: 0.01 }),
  number("repetition_penalty", "Repetition penalty", "Above 1, tokens that occurred before become less likely. 1 changes nothing.", { min: 0.1, max: 3, step: 0.01 }),
  number("frequency_penalty", "Frequency penalty", "Makes a token less likely for each time it has occurred in the answer.", { min: -2, max: 2, step: 0.05 }),
  number("presence_penalty", "Presence penalty", "Makes a token less likely once it has occurred in the answer.", { min: -2, max: 2, step: 0.05 }),
  number("seed", "Seed", "The same seed, prompt and parameters give the same answer. Empty: another one each time.", { min: -1, max: Number.MAX_SAFE_INTEGER, step: 1 }),
];

export const LENGTH = [
  number("max_tokens", "Most tokens", "The answer ends after this many. Empty: as many as fit.", { min: 1, max: 2147483647, step: 1 }),
  number("thinking_token_budget", "Thinking budget", "Reasoning is closed after this many tokens, and the answer begins. For models that reason.", { min: 0, max: 2147483647, step: 1 }),
  { name: "stop", label: "Stop at", kind: "lines", hint: "The answer ends before any of these texts; one a line, at most 16." },
];

export const NUMBERS = [...SAMPLING, ...LENGTH].filter((one) => one.kind === "number");
export const FORMS = { text: "Free text", json_object: "Any JSON object", json_schema: "JSON by a schema" };
export const TOOL_CHOICES = { auto: "Where the model sees fit", required: "At least one", none: "None" };
export const MAX_STOPS = 16;
export const NUM_ALTERNATIVES = 8; // log probabilities asked for with each token

export const EXAMPLE_SCHEMA = JSON.stringify({
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" }, likes: { type: "array", items: { type: "string" } } },
  required: ["name", "age"], additionalProperties: false,
}, null, 2);

export const EXAMPLE_TOOLS = JSON.stringify([{
  type: "function",
  function: {
    name: "get_weather", description: "The weather in a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false },
  },
}], null, 2);

/** Return settings with only known fields of the right types; the rest is dropped. */
export function readSettings(given) {
  const found = {};
  if (given === null || typeof given !== "object") return found;
  for (const name of ["model", "system", "stop", "schema", "tools"]) if (typeof given[name] === "string") found[name] = given[name];
  for (const { name } of NUMBERS) if (Number.isFinite(given[name])) found[name] = given[name];
  if (Object.hasOwn(FORMS, given.form)) found.form = given.form;
  if (Object.hasOwn(TOOL_CHOICES, given.tool_choice)) found.tool_choice = given.tool_choice;
  if (typeof given.logprobs === "boolean") found.logprobs = given.logprobs;
  return found;
}

/** Read the tools' JSON: {value} or {error}. */
export function readTools(text) {
  if (!text?.trim()) return { value: null };
  const read = readJson(text);
  if (read.error) return read;
  if (!Array.isArray(read.value)) return { error: "give a list: [{\"type\": \"function\", \"function\": {…}}]" };
  const at = read.value.findIndex((tool) => tool?.type !== "function" || typeof tool.function?.name !== "string" || !tool.function.name);
  return at < 0 ? read : { error: `tool ${at + 1} needs "type": "function" and a "function" with a "name"` };
}

export function readSchema(text) {
  if (!text?.trim()) return { error: "give a JSON schema" };
  const read = readJson(text);
  if (!read.error && (read.value === null || typeof read.value !== "object" || Array.isArray(read.value))) return { error: "a schema is a JSON object" };
  return read;
}

function readJson(text) {
  try {
    return { value: JSON.parse(text) };
  } catch (error) {
    return { error: `not JSON: ${error.message}` };
  }
}

/** Return the fields of a request for these settings; throws an Error in words where one cannot be used.
 *
 * With `hasResults`, the request gives the results of calls: the model has called, and may answer now.
 */
export function makeFields(settings, hasResults = false) {
  const fields = {};
  for (const { name } of NUMBERS) if (settings[name] !== undefined) fields[name] = settings[name];
  const stops = (settings.stop ?? "").split("\n").filter((line) => line !== "");
  if (stops.length) fields.stop = stops.slice(0, MAX_STOPS).map((line) => line.replaceAll("\\n", "\n"));
  if (settings.form === "json_object") fields.response_format = { type: "json_object" };
  if (settings.form === "json_schema") {
    const read = readSchema(settings.schema);
    if (read.error) throw new Error(`The schema cannot be used: ${read.error}.`);
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: read.value } };
  }
  const tools = readTools(settings.tools);
  if (tools.error) throw new Error(`The tools cannot be used: ${tools.error}.`);
  const choice = settings.tool_choice ?? "auto";
  if (tools.value?.length) Object.assign(fields, { tools: tools.value, tool_choice: hasResults && choice === "required" ? "auto" : choice });
  if (settings.logprobs) Object.assign(fields, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  return fields;
}
