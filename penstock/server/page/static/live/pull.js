// Pulling a model. A download goes on, and is shown again, when its view is left and opened anew.

import { h } from "../dom.js";
import { bytes } from "./words.js";

let job = null; // {name, line}: the download under way, and the last that the server said of it
let watcher = () => {}; // of the view that is open

/** Make the part of a view that pulls; `onDone` is called after each download, while the view is open. */
export function makePull(api, toast, onDone) {
  const input = h("input", { type: "text", "aria-label": "Name of a model to pull", placeholder: "A name, like org/model of the Hugging Face hub", autocomplete: "off", spellcheck: "false" });
  const button = h("button", { type: "button", class: "primary", text: "Pull" });
  const progress = h("progress", { hidden: true, "aria-label": "Download" });
  const said = h("p", { class: "muted", role: "status" });

  function update(ended) {
    button.disabled = progress.hidden = false;
    if (job) {
      button.disabled = true;
      input.value = job.name;
      const { status, completed, total } = job.line;
      if (total) Object.assign(progress, { max: total, value: completed ?? 0 });
      else progress.removeAttribute("value");
      const far = completed === undefined ? "" : total ? `: ${bytes(completed)} of ${bytes(total)}` : `: ${bytes(completed)}`;
      said.textContent = status + far;
      return;
    }
    progress.hidden = true;
    if (!ended) return;
    said.textContent = ended.failure ? "" : `${ended.name} is here. Load it, or use it: it is loaded by the first request.`;
    if (!ended.failure) input.value = "";
    onDone();
  }

  function run() {
    const name = input.value.trim();
    if (name && !job) pull(api, toast, name);
  }

  button.addEventListener("click", run);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") run();
  });
  watcher = update;
  update();
  return {
    element: h("section", { class: "pull" }, h("h2", { text: "Pull a model" }), h("div", { class: "search-line" }, input, button), progress, said),
    stop: () => {
      if (watcher === update) watcher = () => {};
    },
  };
}

async function pull(api, toast, name) {
  let failure = "The server ended the download.";
  job = { name, line: { status: "asking the server" } };
  watcher();
  try {
    for await (const line of api.lines("api/pull", { method: "POST", body: { model: name } })) {
      if (line.error) throw new Error(line.error);
      if (line.status === "success") failure = "";
      job.line = line;
      watcher();
    }
  } catch (error) {
    failure = error.message;
  }
  job = null;
  toast(failure || `${name} is here.`, failure ? "error" : undefined);
  watcher({ name, failure });
}
