"""`Engine.generate` and `Engine.stream` on a model whose tokens can be computed by hand."""

from __future__ import annotations

import dataclasses
import gc
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from penstock.runtime import (
    ContextParams,
    Engine,
    Finish,
    FinishReason,
    SamplingParams,
    StoppingParams,
    Truncation,
)
from penstock.runtime.errors import (
    DuplicateRequestId,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    UnsupportedFeature,
)
from penstock.runtime.requests.request import Request, output_seed
from penstock.runtime.requests.sampling import GenerationDefaults, ResolvedSampling
from tests.support.collector import GREEDY_PARAMS, Collector, at_gate, long, submit
from tests.support.models.toy import VOCAB, toy_config, toy_engine, toy_model, toy_tokens

PEAK = 10 - np.log(np.exp(10) + VOCAB - 1)
"""The log-probability of the toy model's next token: its logit is 10, and all others are 0."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = toy_engine()
    yield engine
    assert engine.compiles_after_warmup == 0
    assert engine.load().pages_used == 0
    engine.shutdown()


# -- one prompt --


@pytest.mark.ci
def test_unset_sampling_fields_have_the_models_defaults() -> None:
    """The model's defaults are greedy, so a request that sets only top_p is greedy too."""
    model = dataclasses.replace(toy_model(), defaults=GenerationDefaults(temperature=0.0, min_p=0.5))
    with Engine(model, toy_config()) as engine:
        seen: list[Request] = []

        def see(request: Request) -> ResolvedSampling:
            seen.append(request)
            return request.sampling

        engine.set_sampling_params_callback(see)
        made = engine.generate([1, 2], sampling=SamplingParams(top_p=0.9), stopping=long(20))
        engine.generate([1, 2], sampling=SamplingParams(temperature=1.0, min_p=0.0), stopping=long(2))
    assert list(made.token_ids) == toy_tokens([1, 2], 20)
    sampling = [(r.sampling.temperature, r.sampling.top_p, r.sampling.min_p) for r in seen]
    assert sampling == [(0.0, 0.9, 0.5), (1.0, 1.0, 0.0)]


def test_a_callback_may_be_set_and_taken_away_later(engine: Engine) -> None:
    try:
        engine.set_sampling_params_callback(lambda request: ResolvedSampling(allowed_token_ids=(7,)))
        assert engine.generate([1], sampling=GREEDY_PARAMS, stopping=long(3)).token_ids == (7, 7, 7)
    finally:
        engine.set_sampling_params_callback(None)
    made = engine.generate([1], sampling=GREEDY_PARAMS, stopping=long(3))
    assert list(made.token_ids) == toy_tokens([1], 3)


def test_outputs_are_those_of_single_requests_with_their_seeds(engine: Engine) -> None:
    hot = SamplingParams(temperature=2.5, seed=5)
    made = engine.generate([1, 2, 3], n=4, sampling=hot, stopping=long(20), logprobs=0)
    assert [output.index for output in made.outputs] == [0, 1, 2, 3]
    for index, output in enumerate(made.outputs):
        alone = engine.generate(
            [1, 2, 3],
            sampling=dataclasses.replace(hot, seed=output_seed(5, index)),
            stopping=long(20),
            logprobs=0,
        )
        assert output.token_ids == alone.token_ids
        assert output.cumulative_logprob == pytest.approx(alone.cumulative_logprob, abs=1e-4)
    assert len({output.token_ids for output in made.outputs}) == 4
    assert made.usage.prompt_tokens == 3
    assert made.usage.completion_tokens == 80
    assert made.token_ids == made.outputs[0].token_ids


def test_log_probabilities_of_prompt_and_output(engine: Engine) -> None:
    prompt = [1, *toy_tokens([1], 2), 0]  # two tokens that the model makes, then another one
    made = engine.generate(prompt, sampling=GREEDY_PARAMS, stopping=long(4), logprobs=1, prompt_logprobs=0)
    assert made.cumulative_logprob == pytest.approx(4 * PEAK, abs=1e-4)
    assert made.prompt.token_ids == tuple(prompt)
    assert made.prompt.logprobs is not None
    sampled = [entry.sampled for entry in made.prompt.logprobs]
    assert sampled == pytest.approx([PEAK, PEAK, PEAK - 10], abs=1e-4)
    without = engine.generate([1], sampling=GREEDY_PARAMS, stopping=long(1))
    assert (without.logprobs, without.cumulative_logprob, without.prompt.logprobs) == (None, None, None)


