"""A draft model guesses tokens, and changes none. What it guesses is computed here with numpy, from its own
tables, so that each count of accepted tokens tells whether the draft has read all tokens before them.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from penstock.runtime import Engine, EngineConfig, StoppingParams, building
from penstock.runtime.errors import ConfigError
from penstock.runtime.execution.backend import Backend
from penstock.runtime.execution.draft_model import DraftModel
from penstock.runtime.loading.served_model import load_model, read_checkpoint, read_draft
from penstock.runtime.loop.interface import InFlightPolicy
from penstock.runtime.requests.request import Request, outputs_of
from penstock.runtime.requests.sampling import ResolvedSampling
from penstock.runtime.scheduling.plan import drafted_tokens
from penstock.runtime.scheduling.proposals import Candidate
from tests.support.batch import Answer, answer, answers
from tests.support.goldens import GOLDEN
from tests.support.mix import Mixer, Turns
from tests.support.models.table import VOCAB, Tables, random_tables, serve, table_engine, table_model
from tests.support.models.toy import toy_backend, toy_config
from tests.support.scheduler.proposing import Guesses

TABLES = random_tables()
MOST = 4
"""`EngineConfig.max_proposed_tokens`."""


def draft_of(tables: Tables, vocab_size: int) -> DraftModel:
    """Make a draft that knows so many tokens; it reads others as the last one of these."""
    model = table_model(tables)
    return DraftModel(
        name="draft",
        graphdef=model.graphdef,
        weights=model.weights,
        cache=model.cache,
        vocab_size=vocab_size,
    )


class Asking(Guesses):
    """Asks the draft for as many tokens as it may, for all but those under a constraint."""

    def __init__(self) -> None:
        super().__init__(
            lambda seq, most: () if seq.is_constrained else drafted_tokens(most), random.Random(3)
        )
        self.patience = 1.0

    def is_due(self, candidates: Sequence[Candidate], num_rows: int, room: int) -> bool:
        if all(seq.is_constrained for seq, _ in candidates):
            return False
        return super().is_due(candidates, num_rows, room)


class Drafted:
    """An engine with a draft of these tables, which knows so many tokens, and one without."""

    def __init__(
        self, draft: Tables, vocab_size: int, native: str, backend: Backend | None = None, **limits: Any
    ) -> None:
        self.draft, self.vocab_size, self.proposer = draft, vocab_size, Asking()
        self.plain = table_engine(TABLES, native=native, **limits)
        model = dataclasses.replace(table_model(TABLES), draft=draft_of(draft, vocab_size))
        config = toy_config(native=native, speculation="draft", draft_model="tables", **limits)
        with mock.patch.object(building, "Drafting", return_value=self.proposer):
            self.drafting = Engine(model, config, backend=backend)
        self.drafting.start()

    def compare(self, requests: Sequence[Request], *, together: bool = True) -> list[Answer]:
        """Ask both engines. Returns the answers of the one with a draft."""
        expected = answers(self.plain, requests)
        if together:
            got = answers(self.drafting, requests, together=True)
        else:
            got = [answer(self.drafting, request) for request in requests]
        for request, one, other in zip(requests, got, expected, strict=True):
            assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs), request
            assert (one.finish, one.error) == (other.finish, other.error), request
        return got

    def close(self) -> None:
        for engine in (self.plain, self.drafting):
            assert engine.compiles_after_warmup == 0
            assert engine.load().pages_used == 0
            engine.shutdown()


def counts(by: Drafted, request: Request, tokens: Sequence[int], most: int = MOST) -> tuple[int, int]:
    """How many tokens are proposed for an output with these tokens that runs alone, and how many of them are
    accepted. The step of the prompt makes the first token, and each later one as many as were guessed rightly
    and one more.
    """
    made, proposed, accepted = 1, 0, 0
    seen = [min(token, by.vocab_size - 1) for token in (*request.prompt_token_ids, *tokens)]
    while made < len(tokens):
        count, right = min(most, len(tokens) - made - 1), 0
        while right < count:
            known = seen[: len(request.prompt_token_ids) + made + right]
            if int(np.argmax(by.draft.logits(known))) != tokens[made + right]:
                break
            right += 1
        made, proposed, accepted = made + right + 1, proposed + count, accepted + right
    return proposed, accepted


def half_right() -> Tables:
    """Tables that agree with TABLES in most rows."""
    other = random_tables(seed=9)
    table = np.where(np.arange(VOCAB)[:, None] % 4 == 0, other.table, TABLES.table)
    return Tables(table, TABLES.wave)


def free(name: str, prompt: Sequence[int], num: int = 24, **fields: Any) -> Request:
    """Make a greedy request that makes so many tokens."""
    rules = StoppingParams(max_tokens=num, ignore_eos=True)
    return Request(name, tuple(prompt), ResolvedSampling(temperature=0.0), rules, logprobs=1, **fields)


LIMITS = {"max_num_seqs": 4, "kv_cache_bytes": 30 * 2 * 4 * 2 * 4 * 4}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("auto", marks=pytest.mark.ci),
        pytest.param("off", marks=pytest.mark.sweep("XLA beside a draft")),
    ],
    ids=["native", "XLA"],
)
def partly(request: pytest.FixtureRequest) -> Iterator[Drafted]:
    made = Drafted(half_right(), VOCAB - 1, request.param, max_num_seqs=3, feature_slots=2)
    yield made
    made.close()


def test_what_is_accepted_is_what_the_draft_says(partly: Drafted) -> None:
    """Greedy and sampled, with prompts of several chunks, and of pages that are shared."""
    rng = random.Random(1)
    prompts = [rng.choices(range(VOCAB), k=k) for k in (1, 3, 4, 15, 16, 17, 40)]
    requests = [free(f"g{i}", prompt, 30) for i, prompt in enumerate([*prompts, prompts[-1]])]
    requests += [
        dataclasses.replace(request, request_id=f"s{i}", sampling=ResolvedSampling(seed=i))
        for i, request in enumerate(requests)
    ]
    got = partly.compare(requests, together=False)
    assert max(one.cached_prompt_tokens for one in got) >= 36
    expected = [counts(partly, request, one.tokens) for request, one in zip(requests, got, strict=True)]
    assert [(one.proposed_tokens, one.accepted_tokens) for one in got] == expected
    proposed, accepted = map(sum, zip(*expected, strict=True))
    assert 0.1 * proposed < accepted < 0.8 * proposed


def test_a_request_may_bound_what_the_draft_guesses(partly: Drafted) -> None:
    requests = [free(f"b{most}", (5, 6, most), max_proposed_tokens=most) for most in range(5)]
    for most, one in enumerate(partly.compare(requests, together=False)):
        expected = counts(partly, requests[most], one.tokens, most)
        assert (one.proposed_tokens, one.accepted_tokens) == expected


def test_every_feature_beside_a_draft(partly: Drafted) -> None:
    """Outputs are the same with penalties, biases and end tokens. Under a constraint nothing is guessed."""
    mixer = Mixer(2)
    requests = [mixer.sampled(f"r{i}") if i % 2 else mixer.greedy(f"r{i}", TABLES) for i in range(8)]
    turns = [free(f"c{i}", (i + 1,), constraint=Turns(20)) for i in range(2)]
    partly.compare(requests)
    for request in turns:
        assert answer(partly.drafting, request).proposed_tokens == 0


def test_new_weights_leave_the_draft_as_it_is(partly: Drafted) -> None:
    other = random_tables(seed=11)
    request = free("w", (7, 8, 9), 40)
    try:
        for engine in (partly.plain, partly.drafting):
            serve(engine, other)
        (got,) = partly.compare([request])
        assert got.tokens == greedy(other, request)
        expected = counts(partly, request, got.tokens)
        assert (got.proposed_tokens, got.accepted_tokens) == expected
        assert expected[1] < expected[0] / 4
    finally:
        for engine in (partly.plain, partly.drafting):
            serve(engine, TABLES)


def greedy(tables: Tables, request: Request) -> list[int]:
    """Return the request's tokens."""
    known = list(request.prompt_token_ids)
    for _ in range(request.stopping.max_tokens or 0):
        known.append(int(np.argmax(tables.logits(known))))
    return known[len(request.prompt_token_ids) :]


