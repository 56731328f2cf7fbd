"""Answers every prompt of a file, with a progress bar and limits.

    python examples/batch.py prompts.jsonl answers.jsonl --at-once 8 --max-tokens 100

Each line of the input is a JSON object with "prompt" and, if you like, "id". Each line of the output has the
"id", and the "text" and its "finish" reason, or an "error": one bad prompt does not end the others. Lines are
written as answers come, so an interrupted run can go on where it ended: prompts whose id the output has
already are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from penstock.runtime import AsyncEngine, Engine, EngineConfig, StoppingParams
from penstock.runtime.errors import GenerationError, RequestError


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON objects; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


async def answer(engine: AsyncEngine, prompt: str, stopping: StoppingParams) -> dict[str, Any]:
    """Generate an answer, and return what is written about it."""
    try:
        generation = await engine.generate(prompt, stopping=stopping)
    except (RequestError, GenerationError) as error:
        # Any other error says that the engine cannot serve anybody: then the run ends, and can go on later.
        return {"error": str(error)}
    return {"text": generation.text, "finish": generation.finish.reason.value}


async def answer_all(
    engine: AsyncEngine, prompts: list[dict[str, Any]], out: TextIO, at_once: int, stopping: StoppingParams
) -> None:
    """Answers the prompts, at most `at_once` of them at a time, and writes each answer when it is there."""
    places = asyncio.Semaphore(at_once)
    bar = tqdm(total=len(prompts), unit="prompt")

    async def one(item: dict[str, Any]) -> None:
        async with places:
            answered = await answer(engine, item["prompt"], stopping)
        out.write(json.dumps({"id": item["id"], **answered}, ensure_ascii=False) + "\n")
        out.flush()
        bar.update()

    with bar:
        async with asyncio.TaskGroup() as group:
            for item in prompts:
                group.create_task(one(item))


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer every prompt of a file.")
    parser.add_argument("input", type=Path, help='JSON lines with "prompt" and "id"')
    parser.add_argument("output", type=Path, help="JSON lines; answers are added to it")
    parser.add_argument("--model", default="demo", help="demo, a folder, or a Hugging Face id")
    parser.add_argument("--at-once", type=int, default=8, help="prompts in the engine at a time")
    parser.add_argument("--max-tokens", type=int, default=100, help="of each answer")
    parser.add_argument("--seconds", type=float, default=60.0, help="most time for one answer")
    options = parser.parse_args()
    prompts = [{"id": number, **item} for number, item in enumerate(read(options.input))]
    answered = {item["id"] for item in read(options.output)}
    todo = [item for item in prompts if item["id"] not in answered]
    stopping = StoppingParams(max_tokens=options.max_tokens, time_limit_s=options.seconds)
    config = EngineConfig(max_num_seqs=min(options.at_once, 64))
    with (
        Engine.from_pretrained(options.model, config) as engine,
        options.output.open("a", encoding="utf-8") as out,
    ):
        asyncio.run(answer_all(AsyncEngine(engine), todo, out, options.at_once, stopping))


if __name__ == "__main__":
    main()
