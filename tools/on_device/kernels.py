"""The kernels for GPUs: are they right, how fast are they, and does an engine with them give the tokens of
one without?

Steps of the run: `python -m tools.on_device.kernels operation|chunks|experts|tokens ...`. The first two try
attention, of decode steps and of steps with chunks of prompts, also as `int8`, `int8-chunks`, `latents` and
`latent-chunks`. With `--interpreted` all but `tokens` try their own code on a CPU, with small sizes; those of
chunks need PJRT_NPROC=8 where there are fewer processors. With `--capability 10.0` a GPU of Hopper tries the
form for a B200, which needs JAX 0.11. It multiplies by warps in all kernels then, because it lacks the tensor
cores of a B200.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from bench.workloads import TABLE, jobs
from penstock.runtime import Engine, EngineConfig, SamplingParams, StoppingParams
from penstock.runtime.execution.backend import GPU_OPTIONS, capability_of
from penstock.runtime.ops.attention import LONG_SPAN, AttentionOptions, make_meta, paged_attention
from penstock.runtime.ops.experts import StackedExperts
from penstock.runtime.ops.experts import experts as xla_experts
from penstock.runtime.ops.gpu.attention import gpu_paged_attention
from penstock.runtime.ops.gpu.experts import gpu_experts
from penstock.runtime.ops.gpu.forms import FORMS, ON_HOPPER
from penstock.runtime.ops.kv_rows import GPU_LANES, kv_layer_shape
from tests.support.native.attention import Case, Options, Shape, draw, runner
from tools.on_device.facts import seconds, wanted_device
from tools.on_device.limits import UNKNOWN, Limits, limits_of, of_call
from tools.on_device.steps import Result

FURTHEST = 0.02
"""Of an output from the one in float64: both are rounded to bfloat16, and are about 4 at most."""
FURTHEST_EXPERTS = 0.05
"""Of a sum of experts' results from the one in float64: activations and sums are rounded to bfloat16."""
NEAR = 0.15
"""How far log-probabilities of equal prefixes may be from each other, in a model of bfloat16."""
LAYERS, ITERATIONS = 4, 5
"""Calls that are timed together read so many caches in turn, and so do not find them in the GPU's cache."""
PAGE = 64
"""Positions of a page, where nothing else is said."""
VALUE_BYTES = 2
"""Of a number in bfloat16."""
REPEATS = (0, 1, 2, 3)
"""Of the workload, whose prompts are generated from."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What a step tries of attention."""

    cases: tuple[tuple[str, Shape, Options, tuple[Case, ...]], ...]
    """The heads of the first are timed."""
    timed: tuple[tuple[int, int, int], ...]
    """Rows of the program, rows that are used, and new tokens of each of these."""
    contexts: tuple[int, ...]
    """Tokens of a row, the new ones included."""

    @property
    def decode(self) -> bool:
        """Whether the programs are those of decode steps."""
        return all(new == 1 for _, _, new in self.timed)


def _shape(
    rows: int, width: int, heads: int, kv_heads: int, dim: int, page: int = PAGE, tokens: int | None = None
) -> Shape:
    pages = rows * width
    return Shape(heads, kv_heads, dim, page, tokens or rows, rows, width, pages, dtype="bfloat16")


def _int8(shape: Shape) -> Shape:
    return dataclasses.replace(shape, is_int8=True, lanes=GPU_LANES)


def _latent(heads: int, rows: int, width: int, dim: int = 576, tokens: int | None = None) -> Shape:
    """Return a shape with DeepSeek's keys, or smaller ones, of which 64 channels are rotary."""
    shape = _shape(rows, width, heads, 1, dim, tokens=tokens)
    return dataclasses.replace(shape, value_dim=dim - 64)


def _single(*pasts: int) -> tuple[Case, ...]:
    return tuple(Case(past, 1) for past in pasts)


