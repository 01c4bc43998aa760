// The line of figures under an answer.

import { h } from "../../dom.js";
import { VIEWS } from "../../views/index.js";

const whole = new Intl.NumberFormat("en");

export function formatMs(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
}

/** List {text, title} of what is known of an answer. */
export function listFigures(node) {
  const found = [];
  const add = (text, title) => found.push({ text, title });
  const figures = node.figures ?? {};
  if (figures.completion !== undefined) add(`${whole.format(figures.completion)} tokens`, figures.reasoning ? `${whole.format(figures.reasoning)} of them reasoning` : "Tokens of the answer");
  if (figures.per_second) add(`${figures.per_second.toFixed(1)} tokens/s`, "Speed of the answer after its first token");
  if (figures.ttft_ms !== undefined) add(`first after ${formatMs(figures.ttft_ms)}`, describeWait(figures));
  if (figures.prompt !== undefined) add(`${whole.format(figures.cached)} of ${whole.format(figures.prompt)} cached`, "Prompt tokens found in the prefix cache: they were not computed again");
  if (figures.drafts) add(`${whole.format(figures.accepted)} of ${whole.format(figures.drafts)} drafts accepted`, "Draft tokens that speculation proposed, and those that were accepted");
  if (figures.relaxed) add(`${figures.relaxed} schema parts relaxed`, "The server did not enforce them");
  if (node.finish === "length") add("cut at its length", "The answer reached the most tokens allowed, or the end of the context");
  if (node.isForced) add("closed by force", "The budget ran short: the answer was closed in the form that was asked for");
  if (node.finish === "edited") add("edited by hand", "You changed this answer");
  if (node.status === "stopped") add("stopped", "You stopped this answer");
  return found;
}

function describeWait(figures) {
  const parts = ["Time from sending to the first token, seen from this page"];
  if (figures.queue_ms !== undefined) parts.push(`the server queued it for ${formatMs(figures.queue_ms)}`);
  if (figures.prompt_ms !== undefined) parts.push(`the prompt took ${formatMs(figures.prompt_ms)}`);
  return parts.join("; ");
}

export function makeFigures(node) {
  const found = listFigures(node).map(({ text, title }) => h("li", { title, text }));
  const hasTimeline = VIEWS.some((view) => view.name === "requests") && node.answerId && node.figures;
  if (hasTimeline) found.push(h("li", {}, h("a", { href: `#/requests/${encodeURIComponent(node.answerId)}`, text: "timeline", title: "What this request went through" })));
  return h("ul", { class: "figures", "aria-label": "Figures of this answer", hidden: !found.length }, found);
}
