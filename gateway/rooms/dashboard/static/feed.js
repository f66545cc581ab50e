// The live data: asked for each second, and less often where there is no answer.

const PAUSE_MS = 1_000;
const LONGEST_PAUSE_MS = 30_000;
const TIMEOUT_MS = 10_000;

/** What the gateway answered instead of data. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Returns what the gateway answers; raises `Refused` with its message. */
export async function ask(path, options = {}) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS), ...options });
  if (answer.ok) return answer.json();
  let message = `The gateway answered ${answer.status}.`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // not an error of the gateway itself
  }
  throw new Refused(answer.status, message);
}

export class Feed {
  /**
   * `on.history(data)` and `on.snapshot(data)` get the data; `on.state(state, untilMs)` gets `connecting`, `live`, or
   * `lost` with the time (of `performance.now()`) of the next attempt; `on.refused(status, message)` ends it until `open`
   * is called again.
   */
  constructor(path, headers, on) {
    this.path = path;
    this.headers = headers;
    this.on = on;
    this.run = 0; // grows with each `open` and `close`
    this.isClosed = true;
    this.timer = 0;
    this.pauseMs = PAUSE_MS;
  }

  /** Asks for all data now, also while it waits for its next attempt. */
  open() {
    this.close();
    this.isClosed = false;
    this.on.state("connecting", 0);
    this.#next(this.run, true);
  }

  close() {
    this.run += 1;
    this.isClosed = true;
    clearTimeout(this.timer);
  }

  async #next(run, withPast) {
    try {
      if (withPast) this.#take(run, "history", await ask(`${this.path}/history`, { headers: this.headers() }));
      this.#take(run, "snapshot", await ask(`${this.path}/snapshot`, { headers: this.headers() }));
      this.pauseMs = PAUSE_MS;
      this.#later(run, PAUSE_MS, false);
    } catch (error) {
      if (run !== this.run) return;
      if (error instanceof Refused && error.status < 500) {
        this.close();
        this.on.refused(error.status, error.message);
        return;
      }
      const pause = this.pauseMs * (0.75 + 0.5 * Math.random()); // so that pages do not come back all at once
      this.pauseMs = Math.min(2 * this.pauseMs, LONGEST_PAUSE_MS);
      this.on.state("lost", performance.now() + pause);
      this.#later(run, pause, true);
    }
  }

  #take(run, name, data) {
    if (run === this.run) this.on[name](data);
  }

  #later(run, pause, withPast) {
    if (run === this.run) this.timer = setTimeout(() => this.#next(run, withPast), pause);
  }
}
