// What every page shares: navigation, the connection's status, the token dialog, polling.

import { ApiError, askForToken, getChanged, setToken } from "./api.js";
import { h, text } from "./dom.js";

const PAGES = [
  ["", "cluster", "Cluster"],
  ["requests.html", "requests", "Requests"],
  ["charts.html", "charts", "Charts"],
  ["prefixes.html", "prefixes", "Prefixes"],
  ["playground.html", "playground", "Playground"],
];

let status;

/** Build the frame of the page called `name`. */
export function frame(name) {
  takeTokenFromAddress();
  status = h("span", { class: "status", role: "status" });
  const links = PAGES.map(([to, page, title]) => h("a", { href: `./${to}`, "aria-current": page === name ? "page" : null }, title));
  document.body.prepend(
    h("a", { class: "skip", href: "#main" }, "Skip to content"),
    h("header", { class: "bar" }, h("div", {},
      h("a", { class: "brand", href: "./" }, h("img", { src: "icon.svg", alt: "" }), "kvrelay"),
      h("nav", { "aria-label": "Pages" }, links),
      status)),
  );
  document.body.append(tokenDialog());
}

/** Show the state of the connection. */
export function setStatus(message, kind = "") {
  text(status, message);
  status.className = `status ${kind}`;
}

/**
 * Call `show(value)` with the JSON at `path()` now and every `intervalMs`, while the page is visible. Only changed answers are
 * shown, and the first one after a failure, which `fail()` is told. Returns a function that asks again at once.
 */
export function poll(path, show, intervalMs = 1000, fail = () => {}) {
  let etag = null;
  let asked = null;
  let timer = 0;
  let busy = false;

  async function ask() {
    clearTimeout(timer);
    if (busy || document.hidden) return;
    busy = true;
    try {
      const now = path();
      if (now !== asked) etag = null;
      asked = now;
      const found = await getChanged(now, etag);
      etag = found.etag;
      setStatus("live", "good");
      if (found.value !== null) show(found.value);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      etag = null;
      fail();
      setStatus(error.message, "bad");
      if (error.status === 401) await askForToken();
    } finally {
      busy = false;
      timer = setTimeout(ask, intervalMs);
    }
  }

  document.addEventListener("visibilitychange", ask);
  ask();
  return ask;
}

function takeTokenFromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return;
  setToken(given);
  history.replaceState(null, "", location.pathname + location.search);
}

function tokenDialog() {
  return h("dialog", { id: "token-dialog", "aria-labelledby": "token-title" },
    h("form", { method: "dialog" },
      h("h2", { id: "token-title" }, "Admin token"),
      h("p", { class: "dim" }, "The router asks for its admin token. This tab keeps it until it is closed."),
      h("p", {}, h("input", { type: "password", "aria-label": "Admin token", autocomplete: "off" })),
      h("p", { class: "buttons" },
        h("button", { class: "primary", value: "use" }, "Use"), " ", h("button", { value: "cancel", formnovalidate: true }, "Cancel"))));
}
