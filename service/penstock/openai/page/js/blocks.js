// Takes Markdown apart into blocks: the small part of it that models write most. What is not known stays as it is
// written. Nothing here touches the page, and no text is ever taken for HTML.

// No pattern has two parts side by side that can match the same letters: on a long line the ways to share them out
// would be too many to try.
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const ITEM = /^(\s*)(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DASHES = /^:?-+:?$/;

/** The blocks of `text` from `offset` on, in order. Each has its `kind` and the offset where it begins. */
export function blocks(text, offset = 0) {
  const lines = linesOf(text, offset);
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].text.trim()) {
      at += 1;
      continue;
    }
    const [block, next] = code(lines, at) ?? single(lines, at) ?? quote(lines, at) ?? list(lines, at)
      ?? table(lines, at) ?? paragraph(lines, at);
    found.push({ ...block, begin: lines[at].begin });
    at = next;
  }
  return found;
}

function linesOf(text, offset) {
  const lines = [];
  for (let begin = offset; begin < text.length; ) {
    const end = text.indexOf("\n", begin);
    lines.push({ text: text.slice(begin, end < 0 ? text.length : end).replace(/\r$/, ""), begin });
    begin = end < 0 ? text.length : end + 1;
  }
  return lines;
}

function code(lines, at) {
  const fence = FENCE.exec(lines[at].text);
  if (!fence) return null;
  let end = at + 1;
  while (end < lines.length && !closes(lines[end].text, fence[1])) end += 1;
  const text = lines.slice(at + 1, end).map((line) => line.text).join("\n");
  return [{ kind: "code", language: fence[2].trim().split(/\s/)[0], text }, end + 1];
}

function closes(line, fence) {
  const mark = line.trim();
  return mark.length >= fence.length && mark.startsWith(fence) && !mark.replaceAll(fence[0], "");
}

/** A block of one line. */
function single(lines, at) {
  const { text } = lines[at];
  const heading = HEADING.exec(text);
  if (heading?.[2].trim()) {
    return [{ kind: "heading", level: heading[1].length, text: withoutMarks(heading[2].trim()) }, at + 1];
  }
  return RULE.test(text) ? [{ kind: "rule" }, at + 1] : null;
}

/** The text of a heading without the marks that may close it, as in "## Title ##". */
function withoutMarks(text) {
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  return text[end - 1] === " " ? text.slice(0, end).trimEnd() : text;
}

function quote(lines, at) {
  const said = [];
  let end = at;
  for (let line; end < lines.length && (line = QUOTE.exec(lines[end].text)); end += 1) said.push(line[1]);
  return said.length ? [{ kind: "quote", text: said.join("\n") }, end] : null;
}

/** Items have {depth, ordered, number, text}. An empty line between two items does not end the list. */
function list(lines, at) {
  const items = [];
  const margins = [];
  let end = at;
  while (end < lines.length) {
    const { text } = lines[end];
    const item = RULE.test(text) ? null : ITEM.exec(text);
    if (item) {
      while (margins.length && margins.at(-1) >= item[1].length + 2) margins.pop();
      if (!margins.length || item[1].length >= margins.at(-1) + 2) margins.push(item[1].length);
      items.push({ depth: margins.length - 1, ordered: item[3] !== undefined, number: Number(item[3] ?? 0), text: item[4] });
    } else if (!items.length) {
      return null;
    } else if (text.trim() && /^\s{2,}/.test(text) && !FENCE.test(text)) {
      items.at(-1).text += `\n${text.trim()}`;
    } else if (text.trim() || end + 1 >= lines.length || !ITEM.test(lines[end + 1].text)) {
      break;
    }
    end += 1;
  }
  return [{ kind: "list", items }, end];
}

/** `rows` are lists of texts, the first of which is the head; all are as long as the head. */
function table(lines, at) {
  const head = cells(lines[at].text);
  const dashes = cells(lines[at + 1]?.text ?? "");
  if (!head || dashes?.length !== head.length || !dashes.every((cell) => DASHES.test(cell))) return null;
  const rows = [head];
  let end = at + 2;
  for (let row; end < lines.length && (row = cells(lines[end].text)); end += 1) rows.push(head.map((_, i) => row[i] ?? ""));
  const aligned = dashes.map((cell) => (!cell.endsWith(":") ? "start" : cell.startsWith(":") ? "center" : "end"));
  return [{ kind: "table", rows, aligned }, end];
}

/** The cells of a line of a table; null for a line that has no "|". */
function cells(line) {
  const text = line.trim();
  if (!text.includes("|")) return null;
  const inner = text.slice(text.startsWith("|") ? 1 : 0, text.endsWith("|") && !text.endsWith("\\|") ? -1 : text.length);
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].text.trim() && !begins(lines[end].text)) end += 1;
  return [{ kind: "paragraph", text: lines.slice(at, end).map((line) => line.text).join("\n") }, end];
}

function begins(line) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
}

// Each has a bound, because the search from an opening mark that is never closed would otherwise go through the
// rest of the text, again and again.
const INLINE = /(`+)(?!`)([^\n]{1,1000}?[^`]|[^`\n])\1(?!`)|\*\*(?=\S)([^\n]{1,1000}?\S|\S)\*\*|(?<![\w*])\*(?=[^\s*])([^*\n]{1,1000}?[^\s*]|[^\s*])\*(?![\w*])/g;

/** The parts of a line: {kind: "text" | "code" | "strong" | "emphasis", text}. */
export function inline(text) {
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    if (found.index > at) parts.push({ kind: "text", text: text.slice(at, found.index) });
    if (found[2] !== undefined) parts.push({ kind: "code", text: found[2] });
    else if (found[3] !== undefined) parts.push({ kind: "strong", text: found[3] });
    else parts.push({ kind: "emphasis", text: found[4] });
    at = found.index + found[0].length;
  }
  if (at < text.length) parts.push({ kind: "text", text: text.slice(at) });
  return parts;
}