EQUAL = pytest.mark.sweep("a draft that is the model")


@pytest.fixture(scope="module")
def equal() -> Iterator[Drafted]:
    """Yield a draft that is the model, with few pages. The programs are those of an accelerator, with memory
    of its own.
    """
    backend = dataclasses.replace(toy_backend(), host_memory="pinned_host", fixed_windows=True)
    made = Drafted(TABLES, VOCAB, "auto", backend, **LIMITS)
    yield made
    made.close()


@EQUAL
def test_a_page_has_room_for_the_draft(equal: Drafted) -> None:
    """A page of four tokens has keys and values of four numbers each, in float32, for each of the models."""
    budget, of_one = LIMITS["kv_cache_bytes"], 4 * 2 * 4 * 4
    assert equal.plain.info.num_pages == budget // of_one == 60
    assert equal.drafting.info.num_pages == budget // (2 * of_one) == 30
    assert equal.drafting.runner.device.cache_bytes == budget


@EQUAL
def test_a_draft_that_is_the_model_is_never_wrong(equal: Drafted) -> None:
    """In any mix: prompts of several chunks beside others' decodes, windows of steps without guesses, pages
    that others computed, outputs of one prompt, preemptions, and a cache that was freed.
    """
    rng = random.Random(6)
    beginning = rng.choices(range(VOCAB), k=16)
    for patience in (1.0, 0.3):
        equal.proposer.patience = patience
        requests = [
            free(
                f"m{patience}-{i}",
                [*(beginning if i % 2 else ()), *rng.choices(range(VOCAB), k=rng.randint(1, 30))],
                rng.randint(5, 60),
                max_proposed_tokens=rng.choice([None, 1, 3]),
            )
            for i in range(28)
        ]
        requests += outputs_of(dataclasses.replace(free("n", range(22)), request_id=f"n{patience}"), 3)
        got = equal.compare(requests)
        assert [one.tokens for one in got] == [greedy(TABLES, request) for request in requests]
        assert all(one.accepted_tokens == one.proposed_tokens for one in got)
        assert sum(one.accepted_tokens for one in got) > 50
        assert sum(one.preemptions for one in got) > 0
        assert max(one.cached_prompt_tokens for one in got) >= 16
        device = equal.drafting.runner.device
        whole = device.cache_bytes + 2 * sum(matrix.nbytes for matrix in TABLES.tensors().values())
        pausing = equal.drafting.pause(InFlightPolicy.WAIT, free_kv_cache=True, offload_weights=True)
        assert pausing.result(60).freed_bytes == whole
        equal.drafting.resume().result(60)


