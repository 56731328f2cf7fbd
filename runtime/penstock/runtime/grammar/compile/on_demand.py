"""A grammar compiler that is made when somebody first needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.runtime.grammar.compile.compiler import GrammarCompiler


class CompilerOnDemand:
    """Makes a compiler at the first use. That takes up to a second, and most engines never get a request with
    a grammar.
    """

    def __init__(self, make: Callable[[], GrammarCompiler] | None) -> None:
        """None: the model's tokenizer allows no grammars, or it has none."""
        self._make = make
        self.exists = make is not None
        """Whether there can be a compiler."""
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def get(self) -> GrammarCompiler | None:
        """Return the compiler, which the first caller makes while others wait. None if the model can have
        none.
        """
        with self._lock:
            if self._make is not None:
                self._compiler, self._make = self._make(), None
            return self._compiler

    def close(self) -> None:
        """Stop the compiler's threads, if it was made."""
        with self._lock:
            self._make = None
            if self._compiler is not None:
                self._compiler.close()
