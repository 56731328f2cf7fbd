"""An engine with the interface of the real one, whose tokens are known beforehand: it counts bytes upwards.

Token b is the byte b. After "a" comes "b", after "b" comes "c", after "z" the end token. A script may replace
this for a prompt. Each running request holds one page for as long as it runs. `hold=True` makes it step only
when told. It has no prefix cache, but says what it is told to: each prompt found `cached_prompt_tokens`, and
`cached_pages` can be flushed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.runtime.config import EngineConfig
from penstock.runtime.defaults import GenerationDefaults
from penstock.runtime.engine import ModelInfo
from penstock.runtime.errors import (
    Draining,
    DuplicateRequestId,
    EngineFailure,
    ExceedsKVCapacity,
    NotReady,
    PromptTooLong,
    QueueFull,
)
from penstock.runtime.interface import AbortOutcome, WeightsVersion
from penstock.runtime.request import Finish, FinishReason, Output, Request, RequestTiming, TokenLogprobs
from penstock.runtime.scheduler import Load
from penstock.runtime.text import TextCodec
from penstock.runtime.text_decoder import byte_level_piece

Sink = Callable[[Sequence[Output]], None]
EOS = 256
VOCAB = 260
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "{{ m['role'][0] }}:{{ m['content'] }}|{% endfor %}"
)
"""user "hi" is "u:hi|"."""


def byte_codec(chat_template: str | None = CHAT_TEMPLATE) -> TextCodec:
    """Token b is the byte b; 256 is the special end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: byte_level_piece(c)[0])
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = chat_template
    return TextCodec(fast)


def logprobs_of(token: int, top: int) -> TokenLogprobs:
    """By hand: the sampled one has -token/8, and the likeliest are token, token + 1, ..."""
    return TokenLogprobs(-token / 8, tuple((token + i, -(token + i) / 8) for i in range(top)))


@dataclass
class Running:
    """One request in the fake."""

    request: Request
    sink: Sink
    timing: RequestTiming
    made: list[int] = field(default_factory=list)

    @property
    def deadline(self) -> float:
        limit = self.request.stopping.time_limit_s
        return float("inf") if limit is None else self.timing.arrived_ns / 1e9 + limit


