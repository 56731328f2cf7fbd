// Says in words what went wrong, and what to do next. Nothing here touches the page.

/** From a parameter of the API to the field of the settings that sets it. */
const FIELDS = {
  temperature: "temperature", top_p: "top_p", top_k: "top_k", min_p: "min_p", seed: "seed", max_tokens: "max_tokens",
  max_completion_tokens: "max_tokens", presence_penalty: "presence_penalty", frequency_penalty: "frequency_penalty",
  repetition_penalty: "repetition_penalty", stop: "stop_strings", reasoning_effort: "reasoning_effort",
  "response_format.json_schema": "schema", response_format: "response_format", tool_choice: "tool_choice",
  tools: "tools", model: "model",
};

const AGAIN = { kind: "again" };
/** The ways on from what is too long: to ask the same again would fail again. */
const SHORTER = [{ kind: "edit" }, { kind: "new" }];

/** {title, next, ways}: `ways` are what is offered: {kind: "again"}, {kind: "field", field}, {kind: "edit"}, {kind: "new"}. */
export function explain(failure) {
  const { kind, status, code, param } = failure;
  if (kind === "network") {
    return say("The server could not be reached", "Check that it is running and that you are online, then try again.");
  }
  if (kind === "broken") return say("The connection broke", "What had arrived is kept. Try again.");
  if (kind === "stream") return say("The answer broke off", "What had arrived is kept. Try again.");
  if (kind === "unreadable") {
    return say("Something else answered", "The reply was not that of an OpenAI-compatible server. Check what serves this address.");
  }
  if (status === 401) {
    return say("The server wants a valid API key", "Enter your key in the settings, then try again.", field("key"));
  }
  if (status === 403) {
    return say("This API key may not do that", "Use another key, or ask who runs the server.", field("key"));
  }
  if (code === "context_length_exceeded") {
    return say("The conversation is too long for this model", "Shorten your message, or begin a new chat.", SHORTER);
  }
  if (status === 404 && (param === "model" || code === "model_not_found")) {
    return say("The server does not have this model", "Choose another model.", field("model"));
  }
  if (status === 404) return say("The server does not know this address", "Check what serves this page.");
  if (status === 413) {
    return say("The conversation is too large for the server", "Shorten your message, or begin a new chat.", SHORTER);
  }
  if (status === 429) return say("The server is busy with others", `It asks you to wait. Try again ${later(failure)}.`);
  if (status === 503) return say("The server is not ready", `It may be starting or stopping. Try again ${later(failure)}.`);
  if (status === 504 || status === 408) {
    return say("The request took too long", "Ask for fewer tokens, or try again when the server is less busy.");
  }
  if (status >= 400 && status < 500) {
    const name = fieldOf(param);
    return name
      ? say("The server refused a setting", "Change the setting, then try again.", field(name))
      : say("The server refused the request", "Change the message or the settings, then try again.");
  }
  return say("The server failed", "Try again. If it happens again, tell who runs the server the request's id.");
}

/** The field that sets a parameter, such as "schema" for "response_format.json_schema.schema"; "" where none does. */
export function fieldOf(param) {
  const found = Object.keys(FIELDS).find((name) => param === name || param.startsWith(`${name}.`) || param.startsWith(`${name}[`));
  return found ? FIELDS[found] : "";
}

/** Trying again is offered where it may help. */
function say(title, next, ways = [AGAIN]) {
  return { title, next, ways };
}

function field(name) {
  return [AGAIN, { kind: "field", field: name }];
}

function later({ retryAfter }) {
  if (!retryAfter) return "in a moment";
  return retryAfter === 1 ? "in a second" : `in ${Math.ceil(retryAfter)} seconds`;
}
