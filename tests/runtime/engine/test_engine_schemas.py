"""Structured output on real models: jsonschema accepts what the demo model or random weights write under a
schema, and other rows in the same steps write what they would write alone.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from penstock.runtime import Engine, EngineConfig, StoppingParams
from penstock.runtime.errors import NonFiniteLogits
from penstock.runtime.loading.hub import resolve_model
from penstock.runtime.loop.interface import InFlightPolicy
from penstock.runtime.requests.constraint import TokenConstraint, mask_words
from penstock.runtime.requests.grammar import Grammar
from penstock.runtime.requests.request import FinishReason, Request
from penstock.runtime.requests.sampling import ResolvedSampling
from tests.support.batch import Answer, answers
from tests.support.collector import Collector, at_gate
from tests.support.models.compilation_cache import TEST_CACHE
from tests.support.models.random_model import write_random_model
from tests.support.schemas import allowed_ids, corpus, violations

pytestmark = pytest.mark.ci

MAX_TOKENS = 400


@pytest.fixture(
    scope="module",
    # Random weights try more of a grammar than those that have learned to write sentences.
    params=[pytest.param("demo", marks=pytest.mark.sweep("schemas on the demo model")), "random"],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the model's name or folder."""
    if request.param == "demo":
        return "demo"
    folder = tmp_path_factory.mktemp("random")
    write_random_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[Engine]:
    config = EngineConfig(
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=512,
        page_size=16,
        compilation_cache=TEST_CACHE,
        show_progress=False,
    )
    engine = Engine.from_pretrained(model, config)
    engine.start()
    yield engine
    assert engine.ready
    assert engine.compiles_after_warmup == 0
    assert engine.load().pages_used == 0
    engine.shutdown()


def constraint(engine: Engine, grammar: Grammar) -> TokenConstraint:
    assert engine.grammars is not None
    return engine.grammars.constraint(grammar)


def closing(engine: Engine) -> tuple[tuple[int, float], ...]:
    """Biases under which any model ends its output soon."""
    assert engine.text is not None
    biases = {'"': 4.0, "}": 2.5, "]": 2.5, "@": 5.0, ":": 1.0, " ": -2.0, "\n": -4.0, ",": -1.5}
    ids = {text: engine.text.encode(text, add_special_tokens=False) for text in biases}
    assert all(len(found) == 1 for found in ids.values())
    return tuple((ids[text][0], bias) for text, bias in biases.items())


def ask(engine: Engine, name: str, grammar: Grammar | None, seed: int, **sampling: Any) -> Request:
    assert engine.text is not None
    prompt = engine.text.encode(f"Give me {name} as JSON: ")
    return Request(
        name,
        tuple(prompt),
        ResolvedSampling(
            **{
                "temperature": 1.0,
                "frequency_penalty": 0.7,
                "seed": seed,
                "logit_bias": closing(engine),
                **sampling,
            }
        ),
        StoppingParams(max_tokens=MAX_TOKENS),
        constraint=None if grammar is None else constraint(engine, grammar),
    )


def text_of(engine: Engine, result: Answer) -> str:
    """Return the output's text without the end token."""
    assert engine.text is not None
    ended = result.finish is not None and result.finish.token_id is not None
    return engine.text.decode(result.tokens[:-1] if ended else result.tokens, skip_special_tokens=False)


def assert_allowed(engine: Engine, grammar: Grammar, tokens: Sequence[int]) -> None:
    """Assert that a second matcher, which the engine has not used, allows every token."""
    vocab = engine.info.vocab_size
    fresh, mask = constraint(engine, grammar), np.zeros(mask_words(vocab), np.int32)
    for token in tokens:
        fresh.fill(mask)
        assert token in allowed_ids(mask, vocab)
        fresh.accept([token])