def test_times_and_speed(engine: Engine) -> None:
    made = engine.generate([1], n=2, sampling=SamplingParams(temperature=1.0, seed=1), stopping=long(30))
    for output in made.outputs:
        timing = output.timing
        assert timing.time_to_first_token is not None
        assert 0 <= timing.queue <= timing.time_to_first_token <= timing.total <= made.timing.total
        assert output.tokens_per_second == pytest.approx(30 / (timing.total - timing.queue))
    assert output.time_to_first_token == timing.time_to_first_token


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        (Truncation.LEFT, [3, 4, 5, 6, 7, 8]),
        (Truncation.RIGHT, [1, 2, 3, 4, 5, 6]),
        (Truncation.MIDDLE, [1, 2, 3, 6, 7, 8]),
    ],
)
def test_a_prompt_that_is_too_long_is_cut_as_asked(
    engine: Engine, truncation: Truncation, kept: list[int]
) -> None:
    """Six tokens of the prompt are left, because the answer is to have room for all others."""
    most = engine.info.max_model_len
    context = ContextParams(truncation, reserve_tokens=most - 6)
    made = engine.generate(list(range(1, 9)), sampling=GREEDY_PARAMS, stopping=long(5), context=context)
    assert (made.prompt.token_ids, made.prompt.truncated_tokens) == (tuple(kept), 2)
    assert list(made.token_ids) == toy_tokens(kept, 5)
    with pytest.raises(PromptTooLong):
        engine.generate([1] * (most + 4), sampling=GREEDY_PARAMS)


def test_priority_needs_its_policy(engine: Engine) -> None:
    with pytest.raises(UnsupportedFeature, match="priority"):
        engine.generate([1], priority=1)
    with toy_engine(scheduling_policy="priority", start=False) as ranked:
        made = ranked.generate([1], priority=1, sampling=GREEDY_PARAMS, stopping=long(2))
        assert list(made.token_ids) == toy_tokens([1], 2)


def test_invalid_parameters_are_refused_when_they_are_made() -> None:
    assert ContextParams("left").truncation is Truncation.LEFT  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"context\.truncation: must be one of reject, left"):
        ContextParams("top")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"context\.reserve_tokens"):
        ContextParams(reserve_tokens=-1)
    with pytest.raises(InvalidRequest, match=r"stopping\.stop: must be a tuple of strings, not one string"):
        StoppingParams(stop="end")  # type: ignore[arg-type]


# -- streams --


def test_the_deltas_of_a_stream_join_to_what_generate_gives(engine: Engine) -> None:
    hot = SamplingParams(temperature=2.5, seed=9)
    asked: dict[str, Any] = {"n": 3, "sampling": hot, "stopping": long(25), "logprobs": 1}
    whole = engine.generate([4, 5], **asked)
    with engine.stream([4, 5], request_id="mine", **asked) as stream:
        assert stream.request_id == "mine"
        deltas = list(stream)
    for output in whole.outputs:
        own = [delta for delta in deltas if delta.index == output.index]
        assert tuple(token for delta in own for token in delta.token_ids) == output.token_ids
        assert tuple(entry for delta in own for entry in delta.logprobs) == output.logprobs
        assert [delta.finish for delta in own if delta.finish] == [output.finish]
        assert own[-1].finish == output.finish
        assert stream.token_ids(output.index) == output.token_ids
    assert [o.token_ids for o in stream.result().outputs] == [o.token_ids for o in whole.outputs]
    with pytest.raises(IndexError):
        stream.token_ids(3)


def test_another_thread_may_close_a_stream_that_is_being_read(engine: Engine) -> None:
    """The stream is closed while its reader waits for a step, which is held. Then the reader's iteration
    ends.
    """
    gate = at_gate(engine)
    stream = engine.stream([1], sampling=GREEDY_PARAMS, stopping=long(50), request_id="closed")
    read: list[object] = []
    reader = threading.Thread(target=lambda: read.extend(stream))
    reader.start()
    stream.close()
    reader.join(60)
    assert not reader.is_alive()
    assert read == []
    with pytest.raises(RuntimeError, match="closed before its end"):
        stream.result()
    gate.open()
    gate.sink.last("held")
    assert engine.load().num_running == engine.load().num_waiting == 0


