// The settings of the form: reading, checking and keeping them. The key is not among them: it has no name in the
// form, and is kept only as long as the tab is open.

const KEPT = "penstock.settings";
const KEY = "penstock.key";
const TEXTS = ["model", "system", "reasoning_effort", "response_format", "schema", "tool_choice", "theme"];
const SWITCHES = ["tools", "formatted"];
const NUMBERS = [
  "temperature", "top_p", "max_tokens", "seed", "top_k", "min_p",
  "presence_penalty", "frequency_penalty", "repetition_penalty",
];

export const EXAMPLE_SCHEMA = `{
  "type": "object",
  "properties": {
    "answer": {"type": "string"}
  },
  "required": ["answer"],
  "additionalProperties": false
}`;

/** The settings of the form. A number that is left empty is null; stop strings are a list. */
export function readSettings(form) {
  const settings = { stop: form.elements.stop.value.split("\n").filter((line) => line !== "") };
  for (const name of TEXTS) settings[name] = form.elements[name].value;
  for (const name of SWITCHES) settings[name] = form.elements[name].checked;
  for (const name of NUMBERS) {
    const { value } = form.elements[name];
    settings[name] = value === "" ? null : Number(value);
  }
  return settings;
}

/** The first element of the form that holds something that cannot be sent, or null. */
export function firstInvalid(form) {
  const { schema, response_format: format } = form.elements;
  schema.setCustomValidity(format.value === "json_schema" ? wrongSchema(schema.value) : "");
  return [...form.elements].find((element) => element.willValidate && !element.checkValidity()) ?? null;
}

function wrongSchema(text) {
  try {
    const value = JSON.parse(text);
    return value && typeof value === "object" && !Array.isArray(value) ? "" : "A JSON Schema is a JSON object.";
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
}

/** Keeps the form's values for the next visit. */
export function keepSettings(form) {
  const values = readSettings(form);
  store(() => localStorage.setItem(KEPT, JSON.stringify({ ...values, stop: form.elements.stop.value })));
}

/** Puts the values of an earlier visit into the form. What does not fit, from an older version, is left out. */
export function restoreSettings(form) {
  const kept = store(() => JSON.parse(localStorage.getItem(KEPT) ?? "{}")) ?? {};
  for (const name of [...TEXTS, "stop"]) {
    if (name !== "model" && typeof kept[name] === "string") setValue(form.elements[name], kept[name]);
  }
  for (const name of SWITCHES) if (typeof kept[name] === "boolean") form.elements[name].checked = kept[name];
  for (const name of NUMBERS) if (Number.isFinite(kept[name])) form.elements[name].value = String(kept[name]);
  return typeof kept.model === "string" ? kept.model : "";
}

function setValue(element, value) {
  const before = element.value;
  element.value = value;
  if (value && element.value === "") element.value = before; // a select that has no such option any more
}

export function keptKey() {
  return store(() => sessionStorage.getItem(KEY)) ?? "";
}

export function keepKey(key) {
  store(() => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)));
}

/** Storage may be switched off, full, or hold something unreadable. The page works without it. */
function store(action) {
  try {
    return action();
  } catch {
    return null;
  }
}
