// The images that go with the next message: chosen, pasted or dropped, and shown small until they are sent.

import { element, icon } from "./dom.js";

export const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

export class Images {
  /** `chooser` is the field for files, `button` opens it, `list` shows what was chosen, `target` is where images may
   * be dropped and pasted. `on` has what the page does: changed(), and say(text) for what somebody must know. */
  constructor({ chooser, button, list, target }, on) {
    Object.assign(this, { chooser, button, list, on });
    this.chosen = [];
    this.allowed = false;
    chooser.accept = TYPES.join(",");
    button.addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", () => {
      void this.add(chooser.files);
      chooser.value = ""; // so that the same file can be chosen again
    });
    target.addEventListener("paste", (event) => {
      if (!this.allowed || !event.clipboardData?.files.length) return;
      event.preventDefault();
      void this.add(event.clipboardData.files);
    });
    target.addEventListener("dragover", (event) => {
      if (this.allowed && event.dataTransfer?.types.includes("Files")) event.preventDefault();
    });
    target.addEventListener("drop", (event) => {
      if (!this.allowed || !event.dataTransfer?.files.length) return;
      event.preventDefault();
      void this.add(event.dataTransfer.files);
    });
    this.allow(false);
  }

  /** Whether the model takes images. What was chosen before goes if it does not. */
  allow(allowed) {
    this.allowed = allowed;
    this.button.hidden = !allowed;
    if (!allowed) this.set([]);
  }

  async add(files) {
    const taken = [...files].filter(({ type }) => TYPES.includes(type));
    if (taken.length < files.length) this.on.say("Images can be PNG, JPEG, WebP or GIF.");
    const read = await Promise.all(taken.map(async (file) => ({ name: file.name, url: await dataUrl(file) })));
    if (this.allowed) this.set([...this.chosen, ...read.filter(({ url }) => url)]);
  }

  set(chosen) {
    this.chosen = chosen;
    this.list.hidden = !chosen.length;
    this.list.replaceChildren(...chosen.map((image) => element("li", {},
      thumbnail(image),
      element("button", { type: "button", class: "quiet small", "aria-label": `Remove ${image.name}`, title: "Remove",
        onclick: () => this.set(this.chosen.filter((other) => other !== image)) }, icon("close")))));
    this.on.changed();
  }
}

export function thumbnail({ url, name }) {
  return element("img", { src: url, alt: name, title: name });
}

function dataUrl(file) {
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => resolve(null)); // the file went away, or may not be read
    reader.readAsDataURL(file);
  });
}