def test_dropping_a_stream_frees_all_its_outputs(engine: Engine) -> None:
    stream = engine.stream([1], n=3, sampling=SamplingParams(seed=1), stopping=long(100))
    next(stream)
    assert engine.load().pages_used > 0
    del stream
    gc.collect()
    assert engine.load().pages_used == 0


def test_an_id_is_taken_until_its_end_was_read(engine: Engine) -> None:
    stream = engine.stream([1], sampling=GREEDY_PARAMS, stopping=long(5), request_id="same")
    with pytest.raises(DuplicateRequestId):
        engine.generate([2], sampling=GREEDY_PARAMS, stopping=long(5), request_id="same")
    assert stream.result().finish == Finish(FinishReason.MAX_TOKENS)
    again = engine.generate([2], sampling=GREEDY_PARAMS, stopping=long(5), request_id="same")
    assert list(again.token_ids) == toy_tokens([2], 5)


def test_an_id_is_taken_while_outputs_of_its_request_are_unread(engine: Engine) -> None:
    """The engine has forgotten the id by then, but the stream still holds it."""
    stream = engine.stream([1], sampling=GREEDY_PARAMS, stopping=long(5), request_id="unread")
    # This request ends after the other one.
    assert engine.generate([2], sampling=GREEDY_PARAMS, stopping=long(60)).token_ids
    with pytest.raises(DuplicateRequestId):
        engine.stream([2], request_id="unread")
    stream.close()
    engine.stream([2], sampling=GREEDY_PARAMS, stopping=long(5), request_id="unread").close()


def test_an_aborted_request_keeps_the_tokens_it_has(engine: Engine) -> None:
    stream = engine.stream([1], n=2, sampling=GREEDY_PARAMS, stopping=long(100), request_id="enough")
    next(stream)
    engine.abort(["enough"], message="that will do")
    ended = stream.result()
    assert [o.finish for o in ended.outputs] == [Finish(FinishReason.ABORTED, message="that will do")] * 2
    assert list(ended.token_ids) == toy_tokens([1], len(ended.token_ids))


# -- lists of prompts --


def test_a_list_may_be_longer_than_the_queue() -> None:
    """Forty prompts, some of two outputs, share four rows and four places in the queue."""
    with toy_engine(max_num_seqs=4, max_queued_requests=4, start=False) as engine:
        prompts = [[i % VOCAB, 3] for i in range(40)]
        made = engine.generate(prompts, sampling=GREEDY_PARAMS, stopping=long(10))
        assert [list(g.token_ids) for g in made] == [toy_tokens(prompt, 10) for prompt in prompts]
        names = [f"p{i}" for i in range(9)]
        made = engine.generate(prompts[:9], n=2, sampling=GREEDY_PARAMS, stopping=long(4), request_id=names)
        assert [g.request_id for g in made] == names
        assert [[list(o.token_ids) for o in g.outputs] for g in made] == [
            [toy_tokens(prompt, 4)] * 2 for prompt in prompts[:9]
        ]


@pytest.mark.ci
def test_a_list_waits_for_a_queue_that_others_fill() -> None:
    with toy_engine(max_queued_requests=1, start=False) as engine:
        gate, others = at_gate(engine), Collector()
        submit(engine, others, "other", [2], tokens=5)
        with pytest.raises(QueueFull):  # no request of the list runs, so it can wait for none
            engine.generate([[1], [2]], sampling=GREEDY_PARAMS, stopping=long(3))
        gate.open()
        others.last("other")
        made = engine.generate([[1], [2], [3]], sampling=GREEDY_PARAMS, stopping=long(3))
        assert [list(g.token_ids) for g in made] == [toy_tokens([i], 3) for i in (1, 2, 3)]


@pytest.mark.ci
def test_a_list_leaves_room_in_the_queue_for_others() -> None:
    with toy_engine(max_queued_requests=100, start=False) as engine:
        gate, made = at_gate(engine), []
        prompts = [[i % VOCAB] for i in range(30)]

        def generate() -> None:
            made.extend(engine.generate(prompts, sampling=GREEDY_PARAMS, stopping=long(3)))

        thread = threading.Thread(target=generate)
        thread.start()
        deadline = time.monotonic() + 60
        while engine.load().num_waiting < 8 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)  # time in which a list without a bound would submit more
        waiting = engine.load().num_waiting
        gate.open()
        thread.join(60)
        assert waiting == 8  # twice the number of rows
        assert [list(g.token_ids) for g in made] == [toy_tokens(prompt, 3) for prompt in prompts]


