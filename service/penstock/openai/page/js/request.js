// Makes requests of settings and turns. Nothing here touches the page.

import { DEFINITIONS } from "./tools.js";

const NUMBERS = [
  "temperature", "top_p", "max_tokens", "seed", "top_k", "min_p",
  "presence_penalty", "frequency_penalty", "repetition_penalty",
];

/** The body of a request for the next answer. What a setting leaves open is left out: the server decides then. */
export function requestBody(settings, turns) {
  const body = { model: settings.model, messages: messages(settings.system, turns) };
  for (const name of NUMBERS) if (settings[name] !== null) body[name] = settings[name];
  if (settings.stop.length) body.stop = settings.stop;
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  if (settings.response_format === "json_object") body.response_format = { type: "json_object" };
  if (settings.response_format === "json_schema") {
    body.response_format = {
      type: "json_schema",
      json_schema: { name: "answer", strict: true, schema: JSON.parse(settings.schema) },
    };
  }
  if (settings.tools) {
    body.tools = DEFINITIONS;
    // A model that must call could never answer from what the tool returned: it must call once for a question.
    const called = turns.at(-1)?.role === "assistant";
    body.tool_choice = called && settings.tool_choice === "required" ? "auto" : settings.tool_choice;
  }
  // Usage comes with every chunk, so that the rate can be shown while the answer is still coming.
  body.stream = true;
  body.stream_options = { include_usage: true, continuous_usage_stats: true };
  return body;
}

function messages(system, turns) {
  const list = system.trim() ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    if (turn.role === "user") list.push({ role: "user", content: content(turn) });
    else list.push(...assistantMessages(turn));
  }
  return list;
}

/** A text alone stays a text; images come before what is asked of them. */
function content({ text, images }) {
  if (!images.length) return text;
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

function assistantMessages(answer) {
  if (!answer.text && !answer.calls.length) return []; // it failed, or was stopped, before it said anything
  const message = { role: "assistant", content: answer.text };
  if (answer.reasoning) message.reasoning = answer.reasoning;
  if (!answer.calls.length) return [message];
  message.tool_calls = answer.calls.map(({ id, name, arguments: text }) => ({
    id, type: "function", function: { name, arguments: text || "{}" },
  }));
  // Every call needs a result, or the conversation could not go on.
  const results = answer.calls.map(({ id, result }) => ({
    role: "tool", tool_call_id: id, content: result ?? "The user stopped before this tool ran.",
  }));
  return [message, ...results];
}

/** A line for a shell that sends the same request. The key is not in it: it comes from the environment. */
export function curl(body, url, withKey) {
  const quoted = `'${JSON.stringify(body, null, 2).replaceAll("'", `'\\''`)}'`;
  const key = withKey ? ' -H "Authorization: Bearer $OPENAI_API_KEY"' : "";
  return `curl -N ${url} -H 'Content-Type: application/json'${key} -d ${quoted}`;
}
