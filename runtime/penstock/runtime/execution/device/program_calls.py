"""Calls of the compiled programs, each with the parts of the device's state that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import jax
import numpy as np
from numpy.typing import NDArray

from penstock.runtime.execution.buckets import ProgramKey
from penstock.runtime.execution.device.device_state import DeviceState
from penstock.runtime.execution.device.hidden_rows import sums_buffer
from penstock.runtime.execution.device.prompt_logprobs import prompt_buffer
from penstock.runtime.execution.media.encoding import EncodeCall, encode_call
from penstock.runtime.execution.program_set import Programs
from penstock.runtime.execution.request_programs import pack_admission, pack_page_copies
from penstock.runtime.execution.runner_config import RunnerConfig
from penstock.runtime.execution.slots import Slots
from penstock.runtime.execution.step_programs import Chosen
from penstock.runtime.requests.constraint import mask_words
from penstock.runtime.requests.request import Request
from penstock.runtime.requests.token_bias import bias_row
from penstock.runtime.scheduling.plan import Encode, PageCopy

Ints = NDArray[np.int32]


class ProgramCalls:
    """Calls the programs of one runner. The device runs the calls in order, and no method waits for one,
    except `warm_up`.
    """

    def __init__(self, programs: Programs, device: DeviceState, config: RunnerConfig) -> None:
        self.programs = programs
        self._device = device
        self._config = config
        words = mask_words(config.vocab_size)
        self._no_masks = {
            rows: jax.device_put(np.zeros((rows, words), np.int32), device.sharding)
            for rows in config.buckets.row_buckets
        }

    def forward(self, key: ProgramKey, packed: Ints) -> tuple[jax.Array, jax.Array]:
        """Runs the model. Returns logits float32[R, V] and hidden states, see `Forward`."""
        device = self._device
        forward = self.programs.steps[key](device.leaves, device.kv, device.rows, packed, device.pool)
        device.kv, device.rows, logits, hidden = forward
        return logits, hidden

    def window(self, key: ProgramKey, packed: Ints) -> Chosen:
        """Runs a window of decode steps."""
        device = self._device
        device.kv, device.rows, chosen = self.programs.steps[key](
            device.leaves, device.kv, device.rows, packed
        )
        return cast("Chosen", chosen)

    def choose(self, logits: jax.Array, packed: Ints, mask: Ints | None) -> Chosen:
        """Chooses tokens. `packed` is the first part of the step's buffer, `mask` int32[R, words] has a bit
        for each token that is allowed; None: the rows have no masks.
        """
        device, rows = self._device, logits.shape[0]
        masks: Any = self._no_masks[rows] if mask is None else mask
        device.rows, chosen = self.programs.choices[rows](device.rows, logits, packed, masks)
        return cast("Chosen", chosen)

    def prompt_logprobs(self, hidden: jax.Array, packed: Ints) -> jax.Array:
        """Log-probabilities of tokens of the prompts, see `make_prompt_logprobs`."""
        result: jax.Array = self.programs.prompt_logprobs(self._device.leaves, hidden, packed)
        return result

    def hidden_sums(self, hidden: jax.Array, packed: Ints) -> jax.Array:
        """Hidden states added up, see `make_hidden_sums`."""
        result: jax.Array = self.programs.hidden_sums(self._device.leaves, hidden, packed)
        return result

    def write_features(self, feature_slot: int, request: Request, made: tuple[int, ...]) -> None:
        """Fills a feature slot for a request that has generated the tokens `made` so far."""
        packed = pack_admission(feature_slot, request, made, self._config.max_model_len)
        bias = request.bias_row
        if bias is None:
            bias = bias_row(request.sampling, self._config.vocab_size)
        self._device.rows = self.programs.admission(self._device.rows, packed, bias)

    def write_tables(self, buffers: Iterable[Ints]) -> None:
        """Writes whole page tables, from the buffers of `Slots.table_rows`."""
        for packed in buffers:
            self._device.rows = self.programs.table_rows(self._device.rows, packed)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copies pages within the cache."""
        device = self._device
        pairs = pack_page_copies(copies, self._config.max_num_seqs, device.num_pages)
        device.kv = self.programs.copy_pages(device.kv, pairs)

    def encode(self, encodes: Sequence[Encode]) -> None:
        """Encodes pictures into the pool."""
        config, vision = self._config, self._config.vision
        assert vision is not None, "a plan encodes pictures for a model that reads none"
        for encode in encodes:
            self._encode(encode_call(vision, config.encode_buckets, config.pool_rows, encode))

    def _encode(self, call: EncodeCall) -> None:
        device = self._device
        program = self.programs.encodes[call.bucket]
        device.pool = program(device.leaves, device.pool, call.inputs, call.packed)

    def warm_up(self, slots: Slots) -> None:
        """Runs every program once on padding only, and waits for it. The first call with arguments of one
        kind is slow, because JAX finds its fast path for each kind. Of the programs that encode pictures only
        the smallest runs, because a large one takes seconds whatever it encodes.
        """
        for key in self.programs.steps:
            packed = slots.blank(key)
            if key.window:
                self.window(key, packed)
            else:
                logits, hidden = self.forward(key, packed)
                packed = packed[: slots.layout(key).rows_size]
                self.choose(logits, packed, None)
                self.choose(logits, packed, self.all_allowed(key.rows))  # constraints' masks are on the host
                most = self._config.buckets.token_buckets[-1]
                self.prompt_logprobs(hidden, prompt_buffer([], [], most))
                self.hidden_sums(hidden, sums_buffer({}, most))
        self.write_features(self._config.num_feature_slots, Request("warm-up", (0,)), ())
        self.copy_pages(())
        self.write_tables(slots.table_rows([0]))
        if self._config.vision is not None:
            config = self._config
            self._encode(encode_call(self._config.vision, config.encode_buckets, config.pool_rows, None))
        jax.block_until_ready((self._device.rows, self._device.kv, self._device.pool))

    def all_allowed(self, rows: int) -> Ints:
        """A mask on the host, int32[R, words], to be narrowed."""
        return np.full((rows, mask_words(self._config.vocab_size)), -1, np.int32)

    def free(self) -> None:
        """Frees the memory on the device that the calls hold."""
        for array in self._no_masks.values():
            array.delete()
