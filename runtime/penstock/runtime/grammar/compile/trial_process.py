"""What runs in a process of `trials`: it compiles what it is sent, and says whether that succeeded.

    python -m penstock.runtime.grammar.compile.trial_process CONNECTION LIFELINE

The arguments are file descriptors, see `children`. The process ends when the other end of either closes.
"""

from __future__ import annotations

import json
import resource
import threading
from multiprocessing.connection import Connection

from llguidance import LLTokenizer

from penstock.runtime.grammar.compile.build_matcher import build_matcher
from penstock.runtime.grammar.compile.timed_calls import STACK_BYTES
from penstock.runtime.grammar.compile.trials import TrialLimits
from penstock.runtime.grammar.matcher import TokenBits, shorten
from penstock.runtime.grammar.source import to_llguidance
from penstock.runtime.grammar.vocabulary import Vocabulary
from penstock.runtime.machine import confined
from penstock.runtime.requests.grammar import Grammar, GrammarKind
from penstock.runtime.schemas.narrowing import GrammarError


def serve(connection: Connection) -> None:
    """Answer each grammar with (text for llguidance, None) or (None, why it is refused). Answers are JSON,
    because the server must not unpickle what comes from a process that a hostile grammar may control.
    """
    vocabulary: Vocabulary
    limits: TrialLimits
    vocabulary, limits = connection.recv()
    tokenizer, bits = vocabulary.to_llguidance(), TokenBits(vocabulary)
    confined.limit_memory(limits.memory_bytes)
    confined.confine()
    _answer(connection, True)
    while True:
        try:
            grammar: Grammar = connection.recv()
        except EOFError:
            return
        _limit_cpu(limits.time_limit_s)
        try:
            _answer(connection, (_try(grammar, tokenizer, bits, limits), None))
        except GrammarError as error:
            _answer(connection, (None, str(error)))


def _answer(connection: Connection, value: object) -> None:
    connection.send_bytes(json.dumps(value).encode())


def _try(grammar: Grammar, tokenizer: LLTokenizer, bits: TokenBits, limits: TrialLimits) -> str:
    text = to_llguidance(grammar)
    warnings = build_matcher(tokenizer, bits, text, limits.max_lexer_states).get_grammar_warnings()
    # In Lark the caller may ask for leniency in a schema within it; in other kinds no keyword may be ignored.
    if warnings and grammar.kind is not GrammarKind.EBNF:
        raise GrammarError(shorten("; ".join(warnings)))
    return text


def _limit_cpu(more_s: float) -> None:
    """Make the kernel end this process some time after the server would have, in case the server is
    held up.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + more_s) + 10, most))


def main() -> None:
    connection = confined.connect()
    threading.stack_size(STACK_BYTES)
    server = threading.Thread(target=serve, args=(connection,))
    server.start()
    server.join()


if __name__ == "__main__":
    main()
