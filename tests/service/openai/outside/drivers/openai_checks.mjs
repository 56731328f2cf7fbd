// What OpenAI's own Node client does with the OpenAI front.
//
//     node openai_checks.mjs URL MODEL KEY
//
// Prints one line of JSON for each check, as run_checks.py does.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, model, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 60_000 });
const QUESTION = "what is 3 + 4?";
const ANSWER = "3 + 4 = 7.";
const ASK = { role: "user", content: "what's the weather in Paris?" };
const WEATHER = '{"condition": "sunny", "celsius": 21}';
const Sum = z.object({ sum: z.number().int() });
const City = z.object({ city: z.string() });
const asked = { model, messages: [{ role: "user", content: QUESTION }], temperature: 0 };
const TOOL = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the weather in a city.",
    parameters: {
      type: "object",
      properties: { city: { type: "string" } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

const checks = {
  async models() {
    const found = [];
    for await (const one of client.models.list()) found.push(one.id);
    assert.deepEqual(found, [model]);
    assert.equal((await client.models.retrieve(model)).object, "model");
  },

  async chat() {
    const answer = await client.chat.completions.create(asked);
    assert.equal(answer.choices[0].message.content, ANSWER);
    assert.equal(answer.choices[0].finish_reason, "stop");
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
    assert.ok(answer._request_id);
  },

  async chat_chunks() {
    const stream = await client.chat.completions.create({
      ...asked,
      stream: true,
      stream_options: { include_usage: true },
    });
    let text = "";
    let last;
    for await (last of stream) {
      assert.equal(last.object, "chat.completion.chunk");
      text += last.choices[0]?.delta.content ?? "";
    }
    assert.equal(text, ANSWER);
    assert.ok(last.usage.completion_tokens > 0);
  },

  async chat_stream_helper() {
    const stream = client.chat.completions.stream(asked);
    let text = "";
    stream.on("content", (delta) => (text += delta));
    assert.equal((await stream.finalChatCompletion()).choices[0].message.content, ANSWER);
    assert.equal(text, ANSWER);
  },

  async chat_parse() {
    const answer = await client.chat.completions.parse({
      ...asked,
      response_format: zodResponseFormat(Sum, "sum"),
    });
    Sum.parse(answer.choices[0].message.parsed);
  },

  async chat_parse_in_a_stream() {
    const stream = client.chat.completions.stream({
      ...asked,
      response_format: zodResponseFormat(Sum, "sum"),
    });
    Sum.parse((await stream.finalChatCompletion()).choices[0].message.parsed);
  },

  async chat_parse_of_a_strict_tool() {
    const answer = await client.chat.completions.parse({
      ...asked,
      messages: [ASK],
      tools: [
        zodFunction({ name: "get_weather", description: "Get the weather in a city.", parameters: City }),
      ],
    });
    assert.deepEqual(answer.choices[0].message.tool_calls[0].function.parsed_arguments, { city: "Paris" });
  },

  async chat_tool_call_and_its_result() {
    const first = await client.chat.completions.create({ ...asked, messages: [ASK], tools: [TOOL] });
    const { message } = first.choices[0];
    assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { city: "Paris" });
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: WEATHER };
    const second = await client.chat.completions.create({
      ...asked,
      messages: [ASK, message, result],
      tools: [TOOL],
    });
    assert.match(second.choices[0].message.content, /sunny/);
  },

  async chat_run_tools() {
    const cities = [];
    const tool = {
      type: "function",
      function: {
        ...TOOL.function,
        parse: JSON.parse,
        function: ({ city }) => {
          cities.push(city);
          return WEATHER;
        },
      },
    };
    const runner = client.chat.completions.runTools({ ...asked, messages: [ASK], tools: [tool] });
    assert.match(await runner.finalContent(), /sunny/);
    assert.deepEqual(cities, ["Paris"]);
  },

  async chat_run_tools_in_a_stream() {
    const tool = {
      type: "function",
      function: { ...TOOL.function, parse: JSON.parse, function: () => WEATHER },
    };
    const runner = client.chat.completions.runTools({
      ...asked,
      messages: [ASK],
      tools: [tool],
      stream: true,
    });
    assert.match(await runner.finalContent(), /sunny/);
  },

  async chat_logprobs() {
    const answer = await client.chat.completions.create({ ...asked, logprobs: true, top_logprobs: 2 });
    const { content } = answer.choices[0].logprobs;
    assert.ok(content.map((entry) => entry.token).join("").startsWith(ANSWER));
    assert.ok(content.every((entry) => entry.top_logprobs.length === 2));
  },

  async completions() {
    const answer = await client.completions.create({
      model,
      prompt: ["Once upon a time", "One day"],
      max_tokens: 6,
    });
    assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
  },

  async completions_in_a_stream() {
    const stream = await client.completions.create({
      model,
      prompt: "Once upon a time",
      max_tokens: 6,
      stream: true,
    });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0].text;
    assert.ok(text);
  },

  async responses() {
    const answer = await client.responses.create({ model, input: QUESTION, temperature: 0 });
    assert.equal(answer.output_text, ANSWER);
    assert.equal(answer.status, "completed");
  },

  async responses_events() {
    const stream = await client.responses.create({ model, input: QUESTION, temperature: 0, stream: true });
    const kinds = [];
    let text = "";
    for await (const event of stream) {
      assert.equal(event.sequence_number, kinds.length);
      kinds.push(event.type);
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.equal(text, ANSWER);
    assert.equal(kinds.at(0), "response.created");
    assert.equal(kinds.at(-1), "response.completed");
  },

  async responses_stream_helper() {
    const stream = client.responses.stream({ model, input: QUESTION, temperature: 0 });
    assert.equal((await stream.finalResponse()).output_text, ANSWER);
  },

  async responses_parse() {
    const answer = await client.responses.parse({
      model,
      input: QUESTION,
      temperature: 0,
      text: { format: zodTextFormat(Sum, "sum") },
    });
    Sum.parse(answer.output_parsed);
  },

  async responses_tool_call_and_its_result() {
    const tools = [{ type: "function", strict: true, ...TOOL.function }];
    const first = await client.responses.create({ model, input: [ASK], tools, temperature: 0 });
    const [call] = first.output;
    assert.deepEqual(JSON.parse(call.arguments), { city: "Paris" });
    const result = { type: "function_call_output", call_id: call.call_id, output: WEATHER };
    const input = [ASK, ...first.output, result];
    const second = await client.responses.create({ model, input, tools, temperature: 0 });
    assert.match(second.output_text, /sunny/);
  },

  async stream_that_is_aborted() {
    const stream = await client.chat.completions.create({
      ...asked,
      messages: [{ role: "user", content: "tell me a story" }],
      stream: true,
    });
    for await (const _ of stream) break;
    assert.ok(stream.controller.signal.aborted);
    assert.equal((await client.chat.completions.create(asked)).choices[0].message.content, ANSWER);
  },

  async error_of_a_bad_value() {
    await assert.rejects(client.chat.completions.create({ ...asked, top_p: 2 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError, String(error));
      assert.equal(error.type, "invalid_request_error");
      assert.equal(error.param, "top_p");
      return true;
    });
  },

  async error_of_an_unknown_model() {
    await assert.rejects(client.chat.completions.create({ ...asked, model: "no-such-model" }), (error) => {
      assert.ok(error instanceof OpenAI.NotFoundError, String(error));
      assert.equal(error.code, "model_not_found");
      return true;
    });
  },

  async error_of_a_wrong_key() {
    const stranger = new OpenAI({ baseURL, apiKey: "psk_none_wrong", maxRetries: 0 });
    await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
  },
};

for (const [check, run] of Object.entries(checks)) {
  let error = null;
  try {
    await run();
  } catch (raised) {
    error = `${raised.name}: ${raised.message}`;
  }
  console.log(JSON.stringify({ check, error }));
}
