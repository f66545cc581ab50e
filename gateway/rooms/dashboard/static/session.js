// The key of this tab, and what is asked of the gateway with it.

import { byId, setText } from "./dom.js";
import { ask } from "./feed.js";

const NAME = "gateway-admin-key";
const IS_KEY = /^[\x21-\x7e]+$/;
let key = "";

/** Takes the key that this tab has, or that stands behind the `#` of the address, which is then removed from there. */
export function restoreKey() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key")?.trim();
  if (given) {
    history.replaceState(null, "", location.pathname + location.search);
    keepKey(given);
  } else {
    key = sessionStorage.getItem(NAME) ?? "";
  }
}

export function keepKey(given) {
  key = given;
  if (given) sessionStorage.setItem(NAME, given);
  else sessionStorage.removeItem(NAME);
}

export function hasKey() {
  return key !== "";
}

export function headers() {
  return key === "" ? {} : { authorization: `Bearer ${IS_KEY.test(key) ? key : "not-a-key"}` }; // a browser sends no other
}

/** Returns what to say of an error: of a refused key, that it is not accepted. */
export function notAccepted({ status, message }) {
  if (status === 401) return hasKey() ? "This key is not accepted." : "This page needs an admin key.";
  return status === 403 ? `This key is not accepted. ${message}` : message;
}

/** Asks for a key in a dialog; `onKey` is called once there is one. */
export function askForKey(message, onKey) {
  const dialog = byId("sign-in");
  const input = byId("key");
  setText(byId("sign-in-error"), message);
  input.value = "";
  byId("sign-in-form").onsubmit = (event) => {
    event.preventDefault();
    const given = input.value.trim();
    if (!IS_KEY.test(given)) {
      setText(byId("sign-in-error"), "A key has no spaces, and only ASCII characters.");
      return;
    }
    keepKey(given);
    dialog.close();
    onKey();
  };
  if (!dialog.open) dialog.showModal();
}

/** Asks whether to go on; resolves to true or false. */
export function confirmed(title, text, action) {
  const dialog = byId("confirm");
  setText(byId("confirm-title"), title);
  setText(byId("confirm-text"), text);
  setText(byId("confirm-yes"), action);
  return new Promise((resolve) => {
    let answer = false;
    byId("confirm-form").onsubmit = (event) => {
      event.preventDefault();
      answer = true;
      dialog.close();
    };
    byId("confirm-no").onclick = () => dialog.close();
    dialog.onclose = () => resolve(answer);
    dialog.showModal();
  });
}

/** Returns what the gateway answers; raises an `Error` with its message. */
export function get(path, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  return ask(query ? `${path}?${query}` : path, { headers: headers() });
}

export function post(path, body) {
  return ask(path, {
    method: "POST",
    headers: { ...headers(), "content-type": "application/json" },
    body: JSON.stringify(body),
    signal: null, // distilling takes long
  });
}
