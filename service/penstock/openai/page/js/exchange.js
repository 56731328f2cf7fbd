// One question's way: ask the model, run the tools that it calls, tell it what they returned, until it has answered.

import { streamChat } from "./api.js";
import { addChunk, newAnswer } from "./answer.js";
import { requestBody } from "./request.js";
import { runTool } from "./tools.js";

/** How often the model may call tools for one question. A model that never stops calling would go on for ever. */
export const MOST_ROUNDS = 8;

/** Adds the model's answers to `turns`. `onBegin(answer)` and `onChange(answer)` are called as they come about.
 * A failure is kept in the answer that failed, and an abort of `signal` ends the answer as "stopped". */
export async function exchange({ turns, settings, key, signal, onBegin, onChange }) {
  for (let round = 1; ; round += 1) {
    const answer = newAnswer(performance.now());
    answer.body = requestBody(settings, turns);
    turns.push(answer);
    onBegin(answer);
    try {
      for await (const chunk of streamChat(answer.body, key, signal)) {
        addChunk(answer, chunk, performance.now());
        onChange(answer);
      }
      answer.state = "done";
    } catch (failure) {
      answer.state = signal.aborted ? "stopped" : "failed";
      if (!signal.aborted) answer.failure = failure;
    }
    if (answer.state === "done" && answer.finish !== "length") {
      for (const call of answer.calls) call.result = runTool(call.name, call.arguments);
    }
    onChange(answer);
    if (!answer.calls.length || answer.calls.some(({ result }) => result === null)) return;
    if (round === MOST_ROUNDS) {
      answer.limited = true;
      onChange(answer);
      return;
    }
  }
}
