// One request for an answer: makes its body from the branch that is shown, and enters what streams back.

import { MAX_KEPT_TOKENS } from "./limits.js";
import { makeFields } from "./params.js";

/** Return the messages of a branch as the API takes them. */
export function makeMessages(system, nodes) {
  const messages = system?.trim() ? [{ role: "system", content: system }] : [];
  for (const node of nodes) {
    if (node.role === "user") messages.push({ role: "user", content: node.content });
    else if (node.role === "tool")
      for (const { id, content } of node.results) messages.push({ role: "tool", tool_call_id: id, content });
    else if (node.content || node.toolCalls?.length) messages.push(makeAnswer(node));
  }
  return messages;
}

function makeAnswer(node) {
  const message = { role: "assistant", content: node.content };
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (node.toolCalls?.length)
    message.tool_calls = node.toolCalls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments || "{}" } }));
  return message;
}

/** Stream an answer into `node`. `nodes` is the branch above it; with `goesOn`, what the node has is continued.
 *
 * `changed(kind, text)` is called for each piece: "content", "reasoning", "calls", "tokens", "figures".
 */
export async function streamAnswer(api, node, { nodes, settings, model, goesOn, signal, changed }) {
  const begun = performance.now();
  const body = {
    model,
    messages: makeMessages(settings.system, goesOn ? [...nodes, node] : nodes),
    stream: true, stream_options: { include_usage: true },
    ...makeFields(settings, nodes.at(-1)?.role === "tool"),
    ...(goesOn ? { add_generation_prompt: false, continue_final_message: true } : {}),
  };
  const figures = {};
  if (goesOn) dropLogprobs(node);
  try {
    for await (const { data } of api.stream("v1/chat/completions", { method: "POST", body, signal })) {
      node.answerId = data.id;
      const choice = data.choices?.[0];
      if (choice) takeChoice(node, choice, changed);
      if (figures.ttft_ms === undefined && choice && hasToken(choice)) figures.ttft_ms = performance.now() - begun;
      if (data.relaxed) figures.relaxed = data.relaxed.length;
      if (data.usage) Object.assign(figures, readUsage(data.usage));
      if (data.timings) Object.assign(figures, readTimings(data.timings));
    }
  } catch (error) {
    if (figures.ttft_ms !== undefined) node.figures = figures; // what is known of an answer that was cut off
    throw error;
  }
  if (node.finish === undefined) throw Object.assign(new Error("The connection to the server was lost."), { code: "broken_stream" });
  node.figures = figures;
  changed("figures", "");
}

function hasToken({ delta, finish_reason: finish }) {
  return Boolean(delta?.content || delta?.reasoning_content || delta?.reasoning || delta?.tool_calls || finish);
}

function takeChoice(node, { delta, logprobs, finish_reason: finish, forced_closing: isForced }, changed) {
  const reasoning = delta?.reasoning_content ?? delta?.reasoning;
  if (reasoning) {
    node.reasoning = (node.reasoning ?? "") + reasoning;
    changed("reasoning", reasoning);
  }
  if (delta?.content) {
    node.content += delta.content;
    changed("content", delta.content);
  }
  for (const call of delta?.tool_calls ?? []) takeCall(node, call, changed);
  if (logprobs?.content?.length) takeTokens(node, logprobs.content, changed);
  if (finish) node.finish = finish;
  if (isForced) node.isForced = true;
}

function takeCall(node, { index, id, function: called }, changed) {
  node.toolCalls ??= [];
  const call = (node.toolCalls[index] ??= { id: id ?? `call-${index}`, name: "", arguments: "" });
  if (called?.name) call.name = called.name;
  if (called?.arguments) call.arguments += called.arguments;
  changed("calls", "");
}

/** Keep tokens as [text, log probability, [[text, log probability], …]]. */
function takeTokens(node, entries, changed) {
  node.tokens ??= [];
  for (const { token, logprob, top_logprobs: top } of entries) {
    if (node.tokens.length < MAX_KEPT_TOKENS) node.tokens.push([token, logprob, (top ?? []).map((one) => [one.token, one.logprob])]);
  }
  changed("tokens", "");
}

function dropLogprobs(node) {
  delete node.tokens; // they would not be those of the whole text
  delete node.figures;
  delete node.finish;
}

function readUsage(usage) {
  return {
    prompt: usage.prompt_tokens,
    completion: usage.completion_tokens,
    cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
    reasoning: usage.completion_tokens_details?.reasoning_tokens ?? 0,
  };
}

function readTimings(timings) {
  return {
    per_second: timings.predicted_per_second,
    queue_ms: timings.queue_ms,
    prompt_ms: timings.prompt_ms,
    drafts: timings.draft_n ?? 0,
    accepted: timings.draft_n_accepted ?? 0,
  };
}
