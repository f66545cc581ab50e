// What the page shows, in its address: loading it again keeps that, and so does a link to it.

/** Returns what the address says of `name`. */
export function shown(name, otherwise = "") {
  return new URLSearchParams(location.search).get(name) ?? otherwise;
}

/** Writes it there; `otherwise`, which is shown without it, is left out. */
export function keep(name, value, otherwise = "") {
  const query = new URLSearchParams(location.search);
  if (value === otherwise) query.delete(name);
  else query.set(name, value);
  const text = query.toString();
  history.replaceState(null, "", `${location.pathname}${text ? `?${text}` : ""}${location.hash}`);
}
