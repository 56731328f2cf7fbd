// Makes elements. Text only ever becomes text nodes: whatever a model, a tool or a server says, it is never HTML.

/** An element with properties (`class`, `hidden`, `onclick`, "aria-label", ...) and children: elements or texts. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean") made.toggleAttribute(name, value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** One of the drawings in index.html. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/** A button that shows only a drawing; `label` is its name, and its tooltip. */
export function iconButton(name, label, onclick) {
  return element("button", { type: "button", class: "quiet small", "aria-label": label, title: label, onclick }, icon(name));
}

const WAYS = { again: "Try again", edit: "Edit this message", field: "Open the settings", new: "New chat" };

/** A button for one of the ways on from a failure, see failures.js. */
export function wayButton({ kind }, onclick) {
  return element("button", { type: "button", class: kind === "again" ? "plain again" : "plain", onclick }, WAYS[kind]);
}

/** A button that copies what `text()` returns, and says so for a moment. */
export function copyButton(name, label, text) {
  const button = iconButton(name, label, async () => {
    const done = await copied(text());
    button.replaceChildren(icon(done ? "done" : "warning"));
    button.setAttribute("aria-label", done ? "Copied" : "Could not copy");
    setTimeout(() => {
      button.replaceChildren(icon(name));
      button.setAttribute("aria-label", label);
    }, 1600);
  });
  return button;
}

/** Browsers have a clipboard only on https and localhost; elsewhere a selected field is copied the old way. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = element("textarea", { class: "hidden", readonly: true });
    field.value = text;
    const before = document.activeElement;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    before?.focus();
    return done;
  }
}
