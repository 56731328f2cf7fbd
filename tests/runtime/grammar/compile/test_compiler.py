"""Compiles of grammars are cached, are shared by callers that ask at the same time, and are bounded in time,
memory and threads.
"""

import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.runtime.errors import GenerationError, InvalidRequest, UnavailableError
from penstock.runtime.grammar.compile.build_matcher import build_matcher
from penstock.runtime.grammar.compile.compiler import CompilerConfig, GrammarCompiler
from penstock.runtime.grammar.source import to_llguidance
from penstock.runtime.requests.grammar import Grammar, GrammarKind

PATIENT = 60.0


@pytest.fixture
def make(vocabulary):
    made = []

    def make(**options) -> GrammarCompiler:
        made.append(GrammarCompiler(vocabulary, CompilerConfig(**{"time_limit_s": PATIENT, **options})))
        return made[-1]

    yield make
    for compiler in made:
        compiler.close()


@pytest.fixture
def built(monkeypatch):
    """Return the texts that were really compiled in this process, in order."""
    texts: list[str] = []

    def build(tokenizer, bits, text, max_lexer_states):
        texts.append(text)
        return build_matcher(tokenizer, bits, text, max_lexer_states)

    monkeypatch.setattr("penstock.runtime.grammar.compile.compiler.build_matcher", build)
    return texts


def test_compiled_grammars_are_cached_and_the_longest_unused_goes_first(make, built):
    compiler = make(cache_entries=2)
    a, b, c = (Grammar.regex(pattern) for pattern in "abc")
    first = compiler.compile(a)
    compiler.compile(b)
    assert compiler.compile(a) is first
    compiler.compile(c)  # b leaves the cache
    assert compiler.compile(a) is first
    assert len(built) == 3
    compiler.compile(b)
    assert len(built) == 4


def test_grammars_differ_by_kind_and_by_source(make):
    compiler = make()
    assert compiler.compile(Grammar.regex("a")) is not compiler.compile(Grammar.choice(["a"]))
    tools = Grammar(GrammarKind.REGEX, "a", field="chat.tool_choice")
    assert compiler.compile(tools) is compiler.compile(Grammar.regex("a"))


def test_a_limited_number_of_outputs_shares_a_lexer(make, built):
    compiler = make(outputs_per_lexer=3)
    grammar = Grammar.regex("ab*")
    for _ in range(7):
        compiler.constraint(grammar)
    assert len(built) == 3


def test_callers_at_the_same_time_share_one_compile(make, built, monkeypatch):
    compiler = make()
    compiler.compile(Grammar.json_object())
    built.clear()
    everybody = threading.Barrier(8)

    def ask():
        everybody.wait()
        return compiler.compile(Grammar.regex("(abc|def){3,7}"))

    with ThreadPoolExecutor(8) as pool:
        results = [task.result() for task in [pool.submit(ask) for _ in range(8)]]
    assert len(set(map(id, results))) == 1
    assert len(built) == 1


def test_an_error_names_the_field_of_its_own_caller(make):
    compiler = make()
    for field in ("constraint.regex", "chat.tool_choice"):
        with pytest.raises(InvalidRequest) as caught:
            compiler.compile(Grammar(GrammarKind.REGEX, "(", field=field))
        assert [v.field for v in caught.value.violations] == [field]


HOSTILE = "start: A\nA: " + " & ".join(f"/(?s:.*){i * 7919:x}(?s:.*)/" for i in range(2000))
"""A grammar whose compile takes minutes and gigabytes."""


@pytest.mark.ci
def test_a_compile_that_takes_too_long_is_refused_and_the_next_one_is_not(make, built):
    compiler = make(time_limit_s=2.0)
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(Grammar.ebnf(HOSTILE))
    (violation,) = caught.value.violations
    assert violation.field == "constraint.ebnf"
    assert violation.description == "compiling it took more than 2 s; simplify it"
    assert built == [], "a grammar that takes too long in the trial process must not be compiled in this one"
    compiler.constraint(Grammar.choice(["a", "b"]))


def test_a_compile_that_takes_too_much_memory_is_refused(make):
    compiler = make(memory_bytes=64 * 1024**2)
    with pytest.raises(InvalidRequest, match="too much memory"):
        compiler.compile(Grammar.ebnf(HOSTILE))
    # The limit does not count the stack of a compile.
    compiler.constraint(Grammar.json_object())


def test_a_crash_of_llguidance_is_a_refusal(make):
    """llguidance 1.9.1 recurses forever on the lowest 64-bit integer. Schemas that hold it are refused before
    they reach llguidance, but Lark is not read by us.
    """
    compiler = make()
    with pytest.raises(InvalidRequest, match="llguidance failed"):
        compiler.compile(Grammar.ebnf('start: %json {"const": -9223372036854775808}'))
    compiler.constraint(Grammar.json_object())


