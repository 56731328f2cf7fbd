"""A golden in the engine, prompt by prompt and then all at once, beside PyTorch's tokens.

A step of the run: `python -m tools.on_device.goldens NAME --cache FOLDER`. It computes in float32 and lets
the device multiply in full float32, too, as PyTorch did on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from penstock.runtime import Engine, SamplingParams, StoppingParams
from tests.support.goldens import GOLDEN, small_config
from tools.on_device.facts import wanted_device
from tools.on_device.steps import Result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.on_device.goldens", description=__doc__)
    parser.add_argument("name", help="a folder of tests/golden")
    parser.add_argument("--cache", type=Path, required=True, help="where compiled programs are kept")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    wanted_device()
    result = Result()
    result.say("it was loading or compiling")
    # Windows of one and of two steps: each further length is a program more, which takes seconds to compile.
    config = dataclasses.replace(
        small_config(args.name), compilation_cache=args.cache, native="off", max_decode_steps=2
    )
    began = time.perf_counter()
    engine = Engine.from_pretrained(str(GOLDEN / args.name), config)
    loaded = time.perf_counter()
    engine.start()
    compile_s = time.perf_counter() - loaded
    result.add(device=", ".join(engine.info.devices), load_s=loaded - began, compile_s=compile_s)
    result.say(f"compiled in {compile_s:.1f} s, and no tokens came")
    cases = json.loads((GOLDEN / args.name / "expected.json").read_text(encoding="utf-8"))["cases"]
    problems: list[str] = []
    furthest = 0.0
    for how, group in [*(("alone", [case]) for case in cases), ("with the others", cases)]:
        made = engine.generate(
            [case["prompt"] for case in group],
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingParams(max_tokens=len(cases[0]["tokens"]), ignore_eos=True),
            logprobs=0,
            return_text=False,
        )
        for case, generation in zip(group, made, strict=True):
            (output,) = generation.outputs
            logprobs = [each.sampled for each in output.logprobs or ()]
            problem, error = compared(output.token_ids, logprobs, case["tokens"], case["logprobs"])
            furthest = max(furthest, error)
            if problem:
                problems.append(f"prompt of {len(case['prompt'])} tokens {how}: {problem}")
    result.add(compiles_after_warmup=engine.compiles_after_warmup)
    engine.shutdown()
    result.add(**{"largest error of a log-probability": furthest})
    verdict = "; ".join(problems) or f"equal, log-probabilities to {furthest:.1g}"
    result.say(f"{verdict}; compiled in {compile_s:.1f} s")
    if problems:
        raise SystemExit("AssertionError: the tokens are not PyTorch's")


def compared(
    tokens: Sequence[int], logprobs: Sequence[float], wanted: Sequence[int], wanted_logprobs: Sequence[float]
) -> tuple[str, float]:
    """Say what the first token is that differs (empty: none does), and how far log-probabilities are from
    those that are wanted before it.
    """
    pairs = zip(tokens, wanted, strict=False)
    common = min(len(tokens), len(wanted))
    first = next((at for at, (got, want) in enumerate(pairs) if got != want), common)
    before = list(zip(logprobs, wanted_logprobs, strict=False))[:first]
    error = max((abs(got - want) for got, want in before), default=0.0)
    if first < common:
        return f"token {first} is {tokens[first]}, and PyTorch's is {wanted[first]}", error
    if len(tokens) != len(wanted):
        return f"there are {len(tokens)} tokens, and PyTorch's are {len(wanted)}", error
    return "", error


if __name__ == "__main__":
    main()
