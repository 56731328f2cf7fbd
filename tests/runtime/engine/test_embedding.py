"""The embedding API with text: `Engine.generate` and `Engine.stream` on a golden checkpoint, without a
server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.runtime import Engine, EngineConfig, SamplingParams, StoppingParams
from penstock.runtime.errors import InvalidRequest
from penstock.runtime.requests.request import Finish, FinishReason
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.models.toy import toy_engine

pytestmark = pytest.mark.ci

GOLDEN = Path(__file__).parents[2] / "golden" / "qwen3"
CASE = json.loads((GOLDEN / "expected.json").read_text())["cases"][1]
GREEDY = SamplingParams(temperature=0.0)
STOPPING = StoppingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine.from_pretrained(
        str(GOLDEN),
        EngineConfig(
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=128,
            compilation_cache=TEST_CACHE,
            show_progress=False,
        ),
    )
    engine.start()
    yield engine
    assert engine.load().pages_used == 0
    engine.shutdown()


def expected_text(engine: Engine) -> str:
    """Return the text of PyTorch's tokens."""
    assert engine.text is not None
    return engine.text.decode(CASE["tokens"])


def test_tokens_and_text_are_pytorchs(engine: Engine) -> None:
    result = engine.generate(CASE["prompt"], sampling=GREEDY, stopping=STOPPING)
    assert list(result.token_ids) == CASE["tokens"]
    assert result.text == expected_text(engine)
    assert result.finish == Finish(FinishReason.MAX_TOKENS)
    assert 0 <= result.timing.queue <= (result.timing.time_to_first_token or -1) <= result.timing.total


def test_a_text_prompt_is_tokenized(engine: Engine) -> None:
    assert engine.text is not None
    text = "def loads(s):"
    by_text = engine.generate(text, sampling=GREEDY, stopping=STOPPING)
    assert (
        by_text.token_ids
        == engine.generate(engine.text.encode(text), sampling=GREEDY, stopping=STOPPING).token_ids
    )


def test_deltas_join_to_the_text(engine: Engine) -> None:
    parts = list(engine.stream(CASE["prompt"], sampling=GREEDY, stopping=STOPPING))
    assert len(parts) > 1  # fewer parts than tokens, because decode steps may come in windows
    assert "".join(part.delta for part in parts) == expected_text(engine)
    assert [token for part in parts for token in part.token_ids] == CASE["tokens"]
    *before, last = parts
    assert (last.finish, last.timing is not None) == (Finish(FinishReason.MAX_TOKENS), True)
    assert all(part.finish is None and part.timing is None for part in before)


def test_values_of_a_stream_repeat_nothing(engine: Engine) -> None:
    """The values of a stream together hold each token once: none repeats what came before it. So the cost
    grows with the output's length and not with its square.
    """
    for count in (10, 100):
        stopping = StoppingParams(max_tokens=count, ignore_eos=True)
        parts = list(engine.stream(CASE["prompt"][:4], sampling=GREEDY, stopping=stopping, logprobs=0))
        whole = engine.generate(CASE["prompt"][:4], sampling=GREEDY, stopping=stopping, logprobs=0)
        assert sum(len(part.token_ids) for part in parts) == len(whole.token_ids) == count
        assert whole.logprobs is not None
        assert sum(len(part.logprobs) for part in parts) == len(whole.logprobs) == count
        assert sum(len(part.delta) for part in parts) == len(whole.text)
        assert [entry for part in parts for entry in part.logprobs] == list(whole.logprobs)


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_cuts_text_and_tokens(engine: Engine, include_stop: bool) -> None:
    whole = expected_text(engine)
    stop = whole[14:17]
    end = whole.index(stop) + (len(stop) if include_stop else 0)
    stopping = StoppingParams(max_tokens=24, ignore_eos=True, stop=(stop,), include_stop=include_stop)
    result = engine.generate(CASE["prompt"], sampling=GREEDY, stopping=stopping)
    assert result.text == whole[:end]
    assert result.finish == Finish(FinishReason.STOP, stop=stop)
    tokens = list(result.token_ids)
    assert tokens == CASE["tokens"][: len(tokens)]
    assert len(tokens) < 24


def test_defaults_come_from_the_checkpoint(engine: Engine) -> None:
    """The golden's generation_config names no sampling values, so the temperature is 1 and unseeded runs
    differ.
    """
    assert engine.info.defaults.temperature == 1.0
    runs = {engine.generate(CASE["prompt"], stopping=STOPPING).token_ids for _ in range(3)}
    assert len(runs) > 1


def test_text_needs_a_tokenizer() -> None:
    engine = toy_engine(start=False)
    with pytest.raises(InvalidRequest, match="no tokenizer; pass token ids"):
        engine.generate("text")
    with pytest.raises(InvalidRequest, match=r"stopping\.stop"):
        engine.generate([1], stopping=StoppingParams(stop=("x",)))
    engine.shutdown()
