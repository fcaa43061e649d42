// One answer of the playground: its tokens, which node made each, and how likely each was.

import { h, keyed, text } from "./dom.js";
import { segmentAt } from "./segments.js";

const DECODE_COLOURS = 3;
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const visible = (token) => JSON.stringify(token).slice(1, -1).replaceAll(" ", "␣");

export class Answer {
  /** `detail`: where a token is described. `onKill(node)` is called by the buttons; without it there are none. */
  constructor(detail, onKill) {
    this._detail = detail;
    this.text = "";
    this.segments = [];
    this.tokens = [];
    this._onKill = onKill;
    this._colours = new Map();
    this._focused = 0;
    this._running = true;
    this._body = h("div", { class: "tokens", role: "group", "aria-label": "Answer, token by token: arrow keys move", onkeydown: (event) => this._move(event) });
    this._nodes = h("ul", { class: "legend", "aria-label": "Nodes that made this answer" });
    this._state = h("p", { class: "dim num" });
    this.element = h("article", { class: "message assistant" }, h("h2", { class: "sr" }, "Answer"), this._nodes, this._body, this._state);
  }

  /** Add one event of the stream: its text, and a record for each token of it. */
  add(content, records) {
    this.text += content;
    const parts = records.map((record) => record.token);
    const whole = parts.join("") === content;
    if (!records.length && content) this._append(content, null);
    records.forEach((record, at) => this._append(whole ? parts[at] : at === records.length - 1 ? content : "", record));
  }

  /** Show which nodes made the tokens. */
  attribute(segments) {
    this.segments = segments;
    this.tokens.forEach((token, index) => this._colour(token, index));
    this._showNodes();
  }

  /** Show figures of the answer below it; `href` leads to its waterfall. */
  describe(words, href) {
    this._state.replaceChildren(words, href ? " · " : "", href ? h("a", { href }, "waterfall") : "");
  }

  end() {
    this._running = false;
    this._showNodes();
  }

  _append(content, record) {
    if (!record && this.tokens.length) {
      this.tokens.at(-1).append(content);
      return;
    }
    const index = this.tokens.length;
    const token = h("span", { class: "token", tabindex: index ? "-1" : "0", onfocus: () => this._show((this._focused = index)), onmouseenter: () => this._show(index) }, content);
    token.record = record;
    this.tokens.push(token);
    this._colour(token, index);
    this._body.append(token);
  }

  _colour(token, index) {
    const segment = segmentAt(this.segments, index);
    const continues = index && segment && segment.attempt !== segmentAt(this.segments, index - 1).attempt;
    token.className = `token ${segment ? this._colourOf(segment) : ""} ${continues ? "first" : ""}`;
    token.dataset.node = segment?.node ?? "";
  }

  _colourOf({ node, role }) {
    if (role === "prefill") return "by-prefill";
    if (!this._colours.has(node)) this._colours.set(node, this._colours.size % DECODE_COLOURS);
    return `by-decode-${this._colours.get(node)}`;
  }

  _showNodes() {
    const { segments, tokens } = this;
    const make = ({ node }) => h("li", {}, h("i"), h("span"),
      h("button", { type: "button", class: "danger", onclick: (event) => { event.target.disabled = true; this._onKill(node); } }, `Kill ${node}`));
    keyed(this._nodes, segments, (segment) => `${segment.start} ${segment.node}`, make, (entry, segment) => {
      const [colour, words, button] = entry.children;
      const next = segments[segments.indexOf(segment) + 1];
      const end = next?.start ?? tokens.length;
      colour.className = `key ${this._colourOf(segment)}`;
      text(words, `${segment.node}: ${end - segment.start > 1 ? `tokens ${segment.start + 1} to ${end}` : `token ${segment.start + 1}`}`);
      button.hidden = Boolean(next) || !this._running || !this._onKill;
    });
  }

  _show(index) {
    const { record } = this.tokens[index];
    const segment = segmentAt(this.segments, index);
    const where = segment ? `, ${segment.node}, attempt ${segment.attempt}` : "";
    if (!record) return;
    const others = record.top_logprobs.map((each) => `${visible(each.token)} ${percent(each.logprob)}`).join("   ");
    text(this._detail, `Token ${index + 1}: ${visible(record.token)} ${percent(record.logprob)}${where}. Likeliest: ${others}`);
  }

  _move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const to = this.tokens[this._focused + step];
    if (!step || !to) return;
    event.preventDefault();
    this.tokens[this._focused].tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  }
}
