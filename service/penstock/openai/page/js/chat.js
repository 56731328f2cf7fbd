// The conversation: its turns, the one exchange that may run, and what the page shows of both.

import { exchange } from "./exchange.js";
import { AnswerView } from "./view/answer.js";
import { element, icon } from "./view/dom.js";
import { thumbnail } from "./view/images.js";

export class Chat {
  /** `parts` are elements of the page; `on` has what the chat needs of the rest of it: settings(), key(), edit(turn),
   * act(way), running(yes). */
  constructor({ list, welcome, said, follower }, on) {
    Object.assign(this, { list, welcome, said, follower, on });
    this.turns = [];
    this.views = new Map();
    this.controller = null;
  }

  /** Asks the model. `replaced` is an earlier message that this one stands for: it goes, with what came after it.
   * `own` are settings that hold for this question alone. */
  ask(text, images = [], replaced = null, own = {}) {
    if (replaced) this.cut(this.turns.indexOf(replaced));
    const turn = { role: "user", text, images, own };
    this.turns.push(turn);
    this.list.append(this.userView(turn));
    return this.run();
  }

  /** Asks the last question once more. */
  again() {
    if (this.controller) return Promise.resolve();
    const last = this.turns.findLastIndex(({ role }) => role === "user");
    if (last < 0) return Promise.resolve();
    this.cut(last + 1);
    return this.run();
  }

  stop() {
    this.controller?.abort();
  }

  clear() {
    this.stop();
    this.cut(0);
    this.said.textContent = "";
    this.welcome.hidden = false;
  }

  setFormatted(formatted) {
    for (const view of this.views.values()) {
      if (!(view instanceof AnswerView)) continue;
      view.formatted = formatted;
      view.update();
    }
  }

  async run() {
    const controller = new AbortController();
    this.controller = controller;
    this.welcome.hidden = true;
    this.on.running(true);
    this.said.textContent = "The model is answering.";
    this.follower.toEnd();
    const turns = this.turns;
    // Text comes faster than the screen shows it: a view is made up to date once for each frame.
    const stale = new Set();
    let frame = 0;
    const draw = () => {
      frame = 0;
      for (const answer of stale) this.views.get(answer)?.update();
      stale.clear();
      this.follower.added();
    };
    const ticking = setInterval(() => {
      // While nothing comes, the seconds of waiting go on.
      if (turns.at(-1)?.state === "waiting") this.views.get(turns.at(-1))?.update();
    }, 100);
    try {
      await exchange({
        turns,
        settings: { ...this.on.settings(), ...question(turns).own },
        key: this.on.key(),
        signal: controller.signal,
        onBegin: (answer) => {
          this.show(answer);
          this.follower.added();
        },
        onChange: (answer) => {
          stale.add(answer);
          frame ||= requestAnimationFrame(draw);
        },
      });
    } finally {
      clearInterval(ticking);
      cancelAnimationFrame(frame);
      draw(); // a hidden tab draws no frames, but must have all text when it is shown again
      if (this.controller === controller) {
        this.controller = null;
        this.on.running(false);
        this.said.textContent = spoken(turns.at(-1));
      }
    }
  }

  show(answer) {
    const view = new AnswerView(answer, this.on.settings().formatted, {
      again: () => void this.again(),
      act: (way) => this.act(way, answer),
      key: () => this.on.key(),
    });
    this.views.set(answer, view);
    this.list.append(view.root);
  }

  /** Goes one of the ways on from an answer that failed. */
  act(way, answer) {
    if (way.kind === "again") void this.again();
    else if (way.kind === "edit") this.on.edit(question(this.turns.slice(0, this.turns.indexOf(answer))));
    else this.on.act(way);
  }

  userView(turn) {
    const edit = element(
      "button",
      { type: "button", class: "quiet small", "aria-label": "Edit this message", title: "Edit this message",
        onclick: () => this.on.edit(turn) },
      icon("edit"),
    );
    const root = element("li", { class: "turn user" },
      element("span", { class: "hidden" }, "You:"),
      element("div", { class: "message" },
        turn.images.length ? element("div", { class: "shown" }, ...turn.images.map(thumbnail)) : null,
        ...(turn.text ? textOf(turn.text) : [])),
      edit);
    this.views.set(turn, { root });
    return root;
  }

  /** Takes away the turns from `at` on. The list is a new one, because an exchange that still ends has the old. */
  cut(at) {
    for (const turn of this.turns.slice(at)) {
      this.views.get(turn)?.root.remove();
      this.views.delete(turn);
    }
    this.turns = this.turns.slice(0, at);
  }
}

/** The newest question of these turns. */
function question(turns) {
  return turns.findLast(({ role }) => role === "user");
}

/** The most lines of a message that are shown at first, and how many characters count as so many. */
const MOST_LINES = 12;
const MOST_CHARACTERS = 900;

/** The text of a message. A long one is shown shortened, with a button for all of it. */
function textOf(text) {
  if (text.length <= MOST_CHARACTERS && text.split("\n").length <= MOST_LINES) return [element("p", {}, text)];
  const shown = element("span", { class: "short" }, text);
  const button = element("button", { type: "button", class: "link", "aria-expanded": "false", onclick: () => {
    const isShort = shown.classList.toggle("short");
    button.textContent = isShort ? "Show all" : "Show less";
    button.setAttribute("aria-expanded", String(!isShort));
  } }, "Show all");
  return [element("p", {}, shown), button];
}

/** What a screen reader says of an answer that has ended. Failures have an alert of their own. */
function spoken(answer) {
  if (answer?.role !== "assistant" || answer.state === "failed") return "";
  if (answer.state === "stopped") return "The answer was stopped.";
  return `The model answered: ${answer.text || "nothing"}`;
}
