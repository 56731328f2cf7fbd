"""How an engine changes a caller's request before the loop sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from penstock.runtime.config import ResolvedConfig
from penstock.runtime.errors import InvalidRequest, Violation
from penstock.runtime.grammar.bad_words import BadWords
from penstock.runtime.media.vision import Vision
from penstock.runtime.requests.fanout import PreparedPrompt
from penstock.runtime.requests.request import Request, ResolvedSampling
from penstock.runtime.requests.word_table import WordTable

SamplingCallback = Callable[[Request], ResolvedSampling]
"""Called with every request before it is queued, in the caller's thread. Returns the sampling that the
request is to have. It must be quick. What it returns is checked like a caller's own sampling, and the caller
gets any error that it raises."""


class RequestRules:
    """Applies the operator's callback to a request's sampling and the engine's limits to its
    log-probabilities and pictures, and makes a constraint of bad words that have several tokens.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        *,
        vocab_size: int,
        vision: Vision | None,
        callback: SamplingCallback | None,
    ) -> None:
        """`vision`: what the model makes of pictures; None: it reads none. Without a `callback` the sampling
        stays as requested.
        """
        self._vocab_size, self._vision = vocab_size, vision
        self._max_logprobs, self._max_image_tokens = config.max_logprobs, config.max_image_tokens
        self.callback = callback
        """May be replaced at any time."""

    def prepare(self, request: Request, prepared: PreparedPrompt) -> PreparedPrompt:
        """Adds a table of the request's bad words to `prepared`; making it takes longer for more words. There
        is no table if the sampling mentions tokens that the model does not have.
        """
        words = _long_words(request.sampling)
        if not words or prepared.sampling is None:
            return prepared
        return dataclasses.replace(prepared, words=WordTable(words, self._vocab_size))

    def apply(self, request: Request, prepared: PreparedPrompt | None) -> Request:
        """Returns the request as the loop is to have it. Raises InvalidRequest if it asks for too many
        log-probabilities or has a picture that the model cannot take, TypeError if the callback does not
        return ResolvedSampling, and whatever the callback raises.
        """
        callback = self.callback
        if callback is not None:
            request = dataclasses.replace(request, sampling=_rewritten(request, callback))
        self._check_logprobs(request)
        if request.media:
            self._check_media(request)
        words: Sequence[Sequence[int]] | WordTable = _long_words(request.sampling)
        if not words:
            return request
        if prepared is not None and prepared.words is not None and prepared.covers(request.sampling):
            words = prepared.words
        constraint = BadWords(words, request.constraint, self._vocab_size)
        return dataclasses.replace(request, constraint=constraint)

    def _check_logprobs(self, request: Request) -> None:
        most = self._max_logprobs
        bad = [
            Violation(f"output.{name}", f"must be at most {most}, not {value}")
            for name, value in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs))
            if value is not None and value > most
        ]
        if bad:
            raise InvalidRequest(bad)

    def _check_media(self, request: Request) -> None:
        """Refuses what would raise on the engine's thread, and so end the engine for all."""
        if self._vision is None:
            raise InvalidRequest([Violation("media", "the model reads no pictures")])
        found = (self._vision.problem(item, self._max_image_tokens) for item in request.media)
        bad = [Violation(f"media[{i}]", problem) for i, problem in enumerate(found) if problem is not None]
        if bad:
            raise InvalidRequest(bad)


def _rewritten(request: Request, callback: SamplingCallback) -> ResolvedSampling:
    sampling = callback(request)
    if not isinstance(sampling, ResolvedSampling):
        raise TypeError(f"sampling_params_callback must return ResolvedSampling, not {type(sampling)}")
    return sampling


def _long_words(sampling: ResolvedSampling) -> list[tuple[int, ...]]:
    """The bad words of several tokens. A word of one token is a bias on the logits instead."""
    return [word for word in sampling.bad_words if len(word) > 1]