RAGGED = _single(0, 62, 63, 64, 127, 699, 8191, 1, 299, 999, 4094, 4095, 4096, 4)
MIXED = (Case(1000, 300), Case(5, 1), Case(0, 63), Case(127, 130))
"""Rows of a step with chunks, beside a row of one token."""
ON_GPU = {
    "operation": Sizes(
        cases=(
            ("ragged rows up to 8,192", _shape(16, 130, 16, 8, 128), Options(), RAGGED),
            ("one row of 8,192", _shape(4, 130, 16, 8, 128), Options(), _single(8190)),
            (
                "a window, heads of 64",
                _shape(4, 20, 64, 8, 64),
                Options(window=128, sinks=True),
                _single(1000, 5, 127),
            ),
            (
                "heads of 256",
                _shape(4, 20, 8, 4, 256),
                Options(window=512, softcap=50.0),
                _single(1000, 3, 511),
            ),
            ("pages of 128", _shape(4, 10, 28, 4, 128, 128), Options(chunk=500), _single(1000, 127, 499)),
            ("72 heads", _shape(4, 20, 72, 9, 128), Options(), _single(1000, 63)),
        ),
        timed=((4, 1, 1), (16, 16, 1)),
        contexts=(128, 1024, 8192),
    ),
    "chunks": Sizes(
        cases=(
            ("rows of several lengths", _shape(4, 24, 16, 8, 128, tokens=512), Options(), MIXED),
            (
                "a window, heads of 64",
                _shape(4, 24, 64, 8, 64, tokens=512),
                Options(window=128, sinks=True),
                MIXED,
            ),
            (
                "heads of 256",
                _shape(4, 24, 8, 4, 256, tokens=512),
                Options(window=512, softcap=50.0),
                MIXED,
            ),
            ("pages of 128", _shape(4, 12, 28, 4, 128, 128, tokens=512), Options(chunk=500), MIXED),
        ),
        timed=((4, 1, 512), (16, 4, 128)),
        contexts=(512, 2048, 8192),
    ),
    "int8": Sizes(
        cases=(
            ("ragged rows up to 8,192", _int8(_shape(16, 130, 16, 8, 128)), Options(), RAGGED),
            ("heads of 256", _int8(_shape(4, 20, 8, 4, 256)), Options(window=512), _single(1000, 3, 511)),
        ),
        timed=((16, 16, 1),),
        contexts=(1024, 8192),
    ),
    "int8-chunks": Sizes(
        cases=(("rows of several lengths", _int8(_shape(4, 24, 16, 8, 128, tokens=512)), Options(), MIXED),),
        timed=((4, 1, 512),),
        contexts=(512, 8192),
    ),
    "latents": Sizes(
        cases=(
            ("ragged rows up to 8,192", _latent(16, 16, 130), Options(), RAGGED),
            ("128 heads", _latent(128, 4, 20), Options(), _single(1000, 3, 511)),
        ),
        timed=((16, 16, 1),),
        contexts=(1024, 8192),
    ),
    "latent-chunks": Sizes(
        cases=(("rows of several lengths", _latent(16, 4, 24, tokens=512), Options(), MIXED),),
        timed=((4, 1, 512),),
        contexts=(512, 8192),
    ),
}
_SMALL, _SMALL_CHUNKS = _shape(2, 3, 4, 2, 64), _shape(2, 3, 2, 1, 64, tokens=80)


def _small(shape: Shape) -> Sizes:
    """Return sizes for the interpreter."""
    is_step = shape.tokens == shape.rows
    cases = _single(130) if is_step else (Case(100, 66), Case(9, 1))
    options = Options() if shape.value_dim else Options(window=70)
    timed = (2, 2, 1) if is_step else (2, 1, 70)
    return Sizes((("small", shape, options, cases),), (timed,), (128,))


