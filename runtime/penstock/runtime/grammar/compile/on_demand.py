"""A grammar compiler that is made when somebody first needs it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from penstock.runtime.errors import ConfigError
from penstock.runtime.grammar.compile.compiler import GrammarCompiler

log = logging.getLogger(__name__)


class CompilerOnDemand:
    """Makes a compiler at the first use. That takes up to a second, and most engines never get a request with
    a grammar.
    """

    def __init__(self, make: Callable[[], GrammarCompiler] | None) -> None:
        """`make` may raise ConfigError if the model's tokenizer allows no grammars; None: the model has no
        tokenizer.
        """
        self._make = make
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def get(self) -> GrammarCompiler | None:
        """The compiler, which the first caller makes while others wait. None if the model can have none; the
        reason is logged once.
        """
        with self._lock:
            if self._make is not None:
                try:
                    self._compiler = self._make()
                except ConfigError as error:
                    log.warning("no structured output: %s", error)
                self._make = None
            return self._compiler

    def close(self) -> None:
        """Stop the compiler's threads, if it was made."""
        with self._lock:
            self._make = None
            if self._compiler is not None:
                self._compiler.close()
