// Numbers as text. What is not known is a dash.

export const NONE = "–";

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clockFormat = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const dateFormat = new Intl.DateTimeFormat("en-GB", {
  year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit",
});

/** Seconds as milliseconds below a second. */
export function duration(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds >= 100) return `${seconds.toFixed(0)} s`;
  if (seconds >= 1) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  const ms = seconds * 1e3;
  return `${ms.toFixed(ms < 10 ? 2 : ms < 100 ? 1 : 0)} ms`;
}

/** A share from 0 to 1 in percent. */
export function percent(share) {
  if (!known(share)) return NONE;
  const value = 100 * share;
  return `${value.toFixed(value !== 0 && Math.abs(value) < 9.95 ? 1 : 0)}%`;
}

export function fixed(value, digits = 2) {
  return known(value) ? value.toFixed(digits) : NONE;
}

/** A number in about three digits. */
export function number(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  return size >= 100 ? grouped.format(value) : size >= 10 ? value.toFixed(1).replace(/\.0$/, "") : value.toFixed(2).replace(/\.?0+$/, "");
}

/** A number of things that are discounted by age, to the nearest whole one. */
export function count(value) {
  return known(value) ? grouped.format(value) : NONE;
}

export function times(value) {
  return known(value) ? `${value.toFixed(value < 10 ? 2 : 1)}×` : NONE;
}

/** A time as a person says how long ago it was. */
export function age(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds < 60) return `${Math.max(0, Math.floor(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export function clock(atS) {
  return clockFormat.format(atS * 1e3);
}

export function date(atS) {
  return dateFormat.format(atS * 1e3);
}

/** A word of the gateway, such as `least_delay`, as people write it. */
export function words(name) {
  return String(name).replaceAll("_", " ");
}

/** A template: its first words where they may be shown, else the digits of its hash. */
export function templateName(template, names, kind = "template ") {
  return template in names ? `“${names[template]}…”` : `${kind}${template}`;
}
