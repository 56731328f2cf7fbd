// Shows one answer of the model, and keeps it up to date while it comes.

import { figures } from "../answer.js";
import { explain } from "../failures.js";
import { curl } from "../request.js";
import { copyButton, element, icon, iconButton, wayButton } from "./dom.js";
import { Prose } from "./prose.js";

const FINISHES = {
  length: "The answer was cut: it reached the limit of tokens.",
  content_filter: "The server held back the rest of this answer.",
};

export class AnswerView {
  /** `on` has what the page does: again(), act(way), and key(), the API key. */
  constructor(answer, formatted, on) {
    this.answer = answer;
    this.on = on;
    this.formatted = formatted;
    this.prose = new Prose();
    this.waiting = element("p", { class: "waiting" }, element("span", { class: "dots", "aria-hidden": "true" }), element("span"));
    this.calls = element("div", { class: "calls" });
    this.notes = element("div", { class: "notes" });
    this.figures = element("span", { class: "figures" });
    this.copy = copyButton("copy", "Copy this answer", () => answer.text);
    this.foot = element(
      "div",
      { class: "foot" },
      this.figures,
      element(
        "span",
        { class: "actions" },
        this.copy,
        copyButton("terminal", "Copy this request as a curl command", () => this.command()),
        element("span", { class: "again" }, iconButton("again", "Try again", () => on.again())),
      ),
    );
    this.root = element("li", { class: "turn answer" }, this.waiting, this.prose.root, this.calls, this.notes, this.foot);
    this.update();
  }

  command() {
    return curl(this.answer.body, new URL("v1/chat/completions", document.baseURI).href, Boolean(this.on.key()));
  }

  update() {
    const { answer } = this;
    const known = figures(answer, performance.now());
    this.root.dataset.state = answer.state;
    this.root.setAttribute("aria-busy", String(known.running));
    this.waiting.hidden = answer.state !== "waiting";
    this.waiting.lastChild.textContent = `Waiting for the first token, ${seconds(known.waited ?? 0)}`;
    this.showReasoning(known);
    this.prose.show(answer.text || answer.refusal, this.formatted);
    this.showCalls();
    this.showFigures(known);
    this.foot.hidden = answer.state === "waiting";
    this.copy.hidden = !answer.text;
    if (!known.running) this.showNotes();
  }

  showReasoning(known) {
    if (!this.answer.reasoning) return;
    if (!this.reasoning) {
      this.reasoning = new Prose();
      this.thought = element("span");
      this.details = element(
        "details",
        { class: "reasoning", open: true },
        element("summary", {}, icon("open"), this.thought),
        this.reasoning.root,
      );
      // It is open while the model thinks, and closes when the answer begins, unless somebody has touched it.
      this.details.firstChild.addEventListener("click", () => (this.touched = true));
      this.prose.root.before(this.details);
    }
    this.reasoning.show(this.answer.reasoning, this.formatted);
    const over = this.answer.thought !== null || !known.running;
    this.thought.textContent = over ? `Thought for ${known.thinking < 100 ? "a moment" : seconds(known.thinking)}` : "Thinking";
    this.details.classList.toggle("live", !over);
    if (over && !this.touched) {
      this.details.open = !this.answer.text && !this.answer.calls.length;
    }
  }

  showCalls() {
    const { calls, state } = this.answer;
    while (this.calls.childElementCount < calls.length) this.calls.append(callView());
    calls.forEach((call, at) => {
      const view = this.calls.children[at];
      const [name, status, args, result] = view.querySelectorAll("[data-part]");
      name.textContent = call.name || "…";
      args.textContent = pretty(call.arguments || "{}");
      result.textContent = pretty(call.result ?? "");
      result.parentElement.hidden = call.result === null;
      const ended = state === "done" || state === "stopped" || state === "failed";
      status.textContent = call.result !== null ? "returned" : ended ? "not run" : "being written";
      view.dataset.state = call.result !== null ? "returned" : ended ? "not-run" : "written";
    });
  }

  showFigures({ tokens, rate, firstToken, promptTokens, cachedTokens }) {
    const parts = [];
    if (tokens !== null) parts.push(tokens === 1 ? "1 token" : `${count(tokens)} tokens`);
    if (rate !== null) parts.push(`${rate < 100 ? rate.toFixed(1) : count(Math.round(rate))} tokens/s`);
    if (firstToken !== null) parts.push(`first token ${seconds(firstToken)}`);
    if (promptTokens !== null) {
      parts.push(`${count(promptTokens)} in the prompt${cachedTokens ? `, ${count(cachedTokens)} cached` : ""}`);
    }
    this.figures.replaceChildren(...parts.map((part) => element("span", {}, part)));
  }

  showNotes() {
    const { answer } = this;
    const notes = [];
    if (answer.state === "stopped") notes.push(note("You stopped this answer."));
    if (FINISHES[answer.finish]) notes.push(note(FINISHES[answer.finish]));
    if (answer.limited) notes.push(note("The model kept calling tools, so the page stopped asking it."));
    if (answer.state === "done" && !answer.text && !answer.refusal && !answer.calls.length && answer.finish !== "length") {
      notes.push(note("The model answered with nothing."));
    }
    if (answer.failure) notes.push(this.failure());
    this.notes.replaceChildren(...notes);
  }

  failure() {
    const { failure } = this.answer;
    const { title, next, ways } = explain(failure);
    const facts = [
      failure.status ? `HTTP ${failure.status}` : "",
      failure.code || failure.type,
      failure.param ? `parameter ${failure.param}` : "",
      failure.requestId ? `request ${failure.requestId}` : "",
    ].filter(Boolean);
    return element(
      "div",
      { class: "failure", role: "alert" },
      icon("warning"),
      element(
        "div",
        {},
        element("p", { class: "title" }, title),
        failure.message ? element("p", { class: "words" }, failure.message) : null,
        element("p", {}, next),
        facts.length ? element("p", { class: "facts" }, ...facts.map((fact) => element("span", {}, fact))) : null,
        element("p", { class: "ways" },
          ...ways.map((way) => wayButton(way, () => this.on.act(way)))),
      ),
    );
  }
}

function callView() {
  const part = (name, tag, properties = {}) => element(tag, { ...properties, "data-part": name });
  return element(
    "details",
    { class: "call", open: true },
    element("summary", {}, icon("tool"), part("name", "code"), part("status", "span", { class: "status" }), icon("open")),
    element("div", { class: "io" },
      element("div", {}, element("p", {}, "Arguments"), part("arguments", "pre", { tabindex: "0" })),
      element("div", {}, element("p", {}, "Result"), part("result", "pre", { tabindex: "0" }))),
  );
}

function note(text) {
  return element("p", { class: "note" }, text);
}

/** JSON as it is easiest to read; any other text, and JSON that is not complete yet, as it is. */
function pretty(text) {
  try {
    const value = JSON.parse(text);
    if (!value || typeof value !== "object") return text;
    const whole = JSON.stringify(value, null, 2);
    const line = whole.replaceAll(/\n */g, " "); // a line break inside a string is written as \n
    return line.length <= 36 ? line : whole;
  } catch {
    return text;
  }
}

function seconds(milliseconds) {
  if (milliseconds < 999.5) return `${Math.round(milliseconds)} ms`;
  return `${(milliseconds / 1000).toFixed(milliseconds < 9950 ? 1 : 0)} s`;
}

function count(number) {
  return number.toLocaleString("en-GB");
}
