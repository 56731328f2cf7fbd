// Shows a text that grows. Only its last blocks are made anew when text is added: making all of a long answer anew
// for each token would take ever longer.

import { blocks, inline } from "../blocks.js";
import { copyButton, element } from "./dom.js";

const UNSETTLED = 2; // a line that is not complete may still join the block before it

export class Prose {
  constructor() {
    this.root = element("div", { class: "prose" });
    this.text = "";
    this.formatted = true;
    this.shown = []; // {begin, node} of each block
  }

  /** Shows `text`. `formatted` false shows it as the model wrote it. */
  show(text, formatted) {
    if (text === this.text && formatted === this.formatted) return;
    if (formatted !== this.formatted || !text.startsWith(this.text)) this.clear();
    this.text = text;
    this.formatted = formatted;
    if (!formatted) {
      this.root.replaceChildren(element("p", { class: "raw" }, text));
      return;
    }
    const settled = Math.max(0, this.shown.length - UNSETTLED);
    const offset = this.shown[settled]?.begin ?? 0;
    for (const { node } of this.shown.splice(settled)) node.remove();
    for (const block of blocks(text, offset)) {
      const node = shown(block);
      this.shown.push({ begin: block.begin, node });
      this.root.append(node);
    }
  }

  clear() {
    this.shown = [];
    this.root.replaceChildren();
  }
}

function shown(block) {
  if (block.kind === "code") return code(block);
  if (block.kind === "rule") return element("hr");
  if (block.kind === "list") return list(block.items);
  if (block.kind === "table") return table(block);
  if (block.kind === "quote") return element("blockquote", {}, element("p", {}, ...spans(block.text)));
  // The page has an h1 itself, and a model's headings begin below it.
  if (block.kind === "heading") return element(`h${Math.min(block.level + 1, 6)}`, {}, ...spans(block.text));
  return element("p", {}, ...spans(block.text));
}

function code({ language, text }) {
  return element(
    "figure",
    { class: "code" },
    element("figcaption", {}, element("span", {}, language || "text"), copyButton("copy", "Copy this code", () => text)),
    // It can scroll, so the keyboard must reach it.
    element("pre", { tabindex: "0" }, element("code", {}, text)),
  );
}

function list(items) {
  const lists = [];
  for (const item of items) {
    lists.length = Math.min(lists.length, item.depth + 1);
    while (lists.length <= item.depth) {
      const made = element(item.ordered ? "ol" : "ul", item.ordered ? { start: String(item.number) } : {});
      lists.at(-1)?.lastElementChild?.append(made);
      lists.push(made);
    }
    lists.at(-1).append(element("li", {}, ...spans(item.text)));
  }
  return lists[0];
}

function table({ rows: [head, ...rows], aligned }) {
  const row = (tag, cells) => element("tr", {}, ...cells.map((cell, at) => element(tag, { class: aligned[at] }, ...spans(cell))));
  // A wide table scrolls by itself, so the keyboard must reach it.
  return element("div", { class: "table", tabindex: "0" },
    element("table", {}, element("thead", {}, row("th", head)), element("tbody", {}, ...rows.map((cells) => row("td", cells)))));
}

const TAGS = { code: "code", strong: "strong", emphasis: "em" };

function spans(text) {
  return inline(text).map((part) => (part.kind === "text" ? part.text : element(TAGS[part.kind], {}, part.text)));
}
