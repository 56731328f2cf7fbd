// The two calls that this page makes of the server, and the one kind of error that they end with.

import { eventData } from "./sse.js";

/** Why a call failed. `kind` is "http" (the server refused), "stream" (it failed midway), "network" (it was not
 * reached), "broken" (the connection ended before the answer did) or "unreadable" (something else answered). */
export class Failure extends Error {
  constructor(kind, { status = 0, message = "", type = "", param = "", code = "", retryAfter = 0, requestId = "" } = {}) {
    super(message);
    Object.assign(this, { kind, status, type, param, code, retryAfter, requestId });
  }
}

/** The models that the server has, as /v1/models lists them. */
export async function listModels(key, signal) {
  const response = await call("v1/models", { headers: headers(key), signal });
  const list = await response.json().catch(() => null);
  if (!Array.isArray(list?.data)) throw new Failure("unreadable", { status: response.status });
  return list.data;
}

/** Yields the chunks of one streamed answer. Raises Failure, or an AbortError once `signal` is aborted: then the
 * connection is closed, by which the server knows that it can free the request. */
export async function* streamChat(body, key, signal) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(key), "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const requestId = response.headers.get("x-request-id") ?? "";
  if (!response.headers.get("content-type")?.startsWith("text/event-stream")) {
    throw new Failure("unreadable", { status: response.status, requestId });
  }
  try {
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const chunk = parsed(data, requestId);
      if (chunk.error) throw new Failure("stream", { ...fields(chunk.error), requestId });
      yield chunk;
    }
  } catch (error) {
    if (error instanceof Failure || signal.aborted) throw error;
    throw new Failure("broken", { message: String(error.message ?? error), requestId });
  }
  throw new Failure("broken", { requestId });
}

async function call(path, options) {
  let response;
  try {
    // Relative to the page, so that it works behind a proxy that serves the page under a prefix.
    response = await fetch(new URL(path, document.baseURI), { ...options, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Failure("network", { message: String(error.message ?? error) });
  }
  if (response.ok) return response;
  const text = await response.text().catch(() => "");
  let error = null;
  try {
    error = JSON.parse(text).error;
  } catch {
    // A proxy in between may answer with a page of its own; the status says enough.
  }
  throw new Failure("http", {
    ...fields(error ?? {}),
    status: response.status,
    retryAfter: Number(response.headers.get("retry-after")) || 0,
    requestId: response.headers.get("x-request-id") ?? "",
  });
}

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** The parts of OpenAI's error envelope, as strings whatever the server put there. */
function fields({ message, type, param, code }) {
  return { message: text(message), type: text(type), param: text(param), code: text(code) };
}

function text(value) {
  return value === null || value === undefined ? "" : String(value);
}

function parsed(data, requestId) {
  try {
    const chunk = JSON.parse(data);
    if (chunk && typeof chunk === "object") return chunk;
  } catch {
    // Falls through to the same error as a number or a list.
  }
  throw new Failure("broken", { message: "an event of the stream was no JSON object", requestId });
}
