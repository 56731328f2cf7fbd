"""Grammars to matchers: each is compiled once, in bounded time and memory, and kept for who asks again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
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
from penstock.runtime.grammar.narrowing import GrammarError
from penstock.runtime.grammar.vocabulary import Vocabulary
from penstock.runtime.requests.grammar import Grammar


@dataclass(frozen=True, slots=True)
class CompilerConfig:
    """Limits of compiling and matching. Raises ValueError."""

    time_limit_s: float = 5.0
    """Longest compile; also the longest wait for others to be done."""
    memory_bytes: int = 1024**3
    """Most that one compile may take."""
    max_compiles: int = 2
    """At once. Each takes a process, with the vocabulary in it."""
    cache_entries: int = 64
    max_lexer_states: int = 100_000
    """Of a grammar's lexer, about 0.5 kB each. Outputs that need more end in an error: some 11,000 characters
    of a string with `maxLength` take that many."""
    outputs_per_lexer: int = 64
    """How many outputs share one lexer before the next is given a new one."""

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
    """A grammar ready for use. Safe to share among threads.

    Its outputs share one lexer: the automaton that llguidance builds as it goes, and locks while in use. What
    one output built is there for the next, which makes their masks quicker; but where one runs into a limit,
    all that share it end. So it is used for a bounded number of outputs, and after an error for no more.
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
        """`on_costly` is called where a request shows that the grammar costs too much whoever uses it;
        `is_proven`: the masks of the same grammar have been quick.
        """
        self.text = text
        """As llguidance takes it."""
        self._matcher = matcher
        """At the beginning, and never moved on."""
        self._bits = bits
        self._outputs_left = max_outputs
        self._failed = False
        self._on_costly = on_costly
        self._lexer = Lexer(is_proven=is_proven)

    @property
    def spent(self) -> bool:
        """Whether the next request should compile the grammar again."""
        return self._failed or self._outputs_left <= 0

    @property
    def is_proven(self) -> bool:
        """Whether its masks have been quick for a while, without an error."""
        return self._lexer.is_proven and not self._failed

    def constraint(self, field: str = "constraint") -> GrammarConstraint:
        """A new constraint, for a request of one output; its errors are on `field`."""
        (constraint,) = self.constraints(1, field)
        return constraint

    def constraints(self, num_outputs: int, field: str = "constraint") -> list[GrammarConstraint]:
        """A new constraint for each output of a request; its errors are on `field`."""
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

    def __init__(self, vocabulary: Vocabulary, config: CompilerConfig | None = None) -> None:
        config = config or CompilerConfig()
        self.config = config
        self._tokenizer = vocabulary.to_llguidance()
        self._bits = TokenBits(vocabulary)
        limits = TrialLimits(config.time_limit_s, config.memory_bytes, config.max_lexer_states)
        self._sandbox = Sandbox(vocabulary, limits, config.max_compiles)
        self._calls = TimedCalls(time_limit_s=config.time_limit_s, max_threads=config.max_compiles)
        self._costly = Costly()
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        """The least recently used first."""
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
        """For a Hugging Face tokenizer; see `Vocabulary.from_tokenizer`. Raises ConfigError."""
        return cls(Vocabulary.from_tokenizer(backend, vocab_size, eos_token_ids), config)

    def constraint(self, grammar: Grammar) -> GrammarConstraint:
        """A constraint for one output under `grammar`; raises as `compile` does."""
        return self.compile(grammar).constraint(grammar.field)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The grammar compiled: from the cache, or now. Who asks for one that is being compiled waits for it.

        Raises InvalidRequest on `grammar.field`, with llguidance's message, where it is not valid, too large,
        not supported, without any output in this vocabulary, or too slow to compile; CostlyGrammar where it
        was too costly to follow less than `costly.REFUSED_S` ago; UnavailableError where other compiles take
        all threads.
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

    def warm_up(self) -> None:
        """Start a process, so that the first request need not wait seconds for it."""
        self.compile(Grammar.json_object())

    def close(self) -> None:
        """End the processes. Constraints go on; a later compile starts a new process."""
        self._sandbox.close()

    def _fulfil(
        self, grammar: Grammar, before: CompiledGrammar | None, future: Future[CompiledGrammar]
    ) -> None:
        try:
            compiled = self._compile(grammar, before)
        except BaseException as error:  # who waits for the same gets it too
            with self._lock:
                del self._compiling[grammar]
            if isinstance(error, KeyboardInterrupt | SystemExit):  # meant for this thread, not for who waits
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
        """Compile `grammar`; without the trial process if an earlier result, `before`, has passed that."""
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