def test_a_model_has_a_draft_where_one_is_to_guess() -> None:
    alone = table_model(TABLES)
    both = dataclasses.replace(alone, draft=draft_of(TABLES, VOCAB))
    drafting = toy_config(speculation="draft", draft_model="tables")
    for model, config in ((alone, drafting), (both, toy_config(speculation="lookup")), (both, toy_config())):
        with pytest.raises(ConfigError, match="draft_model: a model has a draft"):
            Engine(model, config)


def test_auto_is_the_draft_where_there_is_one(caplog: pytest.LogCaptureFixture) -> None:
    """Without one it is nobody where bits may depend on a step's size, else a lookup that knows of no other
    request.
    """
    model, auto = table_model(TABLES), toy_config(speculation="auto")
    assert Engine(model, auto).config.speculation == "off"
    assert "max_proposed_tokens" not in caplog.text
    assert Engine(model, dataclasses.replace(auto, max_proposed_tokens=2)).config.max_proposed_tokens is None
    assert "max_proposed_tokens: has no effect" in caplog.text
    native = dataclasses.replace(model, is_native=True)
    backend = dataclasses.replace(toy_backend(), attends_batch_invariantly=lambda *_: True)
    with mock.patch.object(building, "Lookup") as made:
        assert Engine(native, auto, backend=backend).config.speculation == "lookup"
        Engine(native, toy_config(speculation="lookup"), backend=backend)
    assert [call.kwargs["reads_earlier"] for call in made.call_args_list] == [False, True]
    both = dataclasses.replace(model, draft=draft_of(TABLES, VOCAB))
    config = toy_config(speculation="auto", draft_model="tables")
    assert Engine(both, config).config.speculation == "draft"


