// The field for the next message, with the buttons that send it and stop the answer.

import { Images } from "./images.js";

/** On a telephone, Enter begins a line, because nobody can press Shift there; the button sends. */
const TOUCH = matchMedia("(pointer: coarse)");

export class Composer {
  /** `on` has what the page does: send(text, images, turn), stop(), and say(text). `images` are the elements for
   * images, see Images. */
  constructor({ form, field, send, stop, keys, editing, cancel, images }, on) {
    Object.assign(this, { form, field, send, stop, editing, on });
    this.images = new Images({ ...images, target: form }, { changed: () => this.update(), say: on.say });
    this.running = false;
    this.editTurn = null;
    if (TOUCH.matches) {
      keys.hidden = true;
      field.setAttribute("enterkeyhint", "enter");
    }
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    field.addEventListener("input", () => this.update());
    field.addEventListener("keydown", (event) => {
      // While an input method is composing, Enter chooses a word.
      if (event.key !== "Enter" || event.isComposing || TOUCH.matches) return;
      if (event.shiftKey && !event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.submit();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog:modal")) return;
      if (this.running) on.stop();
      else if (this.editTurn) this.edit(null);
    });
    stop.addEventListener("click", () => on.stop());
    cancel.addEventListener("click", () => this.edit(null));
    this.update();
  }

  submit() {
    if (!this.hasMessage() || this.running) return;
    if (!this.on.send(this.field.value.trim(), this.images.chosen, this.editTurn)) return;
    this.images.set([]);
    this.field.value = "";
    this.editTurn = null;
    this.editing.hidden = true;
    this.update();
  }

  /** Puts a message of before into the field, so that it can be sent in another form; null ends this. */
  edit(turn) {
    this.editTurn = turn;
    this.editing.hidden = !turn;
    this.field.value = turn?.text ?? "";
    this.images.set(turn?.images ?? []);
    this.update();
    this.field.focus();
  }

  /** Puts a message into the field that could not be sent. */
  fill(text) {
    this.field.value = text;
    this.update();
  }

  setRunning(running) {
    const focused = document.activeElement === this.stop || document.activeElement === this.send;
    this.running = running;
    this.send.hidden = running;
    this.stop.hidden = !running;
    // The focus must not be lost with the button that had it.
    if (focused) (running ? this.stop : this.field).focus();
    this.update();
  }

  hasMessage() {
    return Boolean(this.field.value.trim() || this.images?.chosen.length);
  }

  update() {
    // With `aria-disabled` rather than `disabled` the button stays where the keyboard expects it.
    this.send.setAttribute("aria-disabled", String(!this.hasMessage()));
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight}px`;
  }
}
