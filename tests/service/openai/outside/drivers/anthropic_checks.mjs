// What Anthropic's own Node client does with the OpenAI front.
//
//     node anthropic_checks.mjs URL MODEL KEY
//
// Prints one line of JSON for each check, as run_checks.py does.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

const [url, model, apiKey] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey, maxRetries: 0, timeout: 60_000 });
const ANSWER = "3 + 4 = 7.";
const ASK = { role: "user", content: "what's the weather in Paris?" };
const WEATHER = '{"condition": "sunny", "celsius": 21}';
const asked = { model, max_tokens: 60, messages: [{ role: "user", content: "what is 3 + 4?" }] };
const TOOL = {
  name: "get_weather",
  description: "Get the weather in a city.",
  input_schema: {
    type: "object",
    properties: { city: { type: "string" } },
    required: ["city"],
    additionalProperties: false,
  },
};

const checks = {
  async models() {
    const found = [];
    for await (const one of client.models.list()) found.push([one.type, one.id]);
    assert.deepEqual(found, [["model", model]]);
    assert.equal((await client.models.retrieve(model)).display_name, model);
  },

  async message() {
    const message = await client.messages.create(asked);
    assert.deepEqual(message.content, [{ type: "text", text: ANSWER }]);
    assert.equal(message.stop_reason, "end_turn");
    assert.ok(message._request_id);
  },

  async events() {
    let text = "";
    const kinds = [];
    for await (const event of await client.messages.create({ ...asked, stream: true })) {
      kinds.push(event.type);
      if (event.type === "content_block_delta") text += event.delta.text;
    }
    assert.equal(text, ANSWER);
    assert.equal(kinds[0], "message_start");
    assert.equal(kinds.at(-1), "message_stop");
  },

  async stream_helper() {
    const stream = client.messages.stream(asked);
    let text = "";
    stream.on("text", (delta) => (text += delta));
    assert.equal(await stream.finalText(), ANSWER);
    assert.equal(text, ANSWER);
    assert.ok((await stream.finalMessage()).usage.output_tokens > 0);
  },

  async count_tokens() {
    const { max_tokens, ...conversation } = asked;
    const { input_tokens } = await client.messages.countTokens(conversation);
    const { usage } = await client.messages.create(asked);
    assert.equal(input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
  },

  async a_tool_is_called_in_a_stream_and_its_result_told() {
    const stream = client.messages.stream({ ...asked, messages: [ASK], tools: [TOOL] });
    const message = await stream.finalMessage();
    const call = message.content.at(-1);
    assert.equal(message.stop_reason, "tool_use");
    assert.deepEqual([call.type, call.input], ["tool_use", { city: "Paris" }]);
    const last = await client.messages.create({
      ...asked,
      tools: [TOOL],
      messages: [
        ASK,
        { role: "assistant", content: message.content },
        { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: WEATHER }] },
      ],
    });
    assert.match(last.content[0].text, /21/);
  },

  async parse() {
    const format = zodOutputFormat(z.object({ sum: z.number().int() }));
    const message = await client.messages.parse({ ...asked, output_config: { format } });
    assert.ok(Number.isInteger(message.parsed_output.sum));
  },

  async leaving_a_stream() {
    const stream = client.messages.stream(asked);
    stream.on("text", () => stream.abort());
    await assert.rejects(stream.finalMessage(), Anthropic.APIUserAbortError);
  },

  async errors() {
    await assert.rejects(client.messages.create({ ...asked, model: "other" }), Anthropic.NotFoundError);
    await assert.rejects(client.messages.create({ ...asked, max_tokens: 0 }), (error) => {
      assert.ok(error instanceof Anthropic.BadRequestError);
      assert.match(error.message, /max_tokens/);
      return Boolean(error.requestID);
    });
    const stranger = client.withOptions({ apiKey: "psk_none" });
    await assert.rejects(stranger.messages.create(asked), Anthropic.AuthenticationError);
  },
};

for (const [check, run] of Object.entries(checks)) {
  let error = null;
  try {
    await run();
  } catch (raised) {
    error = String(raised?.stack ?? raised);
  }
  console.log(JSON.stringify({ check, error }));
}
