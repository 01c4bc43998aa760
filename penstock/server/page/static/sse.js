// Reads server-sent events from the body of a response, in time linear in its length.

const MAX_EVENT_CHARS = 64 << 20;

/** Yield {event, data} of each event; ends where the body ends. Leaving the loop cancels the request. */
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export class EventParser {
  #pieces = []; // of a line that has not ended
  #numChars = 0;
  #event = "";
  #data = [];

  /** Add text; yield the events that it completes. Lines end with \n or \r\n. */
  *push(text) {
    let begin = 0;
    for (let end = text.indexOf("\n"); end >= 0; end = text.indexOf("\n", begin)) {
      this.#pieces.push(text.slice(begin, end));
      begin = end + 1;
      const line = this.#pieces.join("");
      this.#pieces = [];
      yield* this.#take(line.endsWith("\r") ? line.slice(0, -1) : line);
    }
    if (begin < text.length) this.#pieces.push(text.slice(begin));
    this.#numChars = this.#numChars + text.length - begin;
    if (this.#numChars > MAX_EVENT_CHARS) throw new Error("an event of the stream is too long");
    if (!this.#pieces.length) this.#numChars = 0;
  }

  *#take(line) {
    if (line === "") {
      if (this.#data.length) yield { event: this.#event || "message", data: this.#data.join("\n") };
      this.#event = "";
      this.#data = [];
    } else if (line.startsWith("data:")) this.#data.push(line.slice(line[5] === " " ? 6 : 5));
    else if (line.startsWith("event:")) this.#event = line.slice(6).trim();
  }
}
