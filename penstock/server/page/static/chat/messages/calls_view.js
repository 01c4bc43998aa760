// Tool calls: what the model asks for, and fields to answer by hand.

import { h, newId } from "../../dom.js";

function format(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still arriving, or not JSON
  }
}

/** Make the view of an answer's calls. With `send`, each gets a field for its result; send(results) goes on. */
export function makeCallsView(calls, send) {
  const fields = [];
  const view = h("div", { class: "calls" }, calls.filter(Boolean).map((call) => {
    const made = h("section", { class: "call", "aria-label": `Call of ${call.name}` },
      h("div", { class: "call-head" }, h("span", { class: "call-mark", text: "calls" }), h("code", { text: call.name })),
      h("pre", { tabindex: "0" }, h("code", { text: format(call.arguments) })));
    if (send) {
      const id = newId("result");
      const field = h("textarea", { id, rows: "2", class: "code-input", placeholder: "What the tool answers: text or JSON" });
      fields.push([call.id, field]);
      made.append(h("div", { class: "field" }, h("label", { for: id, text: `Result of ${call.name}` }), field));
    }
    return made;
  }));
  if (send) {
    view.append(h("button", {
      type: "button", class: "primary", text: calls.length > 1 ? "Send the results" : "Send the result",
      on: { click: () => send(fields.map(([id, field]) => ({ id, content: field.value }))) },
    }));
  }
  return view;
}

export function makeResultsView(results, names) {
  return h("div", { class: "calls" }, results.map(({ id, content }) => h("section", { class: "call", "aria-label": "Result of a call" },
    h("div", { class: "call-head" }, h("span", { class: "call-mark", text: "result of" }), h("code", { text: names.get(id) ?? id })),
    h("pre", { tabindex: "0" }, h("code", { text: format(content) })))));
}
