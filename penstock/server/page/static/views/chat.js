// The chat.

import { h } from "../dom.js";

export async function mount(element, { api }) {
  const models = await api.get("v1/models");
  element.append(h("p", { class: "notice", text: models.data.map((model) => model.id).join(", ") }));
  return () => {};
}