def complaints(schema: Any, text: str) -> list[str]:
    """Return what jsonschema finds wrong, except two kinds of days that llguidance accepts as dates: those of
    the year 0, and 29 February of any year.
    """
    no_days = re.compile(r"'(0000-|\d{4}-02-29).*' is not a 'date(-time)?'")
    return [message for message in violations(schema, text) if not no_days.match(message)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_schema_of_the_corpus(engine: Engine, temperature: float) -> None:
    """16 rows at a time, each under a schema of its own, with overlap. An output that ends by itself is
    valid. One that is cut by max_tokens is the beginning of a valid one.
    """
    cases = corpus()
    assert len(cases) >= 40
    grammars = [Grammar.json_schema(case.text) for case in cases]
    requests = [
        ask(engine, case.name, grammar, seed, temperature=temperature)
        for seed, (case, grammar) in enumerate(zip(cases, grammars, strict=True))
    ]
    ended = 0
    for case, grammar, result in zip(cases, grammars, answers(engine, requests), strict=True):
        assert result.error is None
        assert result.finish is not None
        assert_allowed(engine, grammar, result.tokens)
        if result.finish.reason is FinishReason.EOS:
            ended += 1
            assert complaints(case.schema, text_of(engine, result)) == [], case.name
        else:
            assert len(result.tokens) == MAX_TOKENS
    assert ended >= 0.9 * len(cases)


GRAMMARS = (
    (Grammar.regex(r"[A-Z][a-z]{1,8}, [0-9]{2}\.[0-9]"), r"[A-Z][a-z]{1,8}, [0-9]{2}\.[0-9]"),
    (Grammar.choice(["sunny", "sun", "rain or snow", "none"]), r"sunny|sun|rain or snow|none"),
    (Grammar.ebnf('start: num ("+" num){1,3}\nnum: /[1-9][0-9]?/'), r"[1-9][0-9]?(\+[1-9][0-9]?){1,3}"),
    (Grammar.json_object(), None),
)  # fmt: skip


def test_the_other_kinds_of_grammars(engine: Engine) -> None:
    asked = [(grammar, pattern) for grammar, pattern in GRAMMARS for _ in range(6)]
    requests = [ask(engine, f"thing {i}", grammar, i) for i, (grammar, _) in enumerate(asked)]
    for (grammar, pattern), result in zip(asked, answers(engine, requests), strict=True):
        assert_allowed(engine, grammar, result.tokens)
        text = text_of(engine, result)
        if pattern is not None:
            assert re.fullmatch(pattern, text)
        elif result.finish is not None and result.finish.reason is FinishReason.EOS:
            assert isinstance(json.loads(text), dict)


def mixed(engine: Engine) -> tuple[list[Request], list[Request]]:
    """Free requests and constrained requests."""
    free = [
        dataclasses.replace(
            ask(engine, f"free {i}", None, i, temperature=0.0 if i % 2 else 1.0, logit_bias=()),
            stopping=StoppingParams(max_tokens=40, ignore_eos=True),
            logprobs=3 if i % 3 == 0 else None,
        )
        for i in range(10)
    ]
    cases = corpus()[::6]
    return free, [
        ask(engine, f"constrained {i}", Grammar.json_schema(case.text), i) for i, case in enumerate(cases)
    ]


def by_id(engine: Engine, requests: Sequence[Request]) -> dict[str, Answer]:
    results = answers(engine, requests, together=True)
    return {request.request_id: result for request, result in zip(requests, results, strict=True)}


def test_rows_beside_constrained_ones_write_what_they_write_alone(engine: Engine) -> None:
    """The same holds for the constrained rows, whatever rows are beside them."""
    expected: dict[str, Answer] = {}
    for request in [request for side in mixed(engine) for request in side]:
        engine.flush_prefix_cache()
        expected |= by_id(engine, [request])
    engine.flush_prefix_cache()
    free, bound = mixed(engine)
    interleaved = [request for pair in zip(free, bound, strict=False) for request in pair]
    interleaved += [*free[len(bound) :], *bound[len(free) :]]
    results = by_id(engine, interleaved)
    for name, result in results.items():
        assert result.tokens == expected[name].tokens, name
        assert result.finish == expected[name].finish
        assert len(result.logprobs) == len(expected[name].logprobs)


@pytest.mark.parametrize("tensor", ["model.norm.weight", "model.layers.0.self_attn.v_proj.weight"])
def test_weights_that_are_not_numbers_end_requests_and_not_the_engine(
    engine: Engine, model: str, tensor: str
) -> None:
    """The second tensor also fills the KV cache with NaN, in pages that later requests get."""
    weights = load_file(resolve_model(model) / "model.safetensors")
    bad = np.full_like(weights[tensor], np.nan)

    def requests() -> list[Request]:
        free, bound = mixed(engine)
        return free[:6] + bound[:6]

    before = by_id(engine, requests())
    engine.update_weights({tensor: bad}, label="bad", partial=True).result(60)
    for result in by_id(engine, requests()).values():
        assert isinstance(result.error, NonFiniteLogits)
        assert (result.tokens, result.finish) == ([], None)
    assert engine.ready
    engine.update_weights({tensor: weights[tensor]}, label="good", partial=True).result(60)
    after = by_id(engine, requests())
    assert {name: result.tokens for name, result in after.items()} == {
        name: result.tokens for name, result in before.items()
    }
    # The same update while requests run: they keep the tokens that they have.
    gate = at_gate(engine, tokens=1)
    sink = Collector()
    for request in requests():
        engine.submit(request, sink)
    update = engine.update_weights({tensor: bad}, label="bad", partial=True, in_flight=InFlightPolicy.KEEP)
    gate.open()
    update.result(60)
    try:
        for name, result in before.items():
            last = sink.last(name)
            made = sink.tokens(name)
            assert made == result.tokens[: len(made)]
            assert isinstance(last.error, NonFiniteLogits) or len(made) == len(result.tokens)
    finally:
        engine.update_weights({tensor: weights[tensor]}, label="good", partial=True).result(60)
    assert by_id(engine, requests()[:3])["free 0"].tokens == before["free 0"].tokens
