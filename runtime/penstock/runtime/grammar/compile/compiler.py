"""Compiles grammars to matchers: each one once, in bounded time and memory, and kept for later requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from llguidance import LLMatcher
from tokenizers import Tokenizer

from penstock.runtime.errors import CostlyGrammar, InvalidRequest, UnavailableError, Violation
from penstock.runtime.failing import as_exception
from penstock.runtime.grammar.budget import Account, request_budget
from penstock.runtime.grammar.compile.build_matcher import build_matcher
from penstock.runtime.grammar.compile.costly import Costly
from penstock.runtime.grammar.compile.timed_calls import TimedCalls
from penstock.runtime.grammar.compile.trials import Sandbox, TrialLimits
from penstock.runtime.grammar.matcher import GrammarConstraint, Lexer, TokenBits
from penstock.runtime.grammar.vocabulary import Vocabulary
from penstock.runtime.requests.grammar import Grammar
from penstock.runtime.schemas.narrowing import GrammarError

_MAX_REFUSALS = 1024
"""Most grammars of which it is remembered whether they can be compiled."""


@dataclass(frozen=True, slots=True)
class CompilerConfig:
    """Limits of compiling and matching. Raises ValueError."""

    time_limit_s: float = 5.0
    """Longest compile in seconds; also the longest wait for other compiles."""
    memory_bytes: int = 1024**3
    """Most memory that one compile may take."""
    max_compiles: int = 2
    """Most compiles at a time. Each needs a process, with the vocabulary in it."""
    cache_entries: int = 64
    """Most compiled grammars that are kept."""
    max_lexer_states: int = 100_000
    """Most states of a grammar's lexer, about 0.5 kB each. Outputs that need more end in an error: some
    11,000 characters of a string with `maxLength` take that many."""
    outputs_per_lexer: int = 64
    """How many outputs share one lexer before the next one gets a new lexer."""

    def __post_init__(self) -> None:
        if not self.time_limit_s > 0:
            raise ValueError(f"time_limit_s: must be above 0, not {self.time_limit_s}")
        for name in (
            "memory_bytes",
            "max_compiles",
            "cache_entries",
            "max_lexer_states",
            "outputs_per_lexer",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")


class CompiledGrammar:
    """A grammar that is ready for use. Safe to share among threads.

    Its outputs share one lexer: an automaton that llguidance builds as it goes, and locks while in use. Later
    outputs reuse the states that earlier ones built, which makes their masks quicker. But if one runs into a
    limit, all that share the lexer end. So a lexer is used for a bounded number of outputs, and for none
    after an error.
    """

    def __init__(
        self,
        text: str,
        matcher: LLMatcher,
        bits: TokenBits,
        max_outputs: int,
        *,
        on_costly: Callable[[], None] = lambda: None,
        is_proven: bool = False,
    ) -> None:
        """`on_costly` is called if a request shows that the grammar costs too much, whatever the request.
        `is_proven`: whether masks of the same grammar have been quick before.
        """
        self.text = text
        """The text that llguidance takes."""
        self._matcher = matcher
        """A matcher at the beginning, which never moves on."""
        self._bits = bits
        self._outputs_left = max_outputs
        self._failed = False
        self._on_costly = on_costly
        self._lexer = Lexer(is_proven=is_proven)

    @property
    def spent(self) -> bool:
        """Whether the next request must compile the grammar again."""
        return self._failed or self._outputs_left <= 0

    @property
    def is_proven(self) -> bool:
        """Whether its masks have been quick for a while, without an error."""
        return self._lexer.is_proven and not self._failed

    def constraint(self, field: str = "constraint") -> GrammarConstraint:
        """Make a new constraint, for a request of one output. Its errors are on `field`."""
        (constraint,) = self.constraints(1, field)
        return constraint

    def constraints(self, num_outputs: int, field: str = "constraint") -> list[GrammarConstraint]:
        """Make a new constraint for each output of a request. Their errors are on `field`."""
        self._outputs_left -= num_outputs
        account = Account(request_budget(num_outputs), self._on_costly)
        return [
            GrammarConstraint(
                self._matcher.deep_copy(),
                self._bits,
                field,
                self._fail,
                account=account,
                lexer=self._lexer,
            )
            for _ in range(num_outputs)
        ]

    def _fail(self) -> None:
        self._failed = True


class GrammarCompiler:
    """Compiles grammars for one model. Safe to use from many threads; `compile` blocks its caller."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        config: CompilerConfig | None = None,
        encode: Callable[[str], Sequence[int]] = lambda text: (),
    ) -> None:
        """`encode`: see `TokenBits`."""
        config = config or CompilerConfig()
        self.config = config
        self._tokenizer = vocabulary.to_llguidance()
        self._bits = TokenBits(vocabulary, encode)
        limits = TrialLimits(config.time_limit_s, config.memory_bytes, config.max_lexer_states)
        self._sandbox = Sandbox(vocabulary, limits, config.max_compiles)
        self._calls = TimedCalls(time_limit_s=config.time_limit_s, max_threads=config.max_compiles)
        self._costly = Costly()
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        """The compiled grammars, the least recently used first."""
        self._refusals: OrderedDict[Grammar, str | None] = OrderedDict()
        """What `refusal` found, the least recently asked first."""
        self._compiling: dict[Grammar, Future[CompiledGrammar]] = {}

    @classmethod
    def from_tokenizer(
        cls,
        backend: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        config: CompilerConfig | None = None,
    ) -> GrammarCompiler:
        """Make a compiler for a Hugging Face tokenizer; see `Vocabulary.from_tokenizer`. Raises
        ConfigError.
        """

        def encode(text: str) -> Sequence[int]:
            return backend.encode(text, add_special_tokens=False).ids

        return cls(Vocabulary.from_tokenizer(backend, vocab_size, eos_token_ids), config, encode)

    def constraint(self, grammar: Grammar) -> GrammarConstraint:
        """Make a constraint for one output under `grammar`. Raises what `compile` raises."""
        return self.compile(grammar).constraint(grammar.field)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar, or take it from the cache. A caller that asks for a grammar which is being
        compiled waits for it.

        Raises InvalidRequest on `grammar.field`, with llguidance's message, if the grammar is not valid, too
        large, not supported, matches no output in this vocabulary, or is too slow to compile; CostlyGrammar
        if it was too costly to follow less than `costly.REFUSED_S` ago; UnavailableError if other compiles
        take all threads.
        """
        refused_s = self._costly.refused_s(grammar)
        if refused_s:
            raise CostlyGrammar(grammar.field, refused_s)
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None and not known.spent:
                self._compiled.move_to_end(grammar)
                return known
            future = self._compiling.get(grammar)
            mine = future is None
            if future is None:
                future = self._compiling[grammar] = Future()
        if mine:
            self._fulfil(grammar, known, future)
        try:
            return future.result()
        except GrammarError as error:
            raise InvalidRequest([Violation(grammar.field, str(error))]) from error

    def refusal(self, grammar: Grammar) -> str | None:
        """Say why a grammar cannot be compiled; None if it can. What was found is kept. Raises
        UnavailableError as `compile` does.
        """
        with self._lock:
            if grammar in self._refusals:
                self._refusals.move_to_end(grammar)
                return self._refusals[grammar]
        try:
            self._sandbox.check(grammar)
            refused = None
        except GrammarError as error:
            refused = str(error)
        with self._lock:
            self._refusals[grammar] = refused
            while len(self._refusals) > _MAX_REFUSALS:
                self._refusals.popitem(last=False)
        return refused

    def close(self) -> None:
        """End the processes. Constraints go on; a later compile starts a new process."""
        self._sandbox.close()

    def _fulfil(
        self, grammar: Grammar, before: CompiledGrammar | None, future: Future[CompiledGrammar]
    ) -> None:
        try:
            compiled = self._compile(grammar, before)
        except BaseException as error:  # callers that wait for the same grammar get it too
            with self._lock:
                del self._compiling[grammar]
            if isinstance(
                error, KeyboardInterrupt | SystemExit
            ):  # meant for this thread, not for callers that wait
                future.set_exception(UnavailableError("the grammar's compile was interrupted; try again"))
                raise
            future.set_exception(as_exception(error))
            return
        with self._lock:
            del self._compiling[grammar]
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > self.config.cache_entries:
                self._compiled.popitem(last=False)
        future.set_result(compiled)

    def _compile(self, grammar: Grammar, before: CompiledGrammar | None) -> CompiledGrammar:
        """Compile `grammar`. Skip the trial process if `before`, an earlier result, passed it."""
        config = self.config
        text = self._sandbox.check(grammar) if before is None else before.text
        try:
            matcher = self._calls.run(
                lambda: build_matcher(self._tokenizer, self._bits, text, config.max_lexer_states)
            )
        except TimeoutError as error:
            raise GrammarError(
                f"compiling it took more than {config.time_limit_s:g} s; simplify it"
            ) from error
        return CompiledGrammar(
            text,
            matcher,
            self._bits,
            config.outputs_per_lexer,
            on_costly=lambda: self._costly.note(grammar),
            is_proven=before is not None and before.is_proven,
        )
