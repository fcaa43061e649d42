// Which prefixes lie where: blocks by the nodes that hold them, and where the blocks of one prompt are.

import { ApiError, post } from "./api.js";
import { h, keyed, text } from "./dom.js";
import { frame, poll } from "./frame.js";
import { count, counted, percent } from "./units.js";

frame("prefixes");
const main = document.getElementById("main");
const map = h("tbody");
const head = h("tr");
const note = h("p", { class: "dim" });
const prompt = h("textarea", { id: "prompt", rows: 3, placeholder: "Text of a prompt", required: true });
const chat = h("input", { type: "checkbox", checked: true });
const found = h("div", { "aria-live": "polite" });
main.append(
  h("h2", {}, "Where are the blocks of a prompt?"),
  h("form", { class: "ask", onsubmit: ask }, h("label", { for: "prompt", class: "sr" }, "Prompt"), prompt,
    h("p", { class: "buttons" }, h("label", {}, chat, "as a user's message of a chat"), h("button", { class: "primary" }, "Look up"))),
  found,
  h("h2", {}, "Blocks by holders"), note,
  h("div", { class: "scroll" }, h("table", { class: "map", "aria-label": "Blocks by holders" }, h("thead", {}, head), map)),
);

async function ask(event) {
  event.preventDefault();
  try {
    const answer = await post("prefixes/find", { prompt: prompt.value, chat: chat.checked });
    const most = Math.max(1, answer.prompt_blocks);
    found.replaceChildren(h("p", {}, `${counted(answer.prompt_tokens, "token")} in ${counted(answer.prompt_blocks, "block")}`),
      h("ul", { class: "hits" }, answer.nodes.map((node) => h("li", {},
        h("span", { class: "mono" }, node.node), h("span", { class: "meter" }, h("i", { class: `used ${node.role}`, style: { width: `${(100 * node.blocks) / most}%` } })),
        h("span", { class: "num" }, counted(node.blocks, "block"))))));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    found.replaceChildren(h("p", { class: "bad", role: "alert" }, error.message));
  }
}

function show({ nodes, groups, blocks }) {
  text(note, blocks ? `Known: ${counted(blocks, "block")}. Each row is a set of nodes that hold the same blocks.` : "No node has published a block yet.");
  const columns = [{ incarnation: "", node: "Blocks" }, ...nodes];
  keyed(head, columns, (node) => node.incarnation, (node) => h("th", { class: node.incarnation ? null : "num" }, node.node), () => {});
  keyed(map, groups, (group) => group.holders.join(" "), () => h("tr"), (row, group) => {
    const cells = [h("td", { class: "num" }, `${count(group.blocks)} (${percent(group.blocks, blocks)})`),
      ...nodes.map((node) => (group.holders.includes(node.incarnation) ? h("td", { class: `held ${node.role}` }, h("span", { class: "sr" }, "holds")) : h("td")))];
    row.replaceChildren(...cells);
  });
}

poll(() => "prefixes", show, 5000);
