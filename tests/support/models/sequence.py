"""One sequence through a model by one compiled program, with a test double of paged attention that needs
neither pages nor the engine. Recurrent layers run as they are, with state of one slot, by the native kernels
if the products do.

The double keeps one sequence in one contiguous cache for each layer, float32 [slots, 2, kv heads, head_dim],
or [slots, 1, 1, head_dim] where values are channels of the keys; a slot is one position here. Its `meta`
holds the positions, int32 [T]. Padding tokens are written to the last slot, which no real token uses.

Where pages are dealt over devices (`dealt_pages`), it is no double that attends, but what the engine has. The
sequence has pages of PAGE positions then, in no order.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from penstock.runtime.execution.compilation import use_compilation_cache
from penstock.runtime.execution.on_mesh import CUT, WHOLE, all_shape, on_mesh
from penstock.runtime.models import params
from penstock.runtime.models.config import ModelConfig
from penstock.runtime.models.linear import PLAIN, LinearFormat
from penstock.runtime.models.load_rules import AXIS
from penstock.runtime.ops.attention import SHORT_SPAN, make_meta
from penstock.runtime.ops.cache_spec import LatentKV, PagedKV, SlotState
from penstock.runtime.ops.dealt_pages import dealt_attention
from penstock.runtime.ops.recurrent.native import NATIVE_RECURRENT
from penstock.runtime.ops.recurrent.operations import XLA_RECURRENT
from tests.support.models.compilation_cache import TEST_CACHE

SLOTS = 128
CHUNK = 8
PAGE = 4
PAGES = tuple(int(page) for page in np.random.default_rng(37).permutation(SLOTS // PAGE))
"""The pages of a sequence where they are dealt."""


def contiguous_attention(
    q,
    k_new,
    v_new,
    kv,
    meta,
    options,
):
    scale, sliding_window, softcap, sinks, chunk, slopes, value_dim = options
    assert (v_new is None) == (value_dim is not None)
    groups = q.shape[1] // k_new.shape[1]
    new = jnp.stack([k_new] if v_new is None else [k_new, v_new], axis=1)
    kv = kv.at[meta.positions].set(new.astype(jnp.float32))
    keys, values = (jnp.repeat(kv[:, i], groups, axis=1) for i in (0, -1))
    values = values[..., :value_dim]
    distance = meta.positions[:, None] - jnp.arange(SLOTS, dtype=jnp.int32)[None, :]
    visible = distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    if chunk is not None:
        visible &= meta.positions[:, None] // chunk == jnp.arange(SLOTS)[None, :] // chunk
    scores = jnp.einsum("thd,shd->hts", q.astype(jnp.float32), keys, precision="highest") * np.float32(scale)
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance[None].astype(jnp.float32)
    scores = jnp.where(visible[None], scores, -jnp.inf)
    extra = 0 if sinks is None else 1
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        scores = jnp.concatenate([scores, sink], axis=2)
    weights = jax.nn.softmax(scores, axis=-1)[:, :, : scores.shape[2] - extra]
    return jnp.einsum("hts,shd->thd", weights, values, precision="highest").astype(q.dtype), kv


class Sequence:
    """Feeds one sequence through a model in chunks of at most CHUNK tokens, by one compiled program. If the
    model keeps state, a token that comes alone goes through a second one, for decode steps.
    """

    def __init__(
        self,
        config: ModelConfig,
        state: params.ModelState,
        dtype: str | None = None,
        linear: LinearFormat = PLAIN,
        mesh: Mesh | None = None,
    ) -> None:
        """`mesh`: the devices over which the model is cut; None: it is not."""
        use_compilation_cache(TEST_CACHE)
        self.leaves = params.state_to_leaves(state)
        self._empty = jax.tree.map(
            lambda array: array if mesh is None else jnp.broadcast_to(array, all_shape(array.shape, mesh)),
            tuple(map(_empty, config.cache.layers)),
        )
        self._decodes = config.cache.has_state
        recurrent = NATIVE_RECURRENT if linear.packed else XLA_RECURRENT
        pieces = max(layer.pieces if isinstance(layer, LatentKV) else 1 for layer in config.cache.layers)
        is_dealt = pieces > 1
        attention = contiguous_attention
        if is_dealt:
            attention = functools.partial(dealt_attention, axis=AXIS, pieces=pieces, span=SHORT_SPAN)

        def step(decode_only, leaves, token_ids, positions, num_tokens, kv, media):
            model = params.bind(config, leaves, dtype, linear)
            starts = positions[:1]
            meta = make_meta(
                starts=starts,
                q_lens=num_tokens[None],
                page_table=jnp.array([PAGES if is_dealt else (0,)], jnp.int32),
                num_tokens=len(token_ids),
                decode_only=decode_only,
                page_size=PAGE if is_dealt else SLOTS,
                num_pages=len(PAGES) if is_dealt else 1,
                state_from=(starts == 0).astype(jnp.int32),  # entry 1 is past the end
                state_to=jnp.zeros((1,), jnp.int32),
            )
            if not is_dealt:
                meta = meta._replace(positions=positions, num_tokens=jnp.int32(len(token_ids)))
            metas = (meta,) * (max(config.cache.group_of) + 1)
            hidden, kv = model(
                token_ids,
                positions,
                kv,
                metas,
                attention=attention,
                recurrent=recurrent,
                media=media,
            )
            return model.logits(hidden, meta.num_tokens), kv

        def compiled(decode_only):
            program = functools.partial(step, decode_only)
            if mesh is None:
                return jax.jit(program)
            arguments, results = (CUT, WHOLE, WHOLE, WHOLE, CUT, WHOLE), (WHOLE, CUT)
            return jax.jit(on_mesh(functools.wraps(step)(program), mesh, arguments, results))

        self._steps = {decode_only: compiled(decode_only) for decode_only in (False, True)}
        self.reset()

    def hlo(self) -> str:
        """Return the compiled program of the last call, as XLA's text."""
        program, arguments = self.last_call
        text: str = program.lower(*arguments).compile().as_text()
        return text

    def reset(self) -> None:
        self.kv, self.length = self._empty, 0

    def feed(self, tokens, chunk: int = CHUNK, media=None) -> np.ndarray:
        """Append tokens. Returns the logits after the last one, float32 [V]. `media`: a function from the
        positions of a chunk, padding included, to its MediaInputs.
        """
        for begin in range(0, len(tokens), chunk):
            part = tokens[begin : begin + chunk]
            decode_only = self._decodes and len(part) == 1
            size = 1 if decode_only else CHUNK
            token_ids = np.zeros(size, np.int32)
            positions = np.full(size, SLOTS - 1, np.int32)
            token_ids[: len(part)] = part
            positions[: len(part)] = np.arange(self.length, self.length + len(part))
            arguments = (
                self.leaves,
                token_ids,
                positions,
                jnp.int32(len(part)),
                self.kv,
                None if media is None else media(positions),
            )
            self.last_call = self._steps[decode_only], arguments
            logits, self.kv = self._steps[decode_only](*arguments)
            self.length += len(part)
            last = np.array(logits[len(part) - 1])
        return last


def _empty(layer):
    """Make a layer's cache before the first token."""
    if isinstance(layer, SlotState):
        return tuple(jnp.zeros((1, *value.shape), value.dtype) for value in layer.values)
    if isinstance(layer, LatentKV) and layer.pieces > 1:
        shape = layer.arrays(len(PAGES), PAGE, 1, np.dtype(np.float32))
        return jnp.zeros(shape.shape, shape.dtype)
    heads = (2, layer.num_kv_heads) if isinstance(layer, PagedKV) else (1, 1)
    return jnp.zeros((SLOTS, *heads, layer.head_dim), jnp.float32)
