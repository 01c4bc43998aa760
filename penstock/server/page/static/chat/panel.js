// The panel of parameters: model, system prompt, sampling, form of the answer, tools.

import { EXAMPLE_SCHEMA, EXAMPLE_TOOLS, FORMS, LENGTH, readSchema, readTools, SAMPLING, TOOL_CHOICES } from "./params.js";
import { fill, h, iconButton, newId, setProps } from "../dom.js";

export class Panel {
  #defaults = new Map(); // model → Map of name → {value, why}

  constructor(session, { onclose }) {
    this.session = session;
    this.fields = h("div", { class: "panel-fields" });
    this.help = h("p", { class: "panel-help muted", "aria-hidden": "true" });
    this.element = h("aside", { class: "chat-panel", "aria-label": "Parameters" },
      h("div", { class: "panel-head" }, h("h2", { text: "Parameters" }), iconButton("cross", "Close the parameters", onclose)), this.fields, this.help);
    for (const kind of ["focusin", "mouseover"]) this.fields.addEventListener(kind, (event) => this.#explain(event.target));
    this.#explain(null);
    this.readDefaults();
    this.show();
  }

  /** Learn what the server uses where a parameter is empty; only the admin is told. */
  async readDefaults() {
    const key = this.session.models.map((model) => model.id).join();
    if (this.readFor === key) return;
    this.readFor = key;
    try {
      const { models } = await this.session.api.get("info");
      if (!models.some((one) => one.defaults?.length)) this.readFor = null; // a model that loads has told nothing yet
      for (const { name, defaults } of models) this.#defaults.set(name, new Map((defaults ?? []).map((one) => [one.name, one])));
      this.show();
    } catch {
      this.readFor = null; // without them the fields say "default"
    }
  }

  show() {
    if (this.element.contains(document.activeElement)) return;
    const { session } = this;
    fill(this.fields,
      this.#makeModel(),
      this.#makeArea("system", "System prompt", "Said before the conversation: who the model is, and how it answers.", { rows: "4", placeholder: "None" }),
      h("details", { class: "group", open: true }, h("summary", { text: "Sampling" }), SAMPLING.map((one) => this.#makeNumber(one)),
        this.#makeCheck("logprobs", "Keep log probabilities", "Shows what else each token could have been. Costs some speed.")),
      h("details", { class: "group" }, h("summary", { text: "Length" }), LENGTH.map((one) => (one.kind === "number" ? this.#makeNumber(one) : this.#makeStops(one)))),
      h("details", { class: "group", open: Boolean(session.conversation.settings.form) }, h("summary", { text: "Form of the answer" }), this.#makeForm()),
      h("details", { class: "group", open: Boolean(session.conversation.settings.tools) }, h("summary", { text: "Tools" }), this.#makeTools()));
  }

  /** Show what a parameter means, where it moves nothing. Screen readers have it as the field's description. */
  #explain(target) {
    const hint = target?.closest?.(".param")?.querySelector(".hint")?.textContent;
    if (hint || target === null) this.help.textContent = hint ?? "Point at a parameter to read what it does.";
  }

  get #settings() {
    return this.session.conversation.settings;
  }

  #makeField(label, hint, control, extra = null) {
    const [id, hintId] = [newId("param"), newId("hint")];
    setProps(control, { id, "aria-describedby": hintId });
    return h("div", { class: "field param" }, h("label", { for: id, text: label }), control, h("p", { class: "hint", id: hintId, text: hint, hidden: true }), extra);
  }

  #makeModel() {
    const { session } = this;
    const select = h("select", { on: { change: () => session.set("model", select.value) } },
      session.models.map((model) => h("option", { value: model.id, text: model.loaded ? model.id : `${model.id} (loads when asked)` })));
    if (session.model) select.value = session.model.id;
    return this.#makeField("Model", "Who answers next. A branch may have answers of several models.", select);
  }

  #makeArea(name, label, hint, props, extra = null) {
    const area = h("textarea", { spellcheck: "false", value: this.#settings[name] ?? "", on: { change: () => this.session.set(name, area.value) }, ...props });
    return this.#makeField(label, hint, area, extra);
  }

  #makeNumber({ name, label, hint, min, max, step }) {
    const known = this.#defaults.get(this.session.model?.id)?.get(name);
    const input = h("input", {
      type: "number", min, max, step, inputmode: step < 1 ? "decimal" : "numeric", value: this.#settings[name] ?? "",
      placeholder: known && known.value !== null ? `${known.value}` : "default",
    });
    const fault = h("p", { class: "fault", role: "alert", hidden: true });
    input.addEventListener("change", () => {
      const value = input.value === "" ? undefined : Number(input.value);
      const isFine = !input.validity.badInput && (value === undefined || (value >= min && value <= max && (step < 1 || Number.isInteger(value))));
      fault.hidden = isFine;
      fault.textContent = isFine ? "" : `Give ${step < 1 ? "a number" : "a whole number"} from ${min} to ${max}.`;
      input.setAttribute("aria-invalid", String(!isFine));
      if (isFine) this.session.set(name, value);
    });
    const field = this.#makeField(label, hint, input, fault);
    field.classList.add("row");
    return field;
  }

  #makeCheck(name, label, hint) {
    const input = h("input", { type: "checkbox", checked: Boolean(this.#settings[name]), on: { change: () => this.session.set(name, input.checked || undefined) } });
    const field = this.#makeField(label, hint, input);
    field.classList.add("row");
    return field;
  }

  #makeStops({ name, label, hint }) {
    return this.#makeArea(name, label, hint, { rows: "2", placeholder: "None", class: "code-input" });
  }

  #makeForm() {
    const schema = h("div", {}, this.#makeJson("schema", "Schema", "A JSON schema. The server holds the answer to it token by token.", readSchema, EXAMPLE_SCHEMA));
    const update = () => { schema.hidden = select.value !== "json_schema"; };
    const select = h("select", { on: { change: () => {
      this.session.set("form", select.value === "text" ? undefined : select.value);
      update();
    } } }, Object.entries(FORMS).map(([value, text]) => h("option", { value, text })));
    select.value = this.#settings.form ?? "text";
    update();
    return [this.#makeField("Answers are", "Free text, or JSON that is checked here while it arrives.", select), schema];
  }

  #makeTools() {
    const select = h("select", { on: { change: () => this.session.set("tool_choice", select.value) } },
      Object.entries(TOOL_CHOICES).map(([value, text]) => h("option", { value, text })));
    select.value = this.#settings.tool_choice ?? "auto";
    return [
      this.#makeJson("tools", "Tools", "What the model may call. You give the results by hand.", readTools, EXAMPLE_TOOLS),
      this.#makeField("Calls", "Whether the model has to call a tool. Once it has the results, it may answer.", select),
    ];
  }

  /** A field of JSON with a mark that says if it can be used, and a button for an example. */
  #makeJson(name, label, hint, read, example) {
    const mark = h("span", { class: "mark small", role: "status" });
    const area = h("textarea", { rows: "8", spellcheck: "false", class: "code-input", value: this.#settings[name] ?? "" });
    const judge = () => {
      const { error } = area.value.trim() ? read(area.value) : { error: null };
      mark.className = `mark small ${error ? "bad" : "good"}`;
      mark.textContent = error ?? "can be used";
      mark.hidden = !area.value.trim();
      area.setAttribute("aria-invalid", String(Boolean(error)));
    };
    const keep = () => this.session.set(name, area.value);
    area.addEventListener("input", judge);
    area.addEventListener("change", keep);
    judge();
    const insert = h("button", { type: "button", class: "link", text: "Insert an example", on: { click: () => {
      area.value = example;
      judge();
      keep();
    } } });
    return this.#makeField(label, hint, area, h("div", { class: "json-foot" }, mark, insert));
  }
}
