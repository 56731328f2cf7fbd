"""Write the text in which a lookup finds what the demo model may write next (`--lookup-text demo`).

    python -m tools.demo_model.write

The demo model itself writes it, greedily, from the beginnings of stories of the grammar, each up to its end.
"""

from __future__ import annotations

import argparse
import random

from penstock.runtime import Engine, EngineConfig, SamplingParams, StoppingParams
from penstock.runtime.loading.hub import DEMO_TEXT
from tools.demo_model import stories

_SEED = 7
_BEGINNING_TOKENS = 12
_MOST_TOKENS = 300


def main() -> None:
    """Write the file, and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stories", type=int, default=300, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    rng = random.Random(_SEED)
    with Engine.from_pretrained("demo", EngineConfig(speculation="off")) as engine:
        text = engine.text
        assert text is not None, "the demo model has a tokenizer"
        prompts = [text.encode(stories.story(rng, plots=1))[:_BEGINNING_TOKENS] for _ in range(args.stories)]
        made = engine.generate(
            prompts,
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingParams(max_tokens=_MOST_TOKENS),
        )
    written = [text.decode(prompt) + each.text for prompt, each in zip(prompts, made, strict=True)]
    DEMO_TEXT.write_text("\n\n".join(written) + "\n", encoding="utf-8")
    num_tokens = len(text.encode(DEMO_TEXT.read_text(encoding="utf-8")))
    print(f"{len(written)} stories, {num_tokens} tokens, {DEMO_TEXT.stat().st_size} bytes in {DEMO_TEXT}")


if __name__ == "__main__":
    main()
