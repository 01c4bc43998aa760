// Builds elements. Text only ever becomes text nodes: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element. `props`: class, text, dataset, on (handlers), aria-* and other attributes, or properties. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  setProps(element, props);
  append(element, children);
  return element;
}

const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "open", "selected", "indeterminate", "htmlFor"]);

export function setProps(element, props) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "on") for (const [kind, handler] of Object.entries(value)) element.addEventListener(kind, handler);
    else if (PROPERTIES.has(name)) element[name] = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false) element.setAttribute(name, value);
  }
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

/** Replace the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

// Paths on a 24 × 24 grid, drawn as strokes.
const ICONS = {
  sun: "M12 7a5 5 0 1 0 0 10 5 5 0 0 0 0-10zM12 1.5v2M12 20.5v2M4.6 4.6 6 6M18 18l1.4 1.400M1.5 12h2M20.5 12h2M4.6 19.4 6 18M18 6l1.4-1.4",
  moon: "M20.5 14.5A8.5 8.5 0 0 1 9.5 3.5a8.5 8.5 0 1 0 11 11z",
  auto: "M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18zM12 3v18",
  key: "M15.5 3.5a5 5 0 1 0 0 10 5 5 0 0 0 0-10zM11.5 12 3 20.5M6 17.5l2.5 2.5M9 14.5l2 2",
  help: "M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18zM9.3 9.300a2.8 2.8 0 1 1 4 2.800c-.9.5-1.3 1-1.3 1.900M12 17v.01",
  menu: "M4 7h16M4 12h16M4 17h16",
  sliders: "M4 7h9M17 7h3M15 5v4M4 12h3M11 12h9M9 10v4M4 17h11M19 17h1M17 15v4",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "M5 12.5 10 17.5 19.5 7",
  cross: "M6 6l12 12M18 6 6 18",
  pencil: "M4 20h4L19.5 8.5l-4-4L4 16zM13.5 6.5l4 4",
  again: "M19.5 12a7.5 7.5 0 1 1-2.3-5.400L20 9M20 4v5h-5",
  left: "M14.5 6 8.5 12l6 6",
  right: "M9.5 6l6 6-6 6",
  down: "M6 9.5l6 6 6-6",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10.5 11v5.5M13.5 11v5.5",
  search: "M10.5 4a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13zM15.5 15.5 20.5 20.5",
  export: "M12 15V4M8 8l4-4 4 4M5 13v7h14v-7",
  import: "M12 4v11M8 11l4 4 4-4M5 13v7h14v-7",
  chart: "M4 20V4M4 20h16M8 16v-4M12 16V8M16 16v-6",
};

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, value] of Object.entries({ viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }))
    svg.setAttribute(key, value);
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** Make a button that shows an icon; `label` is read aloud and shown on hover. */
export function iconButton(name, label, onclick, props = {}) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, on: { click: onclick }, ...props }, icon(name));
}

let numIds = 0;
export function newId(prefix = "id") {
  numIds += 1;
  return `${prefix}-${numIds}`;
}

/** Show a dialog; resolves with its return value once it is closed, "" if it was dismissed. */
export function showDialog(dialog) {
  const before = document.activeElement;
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (before instanceof HTMLElement && before.isConnected) before.focus();
      resolve(dialog.returnValue);
    });
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) dialog.close("");
    });
  });
}

/** Ask a yes or no question. */
export async function confirmDialog(question, yes) {
  const dialog = h("dialog", { class: "dialog", "aria-label": question });
  dialog.append(
    h("p", { text: question }),
    h("div", { class: "dialog-buttons" },
      h("button", { type: "button", text: "Cancel", on: { click: () => dialog.close("") } }),
      h("button", { type: "button", class: "primary", text: yes, on: { click: () => dialog.close("yes") } })),
  );
  return (await showDialog(dialog)) === "yes";
}