@pytest.mark.parametrize(
    ("target", "draft", "problem"),
    [
        ("qwen3", "nowhere", "nowhere"),
        ("qwen3", "lfm2", "it has a recurrent state"),
        ("qwen3", "encoders/bert", "it generates nothing"),
        ("qwen3", "qwen3_vl", "it reads images"),
        ("qwen3", "gpt2", "its tokenizer is another one"),
        ("mamba2", "qwen3", "the model that is served has no layers that attend"),
        ("mistral_swa", "qwen3", "all layers of the model that is served have a sliding window"),
        ("qwen3_vl", "qwen3", "the model that is served reads images"),
        ("encoders/bert", "qwen3", "the model that is served generates nothing"),
    ],
)
def test_a_draft_is_refused_where_it_cannot_work(target: str, draft: str, problem: str) -> None:
    """Before any weights are read."""
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 64}
    config = EngineConfig(speculation="draft", draft_model=str(GOLDEN / draft), **options)
    with pytest.raises(ConfigError, match=problem) as refused:
        load_model(str(GOLDEN / target), config, toy_backend())
    assert str(refused.value).startswith(f"draft_model: {GOLDEN / draft}: ")


def test_a_draft_does_not_go_with_dealt_pages() -> None:
    folder = str(GOLDEN / "deepseek_v3")
    config = EngineConfig(
        dtype="float32",
        speculation="draft",
        draft_model=folder,
        tensor_parallel_size=2,
        context_parallel=True,
    )
    with pytest.raises(ConfigError, match=r"draft_model: .* does not go with context_parallel"):
        load_model(folder, config, toy_backend())


def test_a_draft_reads_as_much_as_its_model() -> None:
    folder = str(GOLDEN / "qwen3")
    longest = read_checkpoint(Path(folder), EngineConfig(dtype="float32"), toy_backend())
    short = dataclasses.replace(
        longest, config=dataclasses.replace(longest.config, max_position_embeddings=2**30)
    )
    config = EngineConfig(dtype="float32", speculation="draft", draft_model=folder)
    assert read_draft(folder, longest, config, toy_backend()).facts.max_length == longest.max_length
    with pytest.raises(ConfigError, match=f"draft_model: .*: max_model_len: {2**30} is more"):
        read_draft(folder, short, config, toy_backend())


def test_a_draft_takes_no_adapters_where_its_model_takes_some() -> None:
    folder = str(GOLDEN / "qwen3")
    config = EngineConfig(
        dtype="float32",
        speculation="draft",
        draft_model=folder,
        max_adapters=2,
        adapter_dir=GOLDEN,
        adapter_experts=True,
    )
    target = read_checkpoint(Path(folder), config, toy_backend())
    assert read_draft(folder, target, config, toy_backend()).facts.config == target.config


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"draft_model": "demo"}, "draft_model: goes with speculation"),
        ({"speculation": "draft"}, "speculation: .draft. needs a draft_model"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        EngineConfig(**options)
