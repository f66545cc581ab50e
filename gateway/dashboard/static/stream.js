// The live data: events of a stream that is opened again when it breaks.

const SILENT_MS = 10_000; // the gateway sends something each second
const FIRST_PAUSE_MS = 1_000;
const LONGEST_PAUSE_MS = 30_000;
const MOST_CHARACTERS = 8 << 20; // of one event

/** What the gateway answered instead of a stream. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Returns the message of an answer that is an error. */
export async function errorOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The gateway answered ${answer.status}.`;
  }
}

export class Stream {
  /**
   * `on.event(name, data)` gets each event; `on.state(state, untilMs)` gets `connecting`, `live`, or `lost` with the time
   * (of `performance.now()`) of the next attempt; `on.refused(status, message)` ends it until `open` is called again.
   */
  constructor(url, headers, on) {
    this.url = url;
    this.headers = headers;
    this.on = on;
    this.abort = null;
    this.timer = 0;
    this.pauseMs = FIRST_PAUSE_MS;
  }

  /** Opens the stream now, also while it waits for its next attempt. */
  open() {
    this.close();
    const abort = new AbortController();
    this.abort = abort;
    this.on.state("connecting", 0);
    this.#read(abort).then(() => "", (error) => error).then((error) => {
      if (this.abort !== abort) return; // closed, or opened again
      abort.abort();
      if (error instanceof Refused && error.status < 500) this.on.refused(error.status, error.message);
      else this.#wait();
    });
  }

  get isClosed() {
    return this.abort === null;
  }

  close() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
  }

  #wait() {
    const pause = this.pauseMs * (0.75 + 0.5 * Math.random()); // so that pages do not come back all at once
    this.pauseMs = Math.min(2 * this.pauseMs, LONGEST_PAUSE_MS);
    this.timer = setTimeout(() => this.open(), pause);
    this.on.state("lost", performance.now() + pause);
  }

  async #read(abort) {
    let watch = setTimeout(() => abort.abort(), SILENT_MS);
    try {
      const options = { headers: this.headers(), signal: abort.signal, cache: "no-store" };
      const answer = await fetch(this.url, options);
      if (!answer.ok) throw new Refused(answer.status, await errorOf(answer));
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        clearTimeout(watch);
        if (done) return;
        watch = setTimeout(() => abort.abort(), SILENT_MS);
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        if (rest.length > MOST_CHARACTERS) throw new Error("an event is too long");
        for (const event of events) this.#take(event);
      }
    } finally {
      clearTimeout(watch);
    }
  }

  #take(event) {
    let name = "message";
    let data = "";
    for (const line of event.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (data === "") return; // a comment
    this.pauseMs = FIRST_PAUSE_MS;
    this.on.event(name, JSON.parse(data));
  }
}
