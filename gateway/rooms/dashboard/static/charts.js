// Charts over time, each with the same figures as a table.

/* global uPlot */
import { keep, shown } from "./address.js";
import { byId, follow, h, setAttribute, setHidden, setText } from "./dom.js";
import { clock, duration, fixed, number, percent } from "./format.js";
import { header, named, swatch } from "./methods.js";

const HEIGHT_PX = 168;
const RANGES = [5, 15, 30]; // minutes
const USUAL = 15;
const LEAST_SHOWN = 2; // minutes, where the past is shorter than the range
const CHARTS = [
  { title: "Share of requests", series: "requests_per_s", format: percent, stacked: true },
  { title: "Requests in flight", series: "in_flight", format: number },
  { title: "Tokens per step", series: "tokens_per_step", format: fixed },
  { title: "Seconds per step", series: "step_s", format: duration },
  { title: "TTFT, 95th percentile", series: "ttft_p95_s", format: duration },
  { title: "TPOT, 95th percentile", series: "tpot_p95_s", format: duration },
];

const colorOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Charts {
  constructor(past) {
    this.past = past;
    this.minutes = RANGES.find((minutes) => String(minutes) === shown("minutes")) ?? USUAL;
    this.hiddenBackends = new Set();
    this.asTables = false;
    this.model = null;
    this.marks = new Map();
    this.charts = CHARTS.map((spec) => new TimeChart(spec));
    byId("charts").append(...this.charts.map((chart) => chart.figure));
    byId("range").append(...RANGES.map((minutes) => this.#rangeChoice(minutes)));
    byId("tables").addEventListener("click", () => {
      this.asTables = !this.asTables;
      setAttribute(byId("tables"), "aria-pressed", String(this.asTables));
      this.draw();
    });
    const again = () => {
      for (const chart of this.charts) chart.forget();
      this.draw();
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    new ResizeObserver(() => this.draw()).observe(byId("charts"));
  }

  show(model, marks) {
    this.model = model;
    this.marks = marks;
    follow(
      byId("legend"),
      model.backends,
      (backend) => `${backend.name} ${backend.method}`,
      (backend) => this.#legendItem(backend.name),
      (item, backend) => setAttribute(item, "aria-pressed", String(!this.hiddenBackends.has(backend.name))),
    );
    this.draw();
  }

  /** Draws what is known; called when there is a new point, and after each change of what is to be shown. */
  draw() {
    if (this.model === null || this.past.atS.length === 0) return;
    const names = this.model.backends.map((backend) => backend.name).filter((name) => !this.hiddenBackends.has(name));
    const newest = this.past.atS.at(-1);
    const from = Math.max(newest - 60 * this.minutes, Math.min(this.past.atS[0], newest - 60 * LEAST_SHOWN));
    const first = Math.max(0, this.past.atS.findIndex((atS) => atS >= from));
    const view = { atS: this.past.atS.slice(first), from, to: newest, minutes: this.minutes };
    for (const chart of this.charts) {
      const values = names.map((name) => this.past.of(this.model.name, name, chart.spec.series).slice(first));
      chart.draw(view, names, values, this.marks, this.asTables);
    }
  }

  #rangeChoice(minutes) {
    const input = h("input", { type: "radio", name: "range", value: minutes, checked: minutes === this.minutes });
    input.addEventListener("change", () => {
      this.minutes = minutes;
      keep("minutes", String(minutes), String(USUAL));
      this.draw();
    });
    return h("label", {}, input, ` ${minutes} min`);
  }

  #legendItem(name) {
    const toggle = () => {
      if (!this.hiddenBackends.delete(name)) this.hiddenBackends.add(name);
      this.show(this.model, this.marks);
    };
    return h("button", { type: "button", "aria-pressed": "true", on: { click: toggle } }, swatch(this.marks.get(name)), h("span", { class: "cut", title: name }, name));
  }
}

class TimeChart {
  constructor(spec) {
    this.spec = spec;
    this.plot = null;
    this.drawn = "";
    this.readout = h("p", { class: "readout", "aria-hidden": "true" });
    this.canvas = h("div", { class: "canvas", role: "img" });
    this.table = h("table", { hidden: true });
    this.figure = h("figure", { class: "card" }, h("figcaption", {}, spec.title), this.canvas, this.readout, this.table);
  }

  forget() {
    this.plot?.destroy();
    this.plot = null;
  }

  draw(view, names, given, marks, asTable) {
    const values = this.spec.stacked ? shares(given) : given;
    this.values = values;
    this.names = names;
    const newest = names.map((name, index) => `${name} ${this.spec.format(values[index].at(-1))}`);
    setAttribute(this.canvas, "aria-label", `${this.spec.title}, the last ${view.minutes} minutes; now: ${newest.join(", ")}`);
    setHidden(this.canvas, asTable);
    setHidden(this.table, !asTable);
    this.isEmpty = values.every((row) => row.every((value) => value === null));
    setAttribute(this.canvas, "data-empty", this.isEmpty ? "true" : null);
    if (asTable) this.#tabulate(names, values, marks);
    else this.#plot(view, names, values, marks);
  }

  #plot(view, names, values, marks) {
    const width = this.canvas.clientWidth;
    if (width === 0) return;
    const wanted = JSON.stringify(names.map((name) => [name, marks.get(name)]));
    if (this.plot !== null && this.drawn !== wanted) this.forget();
    const data = [view.atS, ...(this.spec.stacked ? stack(values) : values)];
    if (this.plot === null) {
      this.drawn = wanted;
      this.plot = new uPlot(this.#options(width, names, marks), data, this.canvas);
    } else {
      if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT_PX });
      this.plot.setData(data, false);
    }
    this.plot.setScale("x", { min: view.from, max: view.to });
  }

  #options(width, names, marks) {
    const [soft, line, card] = [colorOf("--soft"), colorOf("--line"), colorOf("--card")];
    const { stacked, format } = this.spec;
    const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const series = names.map((name) => {
      const { color, dash } = marks.get(name);
      const paint = colorOf(color);
      if (stacked) return { stroke: card, width: 1, fill: dash.length ? `${paint}a0` : paint, points: { show: false } };
      return { stroke: paint, width: 2, dash, spanGaps: false, points: { show: false } };
    });
    return {
      width,
      height: HEIGHT_PX,
      legend: { show: false },
      padding: [8, 22, 0, 0],
      cursor: { sync: { key: "time" }, drag: { x: false, y: false }, points: { show: !stacked, size: 6 }, y: false },
      scales: { x: { time: true, auto: false }, y: { range: stacked ? [0, 1] : (_, low, high) => [0, high > 0 ? 1.1 * high : 1] } },
      axes: [
        { ...axis, size: 26, space: 70, values: (_, splits) => timeLabels(splits) },
        { ...axis, size: 54, space: 30, values: (_, splits) => splits.map((value) => (value === 0 ? "0" : this.isEmpty ? "" : format(value))) },
      ],
      bands: stacked ? names.slice(1).map((_, index) => ({ series: [index + 2, index + 1], fill: series[index + 1].fill })) : [],
      series: [{}, ...series],
      hooks: { setCursor: [(plot) => this.#read(plot)] },
    };
  }

  #read(plot) {
    const index = plot.cursor.idx;
    const isOver = index !== null && index !== undefined && plot.cursor.left >= 0;
    const texts = isOver ? this.names.map((name, row) => [name, this.spec.format(this.values[row][index])]) : [];
    if (isOver) texts.unshift(["", clock(plot.data[0][index])]);
    this.readout.replaceChildren(...texts.map(([name, text]) => h("span", {}, name ? h("b", {}, name) : null, ` ${text}`)));
    this.readout.style.minHeight = `${Math.max(parseFloat(this.readout.style.minHeight) || 0, this.readout.offsetHeight)}px`; // so that the page stands still
  }

  #tabulate(names, values, marks) {
    const figures = names.map((name, index) => {
      const known = values[index].filter((value) => value !== null);
      const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
      const ends = known.length ? [Math.min(...known), Math.max(...known)] : [null, null];
      return [name, values[index].at(-1), mean, ...ends];
    });
    const rows = figures.map(([name, ...row]) =>
      h("tr", {}, h("th", { scope: "row" }, named(name, marks.get(name))), ...row.map((value) => h("td", {}, this.spec.format(value)))),
    );
    this.table.replaceChildren(...header(this.spec.title, ["Backend", "Now", "Mean", "Lowest", "Highest"]), h("tbody", {}, ...rows));
  }
}

/** Returns times of day, with seconds where the ticks are less than a minute apart. */
function timeLabels(splits) {
  const characters = splits.length > 1 && splits[1] - splits[0] < 60 ? 8 : 5;
  return splits.map((atS) => clock(atS).slice(0, characters));
}

/** Returns each value as its share of the sum of all at that time. */
function shares(values) {
  const sums = (values[0] ?? []).map((_, at) => values.reduce((sum, row) => sum + (row[at] ?? 0), 0));
  return values.map((row) => row.map((value, at) => (sums[at] > 0 ? (value ?? 0) / sums[at] : null)));
}

/** Returns the running sums of shares, by backend. */
function stack(values) {
  const sums = (values[0] ?? []).map(() => 0);
  return values.map((row) => row.map((value, at) => (value === null ? null : (sums[at] += value))));
}
