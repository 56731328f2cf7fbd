"""A conversation in the terminal with a model in this process.

    python examples/chat.py --model demo --system "Answer in one sentence."

What you type is a turn; an empty line or the end of the input ends the program. The model may call one tool,
`get_time`, whose result goes back to it.
"""

from __future__ import annotations

import argparse
import datetime as dt
from collections.abc import Iterable

from penstock.runtime import ChatTurn, Engine, EngineConfig, Generation, StoppingParams, Tool

CLOCK = Tool("get_time", "Get the time of day.")
MOST_CALLS = 4
"""In one answer: a model that only ever calls is stopped."""


def run_tool(name: str) -> str:
    """Return the result of a call, as the model gets to see it."""
    if name != CLOCK.name:
        return f"There is no tool {name!r}."
    return dt.datetime.now().astimezone().strftime("%H:%M")


def answer(engine: Engine, messages: list[ChatTurn], max_tokens: int) -> Generation:
    """Print the model's answer as it comes."""
    stopping = StoppingParams(max_tokens=max_tokens)
    with engine.chat(messages, tools=[CLOCK], stopping=stopping, stream=True) as stream:
        for delta in stream:
            print(delta.delta, end="", flush=True)
        print()
        return stream.result()


def turn(engine: Engine, messages: list[ChatTurn], max_tokens: int) -> None:
    """One answer, with the calls of tools that it takes. All turns are added to `messages`."""
    for _ in range(MOST_CALLS):
        generation = answer(engine, messages, max_tokens)
        messages.append(generation.message)
        if not generation.tool_calls:
            break
        for call in generation.tool_calls:
            print(f"[{call.name} {call.arguments_json}]")
            messages.append(call.result(run_tool(call.name)))
    speed = generation.outputs[0].tokens_per_second
    print(f"({generation.usage.completion_tokens} tokens, {speed:.0f} a second)")


def lines() -> Iterable[str]:
    """Yield what the user types, up to an empty line."""
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if not line:
            return
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description="Talk with a model.")
    parser.add_argument("--model", default="demo", help="demo, a folder, or a Hugging Face id")
    parser.add_argument("--system", default="", help="what the model is told before the conversation")
    parser.add_argument("--max-tokens", type=int, default=200, help="of each answer")
    options = parser.parse_args()
    messages = [ChatTurn("system", options.system)] if options.system else []
    with Engine.from_pretrained(options.model, EngineConfig(max_num_seqs=4)) as engine:
        for line in lines():
            messages.append(ChatTurn("user", line))
            turn(engine, messages, options.max_tokens)


if __name__ == "__main__":
    main()
