// Puts the page together.

import { listModels } from "./api.js";
import { Chat } from "./chat.js";
import { explain } from "./failures.js";
import { EXAMPLE_SCHEMA, firstInvalid, keepKey, keepSettings, keptKey, readSettings, restoreSettings } from "./settings.js";
import { Composer } from "./view/composer.js";
import { element, icon, wayButton } from "./view/dom.js";
import { Panel } from "./view/panel.js";
import { Follower } from "./view/scroll.js";

const STARTERS = [
  { text: "Tell me a short story." },
  { text: "What is 3 + 4?" },
  { text: "What is the weather in Paris?", tools: true },
];
const FORMATS = { text: "", json_object: "JSON object", json_schema: "JSON Schema" };

const part = (id) => document.getElementById(id);
const form = part("settings");
const keyField = part("key");

keyField.value = keptKey();
let wantedModel = restoreSettings(form);
const panel = new Panel({ panel: part("panel"), opener: part("open-settings"), closer: part("close-settings") });
const chat = new Chat(
  { list: part("turns"), welcome: part("welcome"), said: part("said"), follower: new Follower(part("scroller"), part("latest")) },
  {
    settings: () => readSettings(form),
    key: () => keyField.value.trim(),
    edit: (turn) => composer.edit(turn),
    act,
    running: (yes) => composer.setRunning(yes),
  },
);
const composer = new Composer(
  {
    form: part("composer"), field: part("question"), send: part("send"), stop: part("stop"), keys: part("keys"),
    editing: part("editing"), cancel: part("stop-editing"),
    images: { chooser: part("image"), button: part("add-image"), list: part("images") },
  },
  { send: ask, stop: () => chat.stop(), say: (text) => (part("said").textContent = text) },
);
/** Ids of the models that take images. */
let seeing = new Set();

/** Asks, if the settings can be sent. False leaves the message in its field. `own` are settings of this question alone. */
function ask(text, images = [], replaced = null, own = {}) {
  const invalid = firstInvalid(form);
  if (invalid) {
    panel.show(invalid);
    invalid.reportValidity();
    return false;
  }
  if (!form.elements.model.value) {
    void loadModels();
    return false;
  }
  void chat.ask(text, images, replaced, own);
  return true;
}

function act(way) {
  if (way.kind === "new") newChat();
  else panelOrPage(part(way.field));
}

function panelOrPage(field) {
  if (part("panel").contains(field)) panel.show(field);
  else field.focus();
}

function newChat() {
  chat.clear();
  composer.edit(null);
}

/** Shows what depends on settings. */
function reflect() {
  const { theme, response_format: format, tools } = readSettings(form);
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  part("schema-field").hidden = format !== "json_schema";
  part("tool-choice-field").hidden = !tools;
  part("format-flag").textContent = FORMATS[format];
  part("format-flag").hidden = !FORMATS[format];
  if (format === "json_schema" && !form.elements.schema.value) form.elements.schema.value = EXAMPLE_SCHEMA;
}

let loading = null;

/** Asks for the list of models. A later call takes the place of one that still waits. */
async function loadModels() {
  loading?.abort();
  const mine = (loading = new AbortController());
  const { model } = form.elements;
  try {
    const models = await listModels(keyField.value.trim(), mine.signal);
    const names = models.map(({ id }) => String(id));
    seeing = new Set(models.filter((one) => one.input_modalities?.includes?.("image")).map(({ id }) => String(id)));
    model.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    model.disabled = !names.length;
    if (names.includes(wantedModel)) model.value = wantedModel;
    if (!names.length) model.replaceChildren(element("option", { value: "" }, "No model"));
    composer.images.allow(seeing.has(model.value));
    notice(names.length ? null : { title: "The server has no model", next: "It may still be starting. Try again in a moment." });
    document.title = names.length ? `${model.value} · Penstock` : "Penstock";
  } catch (failure) {
    if (mine.signal.aborted) return;
    notice({ ...explain(failure), message: failure.message });
  }
}

/** What is wrong before anything was asked: no server, no key, no model. Null takes it away. */
function notice(what) {
  const place = part("notice");
  place.hidden = !what;
  place.replaceChildren();
  if (!what) return;
  const { title, message, next, ways = [{ kind: "again" }] } = what;
  place.append(
    icon("warning"),
    element(
      "div",
      {},
      element("p", { class: "title" }, title),
      message ? element("p", { class: "words" }, message) : null,
      element("p", {}, next),
      element("p", { class: "ways" },
        ...ways.map((way) => wayButton(way, way.kind === "again" ? () => void loadModels() : () => act(way)))),
    ),
  );
}

form.addEventListener("submit", (event) => event.preventDefault());
for (const happened of ["input", "change"]) {
  // On the document, because two of the form's fields stand elsewhere on the page.
  document.addEventListener(happened, ({ target }) => {
    if (target.form !== form || target === keyField) return;
    if (target === form.elements.model) {
      wantedModel = target.value;
      composer.images.allow(seeing.has(wantedModel));
      document.title = `${wantedModel} · Penstock`;
    }
    target.setCustomValidity("");
    if (target.name === "formatted") chat.setFormatted(target.checked);
    reflect();
    keepSettings(form);
  });
}
keyField.addEventListener("change", () => {
  keepKey(keyField.value.trim());
  void loadModels();
});
part("new-chat").addEventListener("click", newChat);
part("defaults").addEventListener("click", () => {
  const model = form.elements.model.value;
  const key = keyField.value;
  form.reset();
  form.elements.model.value = model;
  keyField.value = key; // a key is no setting that has a default
  chat.setFormatted(true);
  reflect();
  keepSettings(form);
});
part("starters").append(...STARTERS.map(({ text, tools }) => {
  const choose = () => {
    if (!ask(text, [], null, tools ? { tools } : {})) composer.fill(text);
  };
  return element("li", {}, element("button", { type: "button", onclick: choose }, text,
    tools ? element("span", { class: "with" }, icon("tool"), "with a demo tool") : null));
}));
reflect();
void loadModels();
if (!matchMedia("(pointer: coarse)").matches) part("question").focus(); // there it would open the keyboard
