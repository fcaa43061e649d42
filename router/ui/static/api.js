// Calls of the dashboard's JSON routes. On the admin port they need the admin token, which the page keeps until its tab is closed.

const KEY = "kvrelay-admin-token";
const TIMEOUT_MS = 10_000;

/** An answer that is not 2xx, or no answer (`status` 0). */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const token = () => sessionStorage.getItem(KEY) ?? "";
export const setToken = (value) => sessionStorage.setItem(KEY, value.trim());

function headers(extra) {
  const given = token();
  return given ? { ...extra, authorization: `Bearer ${given}` } : extra;
}

async function call(path, options) {
  let answer;
  try {
    answer = await fetch(`api/${path}`, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS), ...options });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError(0, "the router does not answer");
  }
  if (answer.ok || answer.status === 304) return answer;
  const body = await answer.json().catch(() => null);
  throw new ApiError(answer.status, body?.error?.message ?? `the router answered ${answer.status}`);
}

async function json(answer) {
  try {
    return await answer.json();
  } catch {
    throw new ApiError(0, "the router's answer was cut off");
  }
}

/** The JSON at `path` below `/ui/api/`. */
export async function get(path) {
  return json(await call(path, { headers: headers({}) }));
}

/** Like `get`, with the previous answer's `etag`: `{etag, value}`, where `value` is null if nothing has changed. */
export async function getChanged(path, etag) {
  const answer = await call(path, { headers: headers(etag ? { "if-none-match": etag } : {}) });
  if (answer.status === 304) return { etag, value: null };
  return { etag: answer.headers.get("etag"), value: await json(answer) };
}

/** Post `body`; asks for the admin token if the router wants one. */
export const post = async (path, body = {}) => json(await send(path, body));

/** Post `body` for a stream of events, until `signal`: `{id, events}`, the router's id of the request and an iterator. */
export async function postStream(path, body, signal) {
  const answer = await send(path, body, { signal });
  return { id: answer.headers.get("x-kvrelay-request-id"), events: eventsOf(answer.body) };
}

async function send(path, body, more = {}) {
  const options = () => ({
    method: "POST",
    headers: headers({ "content-type": "application/json", "x-kvrelay-ui": "1" }),
    body: JSON.stringify(body),
    ...more,
  });
  try {
    return await call(path, options());
  } catch (error) {
    if (error.status !== 401 || !(await askForToken())) throw error;
    return call(path, options());
  }
}

async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith(":")) continue; // a comment of a stream that waits
      const data = event.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

/** Show the token dialog; whether a token was given. */
export function askForToken() {
  const dialog = document.getElementById("token-dialog");
  if (dialog.open) return Promise.resolve(false);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const value = dialog.querySelector("input").value;
      if (dialog.returnValue === "use" && value) setToken(value);
      resolve(dialog.returnValue === "use" && value !== "");
    }, { once: true });
    dialog.returnValue = "";
    dialog.showModal();
  });
}
