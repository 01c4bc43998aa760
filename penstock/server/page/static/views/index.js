// The views of the page, in the order of the bar. A line here is all that a view needs to be shown.
//
// `load` imports a module that exports mount(element, context), which returns a function that unmounts.
// context: api, keys, store, toast, and route:
//   route.parts        what follows the view's name in the address: #/live/ID → ["ID"]
//   route.go(path)     go to "#/" + path
//   route.watch(call)  call with the new parts instead of mounting again when only they change

export const VIEWS = [
  { name: "chat", title: "Chat", load: () => import("./chat.js") },
  { name: "live", title: "Live", load: () => import("./live.js") },
  { name: "requests", title: "Requests", load: () => import("./request.js") },
  { name: "models", title: "Models", load: () => import("./models.js") },
];
