// The past of all backends, as the charts show it: as many points as the gateway keeps, and no more.

const MOST_POINTS = 1_000;
const keyOf = (model, backend) => `${model}\n${backend}`;

export class Past {
  constructor() {
    this.series = [];
    this.atS = [];
    this.backends = new Map();
    this.points = 360;
  }

  /** Takes the history, which replaces what is known. */
  load(history) {
    this.series = history.series;
    this.atS = history.at_s.slice(-MOST_POINTS);
    this.backends = new Map(history.backends.map((each) => [keyOf(each.model, each.backend), each.values]));
    this.points = Math.min(MOST_POINTS, Math.max(this.points, this.atS.length));
  }

  /** Appends the newest points of a snapshot, and returns whether there were any. */
  append(snapshot) {
    const atS = snapshot.points_at_s;
    if (this.series.length === 0 || atS <= (this.atS.at(-1) ?? 0)) return false;
    const seen = new Set();
    for (const model of snapshot.models) {
      for (const backend of model.backends) {
        const key = keyOf(model.name, backend.name);
        seen.add(key);
        let values = this.backends.get(key);
        if (values === undefined) {
          values = this.series.map(() => new Array(this.atS.length).fill(null));
          this.backends.set(key, values);
        }
        values.forEach((list, index) => list.push(backend.point[index] ?? null));
      }
    }
    for (const key of this.backends.keys()) if (!seen.has(key)) this.backends.delete(key);
    this.atS.push(atS);
    const surplus = this.atS.length - this.points;
    if (surplus > 0) {
      this.atS.splice(0, surplus);
      for (const values of this.backends.values()) for (const list of values) list.splice(0, surplus);
    }
    return true;
  }

  /** Returns one series of a backend; its length is that of `atS`. */
  of(model, backend, series) {
    const values = this.backends.get(keyOf(model, backend));
    return values?.[this.series.indexOf(series)] ?? new Array(this.atS.length).fill(null);
  }
}
