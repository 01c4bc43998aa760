// Requests to the server this page came from: JSON, and server-sent events over fetch, which can carry a key.

import { keys } from "./keys.js";
import { readEvents } from "./sse.js";

// the admin's alone; of the other admin/… a tenant sees its part, and the admin all
const ADMIN_PATHS = /^(admin\/(?!requests\/)|metrics$|api\/(pull|delete)$)/;
const BASE = new URL(".", document.baseURI); // the page may be served below another path

/** What the server said against a request, in words; `status` is 0 where it could not be reached. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfterS = null } = {}) {
    super(message);
    Object.assign(this, { name: "ApiError", status, code, param, retryAfterS });
  }
}

/** Send a request; asks for a key when the server wants one, unless `asks` is false. `signal` aborts. Resolves with the Response. */
export async function send(path, { method = "GET", body, signal, headers = {}, asks = true } = {}) {
  for (;;) {
    const isAdmin = ADMIN_PATHS.test(path) || (path.startsWith("admin/") && keys.get("admin") !== "");
    const key = (isAdmin && keys.get("admin")) || keys.get("api") || keys.get("admin");
    const response = await reach(path, {
      method, signal, cache: "no-store", redirect: "error",
      headers: {
        ...(body === undefined ? {} : { "Content-Type": "application/json" }),
        ...(key ? { Authorization: `Bearer ${key}` } : {}),
        ...headers,
      },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    if (response.ok) return response;
    const error = await readError(response);
    if (!asks || !(await getKey(error, isAdmin, key))) throw error;
  }
}

async function reach(path, options) {
  try {
    return await fetch(new URL(path, BASE), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it running, and is the network up?");
  }
}

async function readError(response) {
  const retryAfterS = Number(response.headers.get("Retry-After")) || null;
  let told = null;
  try {
    told = await response.json();
  } catch {
    // not of this server: a proxy's page, perhaps
  }
  const said = told?.error ?? told;
  const message = (typeof said === "string" ? said : said?.message) ?? `The server answered ${response.status} ${response.statusText}.`;
  return new ApiError(message, { status: response.status, code: said?.code ?? null, param: said?.param ?? null, retryAfterS });
}

/** True if the error was about a key and there is another one now. */
async function getKey(error, isAdmin, used) {
  const isKey = error.status === 401;
  if (!isKey && !(error.status === 403 && error.code === "admin_only")) return false;
  const kind = isAdmin ? "admin" : "api";
  if (keys.get(kind) && keys.get(kind) !== used) return true; // given meanwhile
  const refused = used && isKey ? "The server does not know that key." : "";
  return keys.ask(kind, refused);
}

export const api = {
  async get(path, options = {}) {
    return (await send(path, options)).json();
  },

  async post(path, body, options = {}) {
    return (await send(path, { ...options, method: "POST", body })).json();
  },

  async delete(path, body, options = {}) {
    return (await send(path, { ...options, method: "DELETE", body })).json();
  },

  /** Yield the events of a stream as {event, data}, with `data` parsed; `data: [DONE]` ends it.
   *
   * An error within the stream is thrown. `onOpen` is called with the Response. A stream that breaks off is an
   * ApiError with the code "broken_stream".
   */
  async *stream(path, { onOpen = () => {}, ...options } = {}) {
    const response = await send(path, { headers: { Accept: "text/event-stream" }, ...options });
    onOpen(response);
    try {
      for await (const { event, data } of readEvents(response.body)) {
        if (data === "[DONE]") return;
        const value = parse(data);
        if (value?.error) throw makeStreamError(value.error);
        yield { event, data: value };
      }
    } catch (error) {
      if (error instanceof ApiError || error.name === "AbortError") throw error;
      throw new ApiError("The connection to the server was lost.", { code: "broken_stream" });
    }
  },

  /** Yield the lines of a stream of JSON lines, as Ollama's routes send them. */
  async *lines(path, options = {}) {
    const response = await send(path, options);
    let rest = "";
    for await (const text of readText(response.body)) {
      const lines = (rest + text).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.trim()) yield parse(line);
    }
    if (rest.trim()) yield parse(rest);
  },
};

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new ApiError("The server sent something that is not JSON.", { code: "bad_stream" });
  }
}

function makeStreamError(error) {
  if (typeof error === "string") return new ApiError(error);
  return new ApiError(error.message ?? "The server failed.", { code: error.code ?? null, param: error.param ?? null });
}

async function* readText(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