def chain(link: str, last: str) -> str:
    """Rules r0 to rN, each of which leads to the next, as many as fit in the largest text."""
    lines, size, i = ["start: r0\n"], 60, 0
    while size < 250_000:
        lines.append(f"r{i}: {link.format(f'r{i + 1}')}\n")
        size += len(lines[-1])
        i += 1
    return "".join([*lines, f"r{i}: {last}\n"])


@pytest.mark.ci
@pytest.mark.parametrize("link", ["{0}", '"x" {0} "y"'])
def test_the_longest_chain_of_rules_compiles(link, make):
    """It needs a deep stack: on a thread's usual 8 MiB, some 3,000 links end the process."""
    constraint = make().constraint(Grammar.ebnf(chain(link, '"z"')))
    assert not constraint.is_complete


@pytest.mark.ci
def test_other_grammars_compile_while_a_hostile_one_does(make):
    compiler = make(time_limit_s=4.0)
    compiler.compile(Grammar.json_object())
    with ThreadPoolExecutor(1) as pool:
        hostile = pool.submit(compiler.compile, Grammar.ebnf(HOSTILE))
        for i in range(3):
            compiler.constraint(Grammar.regex(f"a{{{i}}}b"))
        with pytest.raises(InvalidRequest, match="took more than 4 s"):
            hostile.result()


def test_with_every_process_busy_callers_are_told_to_retry(make, monkeypatch):
    compiler = make(time_limit_s=0.2, max_compiles=1)
    busy, done = threading.Event(), threading.Event()

    def stay(grammar) -> str:
        busy.set()
        done.wait(PATIENT)
        return to_llguidance(grammar)

    trial = SimpleNamespace(alive=True, run=stay, kill=lambda: None)
    monkeypatch.setattr(compiler._sandbox, "_take", lambda: trial)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(compiler.compile, Grammar.regex("a"))
        assert busy.wait(PATIENT)
        with pytest.raises(UnavailableError, match="busy"):
            compiler.compile(Grammar.regex("b"))
        done.set()
        first.exception(PATIENT)


class PanicException(BaseException):
    """Stands for pyo3's exception of this name: a panic in Rust, which `except Exception` does not catch."""


@pytest.mark.parametrize("error", [PanicException("lost"), KeyboardInterrupt(), SystemExit(1)])
def test_a_panic_or_an_interrupt_reaches_no_other_caller(make, monkeypatch, error):
    """A panic is an error of its grammar. An interrupt is raised only on the thread that it came to; a caller
    that waits there for the same grammar is told to try again.
    """
    compiler = make()
    begun, waited = threading.Event(), threading.Event()

    def fail(*_):
        begun.set()
        assert waited.wait(PATIENT)
        raise error

    class Waited(Future[Any]):
        def result(self, timeout=None):
            if not self.done():
                waited.set()
            return super().result(timeout)

    monkeypatch.setattr("penstock.runtime.grammar.compile.compiler.Future", Waited)
    monkeypatch.setattr(compiler, "_compile", fail)
    panics = isinstance(error, PanicException)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(compiler.compile, Grammar.regex("a"))
        assert begun.wait(PATIENT)
        second = pool.submit(compiler.compile, Grammar.regex("a"))
        assert isinstance(first.exception(PATIENT), GenerationError if panics else type(error))
        assert isinstance(second.exception(PATIENT), GenerationError if panics else UnavailableError)
    monkeypatch.undo()
    compiler.constraint(Grammar.regex("a"))


def test_close_ends_the_processes_and_a_later_compile_starts_one(make):
    compiler = make()
    compiler.compile(Grammar.json_object())
    (trial,) = compiler._sandbox._idle
    compiler.close()
    assert not trial.alive
    compiler.constraint(Grammar.regex("x"))


def test_a_process_that_died_is_replaced(make):
    compiler = make()
    compiler.compile(Grammar.json_object())
    (trial,) = compiler._sandbox._idle
    os.kill(trial.pid, signal.SIGKILL)
    while trial.alive:
        time.sleep(0.01)
    compiler.constraint(Grammar.regex("x"))


@pytest.mark.parametrize(
    "options",
    [
        {"time_limit_s": 0.0},
        {"time_limit_s": float("nan")},
        {"memory_bytes": 0},
        {"max_compiles": 0},
        {"cache_entries": 0},
        {"max_lexer_states": 0},
        {"outputs_per_lexer": 0},
    ],
)
def test_config_names_what_is_wrong(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        CompilerConfig(**options)
