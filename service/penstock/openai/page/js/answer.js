// What the model has answered so far, built up from the chunks of a stream. Nothing here touches the page.

/** An answer before its first chunk. `now` is in milliseconds, as performance.now() gives it. */
export function newAnswer(now) {
  return {
    role: "assistant",
    state: "waiting", // then "streaming", and at last "done", "stopped" or "failed"
    reasoning: "",
    text: "",
    refusal: "",
    calls: [], // {id, name, arguments, result}: `result` is null until the tool has run
    finish: "",
    failure: null,
    started: now,
    first: null, // when the first piece of output came
    thought: null, // when the reasoning was over
    last: null, // when the newest piece came
    firstTokens: 0, // tokens that had come with the first piece
    usage: null,
    body: null, // the request, so that it can be shown as a command
  };
}

/** Adds a chunk to the answer. */
export function addChunk(answer, chunk, now) {
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  if (chunk.usage) answer.usage = chunk.usage;
  const thought = delta.reasoning ?? delta.reasoning_content ?? "";
  const said = delta.content ?? "";
  if (thought || said || delta.refusal || delta.tool_calls?.length) {
    if (answer.first === null) {
      answer.first = now;
      answer.firstTokens = chunk.usage?.completion_tokens ?? 1;
      answer.state = "streaming";
    }
    answer.last = now;
    answer.reasoning += thought;
    if (!thought && answer.reasoning && answer.thought === null) answer.thought = now;
    answer.text += said;
    answer.refusal += delta.refusal ?? "";
    for (const piece of delta.tool_calls ?? []) addCall(answer.calls, piece);
  }
  if (choice?.finish_reason) answer.finish = choice.finish_reason;
}

function addCall(calls, { index, id, function: called }) {
  const at = Number.isInteger(index) && index >= 0 && index <= calls.length ? index : calls.length;
  const call = (calls[at] ??= { id: "", name: "", arguments: "", result: null });
  call.id ||= id ?? "";
  call.name += called?.name ?? "";
  call.arguments += called?.arguments ?? "";
}

/** A rate over less time than this, in milliseconds, would say more of the network than of the model. */
const LEAST_SPAN = 20;

/** Tokens per second since the first piece. What came with that is not counted: it took the time until then. Of a short
 * answer, which came all at once, it is the rate from the question to the end. */
function rateOf({ started, first, last, firstTokens }, tokens, running) {
  if (first === null) return null;
  if (tokens > firstTokens && last - first >= LEAST_SPAN) return ((tokens - firstTokens) * 1000) / (last - first);
  return running || last === started ? null : (tokens * 1000) / (last - started);
}

/** Tokens, rate and times of an answer. What is not known is null. Times are in milliseconds. */
export function figures(answer, now) {
  const tokens = answer.usage?.completion_tokens ?? null;
  const running = answer.state === "waiting" || answer.state === "streaming";
  return {
    tokens,
    promptTokens: answer.usage?.prompt_tokens ?? null,
    cachedTokens: answer.usage?.prompt_tokens_details?.cached_tokens ?? null,
    firstToken: answer.first === null ? null : answer.first - answer.started,
    rate: tokens ? rateOf(answer, tokens, running) : null,
    waited: answer.state === "waiting" ? now - answer.started : null,
    thinking: answer.reasoning ? (answer.thought ?? (running ? now : (answer.last ?? now))) - answer.first : null,
    running,
  };
}