def test_the_first_error_ends_a_list(engine: Engine) -> None:
    with pytest.raises(PromptTooLong):
        engine.generate([[1], [2], [1] * 500, [3]], sampling=GREEDY_PARAMS, stopping=long(100))
    engine.abort(all_requests=True)  # also waits for the requests that were cancelled
    assert engine.load().pages_used == 0


def test_a_bar_counts_the_prompts_that_ended(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for wanted in (True, False, None):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        engine.generate([[1], [2], [3]], stopping=long(2), show_progress=wanted)
        assert ("3/3" in terminal.getvalue()) == (wanted is True)  # None: toy_config says no


# -- what is refused --


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"n": 0}, InvalidRequest, "sampling.n: must be from 1 to 128"),
        ({"n": 129}, InvalidRequest, "sampling.n"),
        ({"logprobs": 21}, InvalidRequest, "output.logprobs: must be at most 20"),
        ({"prompt_logprobs": -1}, InvalidRequest, "output.prompt_logprobs"),
        ({"max_proposed_tokens": 17}, InvalidRequest, "max_proposed_tokens: must be from 0 to 16, not 17"),
        ({"request_id": "a\0b"}, InvalidRequest, "request_id"),
        ({"sampling": SamplingParams(temperature=-1)}, InvalidRequest, "sampling.temperature"),
        ({"sampling": SamplingParams(top_k=1.5)}, InvalidRequest, "sampling.top_k"),  # type: ignore[arg-type]
        ({"sampling": SamplingParams(bad_words="ab")}, InvalidRequest, "sampling.bad_words"),
        ({"sampling": SamplingParams(bad_words=["ab"])}, InvalidRequest, "no tokenizer"),
        ({"sampling": SamplingParams(logit_bias={VOCAB: 1.0})}, InvalidRequest, "sampling.logit_bias"),
        ({"sampling": SamplingParams(logit_bias={"a": 1.0})}, InvalidRequest, "sampling.logit_bias"),  # type: ignore[dict-item]
        ({"sampling": SamplingParams(allowed_token_ids="a")}, InvalidRequest, "allowed_token_ids"),  # type: ignore[arg-type]
        ({"show_progress": True}, TypeError, "show_progress goes with a list of prompts"),
        ({"stopping": StoppingParams(stop=("x",))}, InvalidRequest, "stopping.stop"),
        ({"return_text": True}, InvalidRequest, "return_text"),
        ({"temperature": 0}, TypeError, "unknown option 'temperature'"),
        ({"prompt_logprob": 0}, TypeError, "did you mean 'prompt_logprobs'"),
        ({"sampling": {"temperature": 0}}, TypeError, "sampling: must be SamplingParams, not dict"),
        ({"n": 2.0}, TypeError, "n: must be int, not float"),
        ({"n": True}, TypeError, "n: must be int, not bool"),
    ],
)
def test_invalid_options_are_refused_by_name(
    engine: Engine, options: dict[str, object], error: type[Exception], named: str
) -> None:
    asks: tuple[Callable[..., Any], ...] = (engine.generate, engine.stream)
    for ask in asks if "show_progress" not in options else asks[:1]:
        with pytest.raises(error) as caught:
            ask([1], **options)
        assert named in str(caught.value)


@pytest.mark.parametrize("prompt", [[], (), [1.5], [None], 7, None])
def test_what_is_no_prompt_is_refused(engine: Engine, prompt: object) -> None:
    with pytest.raises((InvalidRequest, TypeError)):
        engine.generate(prompt)  # type: ignore[call-overload]


def test_a_list_takes_a_list_of_ids(engine: Engine) -> None:
    for ids in ("one", ["one"], ["a", "b", "c"]):
        with pytest.raises(TypeError, match="request_id: give a sequence of 2 ids"):
            engine.generate([[1], [2]], request_id=ids)


def test_a_model_without_a_tokenizer_takes_no_text(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="no tokenizer; pass token ids"):
        engine.generate("text")
    with pytest.raises(InvalidRequest, match="no tokenizer; pass token ids"):
        engine.chat([{"role": "user", "content": "hi"}])