INTERPRETED = {
    "operation": _small(_SMALL),
    "chunks": _small(_SMALL_CHUNKS),
    "int8": _small(_int8(_SMALL)),
    "int8-chunks": _small(_int8(_SMALL_CHUNKS)),
    "latents": _small(_latent(8, 2, 3, 192)),
    "latent-chunks": _small(_latent(8, 2, 3, 192, tokens=80)),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.on_device.kernels", description=__doc__)
    parser.add_argument("what", choices=(*ON_GPU, "experts", "tokens"))
    parser.add_argument("--checkpoint", type=Path, help="the model of `tokens`")
    parser.add_argument("--cache", type=Path, help="where compiled programs are kept")
    parser.add_argument("--facts", type=Path, help="the result of the step that measured the limits")
    parser.add_argument("--interpreted", action="store_true")
    parser.add_argument(
        "--capability", choices=[*FORMS], help="in the form for GPUs of this one (default: of the GPU here)"
    )
    args = parser.parse_args()
    if args.what == "tokens" and (args.interpreted or args.capability):
        parser.error("tokens: the engine chooses the form, so give neither --interpreted nor --capability")
    logging.basicConfig(level=logging.INFO)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    device = wanted_device()
    form = FORMS.get(args.capability or capability_of(device), ON_HOPPER)
    if not args.interpreted and FORMS.get(capability_of(device)) is not form:
        form = dataclasses.replace(form, in_tensor_memory=False)
    how: dict[str, Any] = {"form": form, "interpreted": args.interpreted}
    limits = limits_of(device.platform, device.device_kind, args.facts)
    result = Result()
    result.say("it was loading or compiling")
    if args.what == "tokens":
        tokens(result, args.checkpoint, args.cache)
        return
    result.add(limits=str(limits or UNKNOWN))
    interpreting: Any = plgpu
    with (
        interpreting.force_gpu_interpret_mode(interpreting.InterpretGPUParams())
        if args.interpreted
        else contextlib.nullcontext()
    ):
        if args.what == "experts":
            sizes = EXPERTS_INTERPRETED if args.interpreted else EXPERTS_ON_GPU
            experts(result, sizes, functools.partial(gpu_experts, **how), limits)
        else:
            kernel = functools.partial(gpu_paged_attention, **how)
            tried = (INTERPRETED if args.interpreted else ON_GPU)[args.what]
            attention(result, tried, kernel, limits, interpreted=args.interpreted)


def attention(
    result: Result,
    sizes: Sizes,
    kernel: Callable[..., Any],
    limits: Limits | None,
    *,
    interpreted: bool,
) -> None:
    """Measure the kernels in this form beside float64, and their times beside those of XLA's form and beside
    the bytes that a call must read and write. Of the first case the error of XLA's form is told, too, to
    compare with.
    """
    xla = functools.partial(paged_attention, span=LONG_SPAN)
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    for name, shape, options, cases in sizes.cases:
        batch = draw(cases, shape, options, len(name))
        if not shape.is_int8:
            batch = dataclasses.replace(batch, cache=batch.cache.view(jnp.bfloat16))
        errors = {}
        for form, op in (("kernel", kernel), *([("XLA", xla)] if not rows else ())):
            out, cache = runner(op, shape, options, decode=sizes.decode)(batch)
            error = float(np.abs(out[: len(batch.expected)].astype(np.float64) - batch.expected).max())
            same = np.array_equal(cache.view(np.uint16), batch.cache_after.view(np.uint16))
            errors[f"largest error, {form}"] = error
            if not (error < FURTHEST and same and np.isfinite(out.astype(np.float64)).all()):
                wrong.append(f"{name}, {form}: error {error:.3g}{'' if same else ', cache differs'}")
        rows.append({"case": name, **errors})
        result.add(**{"beside float64": rows})
    result.say(f"{'; '.join(wrong) or 'all right'}; nothing was timed")
    heads = sizes.cases[0][1]
    times: list[dict[str, Any]] = []
    for program_rows, used, new in sizes.timed:
        timers = {
            form: _timer(op, heads, program_rows, used, new, max(sizes.contexts), interpreted=interpreted)
            for form, op in (("kernel", kernel), ("XLA", xla))
        }
        for context in sizes.contexts:
            took_s = {form: timer(context) for form, timer in timers.items()}
            near = of_call(attention_bytes(heads, used, new, context), took_s["kernel"], limits)
            taken = {f"{form}, us": 1e6 * taken_s for form, taken_s in took_s.items()}
            row = {"rows": used, "of": program_rows, "tokens": new, "context": context}
            times.append({**row, **taken, **near})
            result.add(**{"time of a call": times})
    largest = max(row["largest error, kernel"] for row in rows)
    gains = ", ".join(
        f"{row['rows']} x {row['tokens']} of {row['context']}: "
        f"{row['XLA, us']:.4g} to {row['kernel, us']:.4g} us"
        for row in times
    )
    result.say("; ".join(wrong) or f"right to {largest:.2g}; {gains}")
    if wrong:
        raise SystemExit("AssertionError: attention is wrong")


def attention_bytes(heads: Shape, rows: int, new: int, context: int) -> int:
    """Count what a call with such heads must read and write at least: pages in use, among them those with new
    keys and values; queries and results.
    """
    cache = _cache(heads, rows * -(-context // PAGE))
    of_head = heads.dim + (heads.value_dim or heads.dim)
    return int(cache.size * cache.dtype.itemsize) + rows * new * heads.heads * of_head * VALUE_BYTES


def _cache(heads: Shape, num_pages: int) -> jax.ShapeDtypeStruct:
    """Return what a layer with such heads keeps in so many pages."""
    keys_only = heads.value_dim is not None
    sizes = (num_pages, PAGE, heads.kv_heads, heads.dim)
    shape = kv_layer_shape(*sizes, keys_only=keys_only, is_int8=heads.is_int8, lanes=heads.lanes)
    return jax.ShapeDtypeStruct(shape, jnp.int8 if heads.is_int8 else jnp.bfloat16)


def _timer(
    op: Callable[..., Any],
    heads: Shape,
    rows: int,
    used: int,
    new: int,
    longest: int,
    *,
    interpreted: bool,
) -> Callable[[int], float]:
    """Measure the seconds of a call of the operation, as a function of the context. `new`: tokens of the step
    of each row that is used.
    """
    width = -(-longest // PAGE)
    dim, value_dim = heads.dim, heads.value_dim
    layers, iterations = (1, 1) if interpreted else (LAYERS, ITERATIONS)
    cache = _cache(heads, used * width)
    options = AttentionOptions(dim**-0.5, value_dim=value_dim)

    def run(kvs: tuple[jax.Array, ...], starts: jax.Array, q_lens: jax.Array, table: jax.Array) -> Any:
        meta = make_meta(
            starts=starts,
            q_lens=q_lens,
            page_table=table,
            num_tokens=rows if new == 1 else used * new,
            decode_only=new == 1,
            page_size=PAGE,
            num_pages=cache.shape[0],
        )

        def turn(_: Any, carry: Any) -> Any:
            q, kvs = carry
            written, after = q[:, : heads.kv_heads], []
            for kv in kvs:
                out, kv = op(q, written, None if value_dim else written, kv, meta, options)
                q = jnp.concatenate([out, q[..., out.shape[2] :]], axis=2)  # values have fewer channels
                after.append(kv)
            return q, tuple(after)

        q = jnp.ones((rows if new == 1 else used * new, heads.heads, dim), jnp.bfloat16)
        return lax.fori_loop(0, iterations, turn, (q, kvs))

    compiled = jax.jit(run, donate_argnums=(0,), compiler_options=None if interpreted else dict(GPU_OPTIONS))
    held = [tuple(jnp.full(cache.shape, 1, cache.dtype) for _ in range(layers))]
    table = np.zeros((rows, width), np.int32)
    table[:used] = np.arange(used * width, dtype=np.int32).reshape(used, width)
    is_used = jnp.asarray((np.arange(rows) < used).astype(np.int32))

    def call(context: int) -> jax.Array:
        out, held[0] = compiled(held[0], is_used * (context - new), is_used * new, jnp.asarray(table))
        made: jax.Array = out
        return made

    return lambda context: seconds(lambda: call(context)) / (layers * iterations)


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertSizes:
    """What `experts` tries: a layer of experts, and the numbers of rows of steps."""

    hidden: int
    inner: int
    num_experts: int
    per_token: int
    rows: tuple[int, ...]
    checked: int
    """Of the rows of a step, those that are computed in float64."""


EXPERTS_ON_GPU = ExpertSizes(2048, 768, 128, 8, rows=(1, 16, 512), checked=8)
"""Qwen3-30B-A3B's."""
EXPERTS_INTERPRETED = ExpertSizes(64, 64, 4, 2, rows=(2,), checked=2)


def experts_bytes(sizes: ExpertSizes, ids: np.ndarray) -> int:
    """Count what a call must read and write at least: the weights of the experts of these ids [rows,
    per_token], once; activations and results.
    """
    weights = int(np.unique(ids).size) * 3 * sizes.inner * sizes.hidden
    return (weights + 2 * len(ids) * sizes.hidden) * VALUE_BYTES


def experts(result: Result, sizes: ExpertSizes, kernel: Callable[..., Any], limits: Limits | None) -> None:
    """Measure the kernel for experts in this form beside float64, and its times beside XLA's and beside the
    bytes that a call must read and write.
    """
    rng = np.random.default_rng(1)
    shapes = (2 * sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner)
    stacks = [
        (rng.standard_normal((sizes.num_experts, *shape), np.float32) * shape[1] ** -0.5).astype(jnp.bfloat16)
        for shape in shapes
    ]
    gate_up, down = (StackedExperts(jnp.asarray(stack)) for stack in stacks)
    found: list[dict[str, Any]] = []
    wrong = []
    for rows in sizes.rows:
        x = rng.standard_normal((rows, sizes.hidden), np.float32).astype(jnp.bfloat16)
        ids = np.stack([rng.permutation(sizes.num_experts)[: sizes.per_token] for _ in range(rows)])
        weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
        expected = np.zeros((min(rows, sizes.checked), sizes.hidden))
        for row in range(len(expected)):
            for expert, share in zip(ids[row], weights[row], strict=True):
                both = stacks[0][expert].astype(np.float64) @ x[row].astype(np.float64)
                gate, up = both[: sizes.inner], both[sizes.inner :]
                inner = gate / (1 + np.exp(-gate)) * up
                expected[row] += share * (stacks[1][expert].astype(np.float64) @ inner)
        line: dict[str, Any] = {"rows": rows}
        taken_s = {}
        given = (jnp.asarray(x), jnp.asarray(ids, jnp.int32), jnp.asarray(weights), gate_up, down)
        for form, op in (("kernel", kernel), ("XLA", xla_experts)):
            compiled = jax.jit(functools.partial(op, activation="silu"))
            out = np.asarray(compiled(*given)).astype(np.float64)
            error = float(np.abs(out[: len(expected)] - expected).max())
            taken_s[form] = seconds(functools.partial(compiled, *given))
            line |= {f"largest error, {form}": error, f"{form}, us": 1e6 * taken_s[form]}
            if not (error < FURTHEST_EXPERTS and np.isfinite(out).all()):
                wrong.append(f"{rows} rows, {form}: error {error:.3g}")
        found.append(line | of_call(experts_bytes(sizes, ids), taken_s["kernel"], limits))
        result.add(experts=found)
    gains = ", ".join(
        f"{line['rows']} rows: {line['XLA, us']:.4g} to {line['kernel, us']:.4g} us" for line in found
    )
    result.say("; ".join([*wrong, gains]))
    if wrong:
        raise SystemExit("AssertionError: experts are wrong")


def tokens(result: Result, checkpoint: Path, cache: Path) -> None:
    """Return greedy tokens of W1's prompts in bfloat16, with the kernel and without.

    Where they part, both engines have seen the same tokens, and the two that they chose must be about equally
    likely; before that, log-probabilities must be close.
    """
    workload = TABLE["W1"]
    prompts = [list(job.token_ids) for repeat in REPEATS for job in jobs(workload, repeat, 1000)]
    config = EngineConfig(
        dtype="bfloat16",
        max_num_seqs=4,
        max_num_batched_tokens=128,
        max_model_len=512,
        max_decode_steps=4,
        kv_cache_bytes=1 << 30,
        compilation_cache=cache,
        show_progress=False,
    )
    made = {}
    for native in ("require", "off"):
        engine = Engine.from_pretrained(str(checkpoint), dataclasses.replace(config, native=native))
        engine.start()
        generations = engine.generate(
            prompts,
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingParams(max_tokens=128, ignore_eos=True),
            logprobs=0,
            return_text=False,
        )
        outputs = [generation.outputs[0] for generation in generations]
        made[native] = [
            (list(output.token_ids), [each.sampled for each in output.logprobs or ()]) for output in outputs
        ]
        engine.shutdown()
        result.say(f"native={native} has generated")
    found = [agreement(*pair) for pair in zip(made["require"], made["off"], strict=True)]
    shares = [common for common, _ in found]
    furthest = max(error for _, error in found)
    result.add(
        **{"shares of tokens before the first other one": shares, "furthest log-probability": furthest}
    )
    result.say(
        f"the same tokens for {sum(shares) / len(shares):.0%} of the way, log-probabilities to {furthest:.2g}"
    )
    if furthest > NEAR:
        raise SystemExit("AssertionError: the tokens are not those of XLA's attention")


def agreement(
    ours: tuple[Sequence[int], Sequence[float]], theirs: tuple[Sequence[int], Sequence[float]]
) -> tuple[float, float]:
    """Return the share of tokens before the first that differs, and how far log-probabilities are from each
    other until then, that token included.
    """
    pairs = list(zip(ours[0], theirs[0], strict=True))
    common = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
    until = min(common + 1, len(pairs))
    errors = [abs(one - other) for one, other in zip(ours[1][:until], theirs[1][:until], strict=True)]
    return common / len(pairs), max(errors, default=0.0)


if __name__ == "__main__":
    main()