class FakeEngine:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        hold: bool = False,
        tokens_per_step: int = 1,
        scripts: Mapping[str, Sequence[int]] | None = None,
        codec: TextCodec | None = None,
        max_model_len: int = 64,
        kv_tokens: int = 1 << 30,
        defaults: GenerationDefaults | None = None,
        eos_token_ids: tuple[int, ...] = (EOS,),
        start: Callable[[], None] = lambda: None,
        cached_prompt_tokens: int = 0,
        cached_pages: int = 0,
        **config: Any,
    ) -> None:
        self.config = EngineConfig(served_model_name="fake", max_model_len=max_model_len, **config)
        self.info = ModelInfo(
            name="fake",
            architecture="FakeForCausalLM",
            vocab_size=VOCAB,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            defaults=defaults or GenerationDefaults(),
            num_pages=self.config.max_num_seqs,
            page_size=16,
            devices=("fake:0",),
        )
        self.text: TextCodec | None = codec
        self.weights = WeightsVersion("initial", 1)
        self.failure: Exception | None = None
        self.seen: list[Request] = []
        self.cancelled: list[str] = []
        self.told: list[tuple[str, Finish]] = []
        self.num_steps = 0
        self.longest_step_sinks = 0
        self._tokens_per_step = tokens_per_step
        self._scripts = {tuple(prompt.encode()): list(tokens) for prompt, tokens in (scripts or {}).items()}
        self._kv_tokens = kv_tokens
        self._cached_prompt_tokens = cached_prompt_tokens
        self._cached_pages = cached_pages
        self._budget = 0 if hold else None
        self._on_start = start
        self._running: dict[str, Running] = {}
        self._waiting: dict[str, Running] = {}
        self._finished: set[str] = set()
        self._outbox: list[tuple[Sink, Output]] = []
        self._changed = threading.Condition()
        self._draining = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    # -- control by tests --

    def step(self, count: int = 1) -> None:
        """Allow so many steps to an engine made with hold=True."""
        with self._changed:
            assert self._budget is not None
            self._budget += count
            self._changed.notify_all()

    def release(self) -> None:
        """Step freely from now on."""
        with self._changed:
            self._budget = None
            self._changed.notify_all()

    def die(self, message: str = "the device is gone") -> None:
        """As the real one does when its thread fails."""
        with self._changed:
            self.failure = EngineFailure(message)
            for running in [*self._running.values(), *self._waiting.values()]:
                self._outbox.append((running.sink, Output(running.request.request_id, error=self.failure)))
            self._running.clear()
            self._waiting.clear()
            self._changed.notify_all()

    # -- the interface --

    @property
    def ready(self) -> bool:
        return self._thread is not None and self.failure is None and not self._draining

    def tensor_specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [("model.embed_tokens.weight", "bfloat16", (VOCAB, 8)), ("model.norm.weight", "float32", (8,))]

    def start(self) -> None:
        self._on_start()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> None:
        with self._changed:
            self._refuse(request)
            self.seen.append(request)
            timing = RequestTiming(time.monotonic_ns(), 0, 0, 0, 0)
            self._waiting[request.request_id] = Running(request, sink, timing)
            self._admit()
            self._changed.notify_all()

    def _refuse(self, request: Request) -> None:
        num = len(request.prompt_token_ids)
        if self.failure is not None:
            raise self.failure
        if self._draining:
            raise Draining
        if self._thread is None:
            raise NotReady
        if num >= self.info.max_model_len:
            raise PromptTooLong(num, self.info.max_model_len - 1)
        if num >= self._kv_tokens:
            raise ExceedsKVCapacity(num + 1, self._kv_tokens)
        if request.request_id in self._running or request.request_id in self._waiting:
            raise DuplicateRequestId(request.request_id)
        if len(self._waiting) >= self.config.max_queued_requests:
            raise QueueFull(self.config.max_queued_requests)

    def cancel(self, request_id: str) -> None:
        with self._changed:
            self.cancelled.append(request_id)
            self._running.pop(request_id, None)
            self._waiting.pop(request_id, None)
            self._admit()

    def finish(self, request_id: str, finish: Finish) -> None:
        with self._changed:
            self.told.append((request_id, finish))
            self._end(request_id, finish)

    def abort(
        self,
        request_ids: Sequence[str] | None = None,
        *,
        prefix: str | None = None,
        all_requests: bool = False,
        message: str = "",
    ) -> list[tuple[str, AbortOutcome]]:
        assert (request_ids is not None) + bool(prefix) + all_requests == 1
        with self._changed:
            if request_ids is None:
                active = [*self._running, *self._waiting]
                request_ids = [i for i in active if all_requests or i.startswith(prefix or "")]
            results = []
            for request_id in request_ids:
                if self._end(request_id, Finish(FinishReason.ABORTED, message=message)):
                    results.append((request_id, AbortOutcome.ABORTED))
                elif request_id in self._finished:
                    results.append((request_id, AbortOutcome.ALREADY_FINISHED))
                else:
                    results.append((request_id, AbortOutcome.NOT_FOUND))
            return results

    def load(self) -> Load:
        with self._changed:
            prompt_tokens = sum(len(w.request.prompt_token_ids) for w in self._waiting.values())
            return Load(
                num_running=len(self._running),
                num_waiting=len(self._waiting),
                waiting_prompt_tokens=prompt_tokens,
                pages_used=len(self._running),
                pages_total=self.info.num_pages,
            )

    def flush_prefix_cache(self) -> tuple[int, int]:
        with self._changed:
            freed, self._cached_pages = self._cached_pages, 0
            return freed, len(self._running)

    def drain(self, timeout_s: float) -> bool:
        with self._changed:
            self._draining = True
            return self._changed.wait_for(
                lambda: not (self._running or self._waiting or self._outbox), timeout_s
            )

    def shutdown(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # -- the thread --

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.config.max_num_seqs:
            request_id = next(iter(self._waiting))
            running = self._waiting.pop(request_id)
            cached = min(self._cached_prompt_tokens, len(running.request.prompt_token_ids) - 1)
            running.timing = replace(
                running.timing, scheduled_ns=time.monotonic_ns(), cached_prompt_tokens=cached
            )
            self._running[request_id] = running

    def _end(self, request_id: str, finish: Finish, token_ids: Sequence[int] = ()) -> bool:
        running = self._running.pop(request_id, None) or self._waiting.pop(request_id, None)
        if running is None:
            return False
        timing = replace(running.timing, finished_ns=time.monotonic_ns())
        self._finished.add(request_id)
        self._outbox.append((running.sink, self._output(running, token_ids, finish, timing)))
        self._admit()
        self._changed.notify_all()
        return True

    def _output(
        self, running: Running, token_ids: Sequence[int], finish: Finish | None, timing: RequestTiming | None
    ) -> Output:
        top = running.request.logprobs
        logprobs = () if top is None else tuple(logprobs_of(token, top) for token in token_ids)
        return Output(
            running.request.request_id, tuple(token_ids), logprobs, finish, timing, self.weights.generation
        )

    def _run(self) -> None:
        while not self._stopping:
            with self._changed:
                while self._idle():
                    self._changed.wait(0.005)  # short, so that time limits are seen
                    self._expire()
                if self._may_step():
                    if self._budget is not None:
                        self._budget -= 1
                    self.num_steps += 1
                    for request_id in list(self._running):
                        self._advance(request_id)
                outbox, self._outbox = self._outbox, []
                self._changed.notify_all()
            by_sink: dict[int, tuple[Sink, list[Output]]] = {}
            for sink, output in outbox:
                by_sink.setdefault(id(sink), (sink, []))[1].append(output)
            for sink, outputs in by_sink.values():
                sink(outputs)

    def _idle(self) -> bool:
        return not (self._stopping or self._outbox or self._may_step())

    def _may_step(self) -> bool:
        return bool(self._running) and (self._budget is None or self._budget > 0)

    def _expire(self) -> None:
        now = time.monotonic()
        for request_id, running in [*self._running.items(), *self._waiting.items()]:
            if now >= running.deadline:
                self._end(request_id, Finish(FinishReason.TIME_LIMIT))

    def _advance(self, request_id: str) -> None:
        running = self._running[request_id]
        new: list[int] = []
        for _ in range(self._tokens_per_step):
            token = self._next(running)
            running.made.append(token)
            new.append(token)
            finish = self._finish_of(running, token)
            if finish is not None:
                break
        if not running.timing.first_token_ns:
            running.timing = replace(running.timing, first_token_ns=time.monotonic_ns())
        if finish is not None:
            self._end(request_id, finish, new)
        else:
            self._outbox.append((running.sink, self._output(running, new, None, None)))

    def _next(self, running: Running) -> int:
        prompt, made = running.request.prompt_token_ids, running.made
        script = self._scripts.get(prompt)
        if script is not None:
            token = script[len(made)] if len(made) < len(script) else EOS
        else:
            last = made[-1] if made else prompt[-1]
            token = EOS if last == ord("z") else ord("a") if last >= EOS else last + 1
        if token in self.info.eos_token_ids and len(made) < running.request.stopping.min_tokens:
            return ord("a")
        return token

    def _finish_of(self, running: Running, token: int) -> Finish | None:
        stopping, made = running.request.stopping, running.made
        if token in self.info.eos_token_ids and not stopping.ignore_eos:
            return Finish(FinishReason.EOS, token_id=token)
        if token in stopping.stop_token_ids and len(made) > stopping.min_tokens:
            return Finish(FinishReason.STOP, token_id=token)
        if stopping.max_tokens is not None and len(made) >= stopping.max_tokens:
            return Finish(FinishReason.MAX_TOKENS)
        if len(running.request.prompt_token_ids) + len(made) >= self.info.max_model_len:
            return Finish(FinishReason.CONTEXT_FULL)
        if time.monotonic() >= running.deadline:
            return Finish(FinishReason.TIME_LIMIT)
        return None
