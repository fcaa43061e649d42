// The chat playground: an answer token by token, with the nodes that made it, one of which can be killed.

import { Answer } from "./answer.js";
import { get, post, postStream } from "./api.js";
import { h, text } from "./dom.js";
import { frame, poll, setStatus } from "./frame.js";
import { segmentsOf } from "./segments.js";
import { counted, duration } from "./units.js";

const STORY_MS = 300;
const ALTERNATIVES = 5;

frame("playground");
let messages = [];
let stop = null;
let mayKill = false;

const model = h("select", { "aria-label": "Model" });
const most = h("input", { type: "number", min: "1", max: "100000", value: "200" });
const temperature = h("input", { type: "number", min: "0", max: "2", step: "0.1", value: "0" });
const endless = h("input", { type: "checkbox" });
const input = h("textarea", { rows: "3", required: true, "aria-label": "Message", placeholder: "Say something. Enter sends, Shift+Enter starts a line.", onkeydown: sendOnEnter });
const send = h("button", { class: "primary" }, "Send");
const halt = h("button", { type: "button", disabled: true, onclick: () => stop?.abort() }, "Stop");
const clear = h("button", { type: "button", onclick: forget }, "Clear");
const problem = h("p", { class: "bad", role: "alert" });
const detail = h("p", { class: "detail dim", role: "status" });
const log = h("section", { class: "chat", "aria-label": "Conversation" });
const form = h("form", { class: "ask chat-input", onsubmit: ask }, detail, input,
  h("p", { class: "buttons" }, send, halt, clear, h("label", {}, "Model", model), h("label", {}, "Most tokens", most), h("label", {}, "Temperature", temperature),
    h("label", {}, endless, "Ignore the end token")));
const notice = h("p", { class: "notice", role: "alert", hidden: true });
document.getElementById("main").append(notice, log, problem, form);
start();

async function start() {
  try {
    const about = await get("playground");
    mayKill = about.may_kill;
    model.replaceChildren(...about.models.map((name) => h("option", {}, name)));
    if (!about.models.length) {
      setStatus("no model yet");
      setTimeout(start, 2000);
      return;
    }
    poll(() => "snapshot", watch);
    input.focus();
  } catch (error) {
    setStatus(error.message, "bad");
    setTimeout(start, 2000);
  }
}

/** Say when no node can answer; `poll` says when the router is gone. */
function watch(state) {
  const usable = state.nodes.filter((node) => node.state === "usable" && node.role === "decode");
  notice.hidden = usable.length > 0;
  text(notice, usable.length ? "" : "No decode node is usable: messages wait, and fail after a while.");
}

function sendOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!send.disabled) form.requestSubmit();
}

function forget() {
  stop?.abort();
  messages = []; // an answer that is being stopped still adds to the old one
  log.replaceChildren();
  text(problem, "");
}

async function ask(event) {
  event.preventDefault();
  const conversation = messages;
  conversation.push({ role: "user", content: input.value });
  const answer = new Answer(detail, mayKill ? kill : null);
  log.append(h("article", { class: "message user" }, h("h2", { class: "sr" }, "You"), input.value), answer.element);
  input.value = "";
  text(problem, "");
  send.disabled = true;
  halt.disabled = false;
  const controller = (stop = new AbortController());
  try {
    await stream(answer, controller);
  } catch (error) {
    if (controller.signal.aborted) answer.describe("stopped");
    else text(problem, error.message);
  }
  answer.end();
  if (answer.text) conversation.push({ role: "assistant", content: answer.text });
  else conversation.pop();
  send.disabled = false;
  halt.disabled = true;
  input.focus();
}

async function stream(answer, controller) {
  const body = {
    model: model.value, messages, stream: true, logprobs: true, top_logprobs: ALTERNATIVES,
    max_tokens: Number(most.value), temperature: Number(temperature.value), ignore_eos: endless.checked,
  };
  const began = performance.now();
  const { id, events } = await postStream("chat", body, controller.signal);
  const path = `requests/${encodeURIComponent(id)}`;
  const href = `requests.html?id=${encodeURIComponent(id)}`;
  const watching = setInterval(() => attribute(answer, path), STORY_MS);
  let first = 0;
  try {
    for await (const event of events) {
      if (event.error) throw new Error(event.error.message);
      const [choice] = event.choices;
      if (!choice) continue;
      const follows = window.innerHeight + window.scrollY > document.body.scrollHeight - 40;
      const records = choice.logprobs?.content ?? [];
      if (records.length && !first) {
        first = performance.now();
        attribute(answer, path);
      }
      answer.add(choice.delta.content ?? choice.delta.reasoning_content ?? "", records);
      if (!first) continue;
      const took = (performance.now() - first) / 1000;
      const rate = answer.tokens.length > 1 ? `, then ${((answer.tokens.length - 1) / took).toFixed(0)} tokens/s` : "";
      answer.describe(`${counted(answer.tokens.length, "token")}, first after ${duration((first - began) / 1000)}${rate}`, href);
      if (follows) window.scrollTo(0, document.body.scrollHeight);
    }
  } finally {
    clearInterval(watching);
    await attribute(answer, path);
  }
}

async function attribute(answer, path) {
  try {
    answer.attribute(segmentsOf(await get(path)));
  } catch {
    // The answer itself says more about what is wrong.
  }
}

async function kill(node) {
  try {
    await post(`nodes/${encodeURIComponent(node)}/kill`);
  } catch (error) {
    text(problem, error.message);
  }
}
