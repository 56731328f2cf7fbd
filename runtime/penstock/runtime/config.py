"""The engine's options: frozen, checked once, and resolved ("auto" becomes a value) into new objects.
No jax.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from penstock.runtime.chat.parser import REASONING_PARSERS, TOOL_PARSERS
from penstock.runtime.errors import ConfigError
from penstock.runtime.requests.request import MAX_PROPOSED_TOKENS
from penstock.runtime.requests.sampling import GenerationDefaults, override_defaults
from penstock.runtime.scheduling.scheduler_config import SCHEDULING_POLICIES

MAX_DECODE_STEPS = 64
MOST_DEVICES = 1024
"""Most devices over which a model is cut."""
MAX_SNAPSHOTS = 65_536
MOST_ADAPTERS = 1024
ADAPTER_RANKS = (16, 32, 64, 128, 256, 512)
DEFAULT_FEATURE_SLOTS = 64
"""These take 78 MB with a vocabulary of 152k."""
DEFAULT_TARGET_ITL_S = 0.15
DEFAULT_PROPOSED_TOKENS = 4
MOST_TEXT_TOKENS = 131_072
"""Most tokens of `EngineConfig.lookup_text`: to find words in them takes up to 150 us."""
MOST_TEXT_CHARS = 2**22
"""Most characters of it, 32 for a token: a longer text would take seconds before its tokens are counted."""
CHECKED_ROWS = 16
"""Where tokens are proposed, there are programs of at least this many rows, so that there is room for them
also where few requests run at a time."""
POOLED_IMAGES = 4
"""Largest images for which the pool of embeddings has room, unless the operator says otherwise."""
MOST_IMAGE_PIXELS = 2**26
"""Pillow would warn of images that are a third larger."""
DTYPES = ("auto", "bfloat16", "float16", "float32")
QUANTIZATIONS = ("none", "int8", "int4")
KV_CACHE_DTYPES = ("auto", "int8")
NATIVE = ("auto", "require", "off")
SPECULATIONS = ("off", "auto", "lookup", "draft", "heads")
ON_DEVICE = ("draft", "heads")
"""Those of SPECULATIONS whose guesses are made on the device."""
_CHOICES: Mapping[str, Collection[str]] = {
    "dtype": DTYPES,
    "quantization": QUANTIZATIONS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "native": NATIVE,
    "scheduling_policy": SCHEDULING_POLICIES,
    "speculation": SPECULATIONS,
    "tool_call_parser": TOOL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
}
"""The options that have one of a few values."""


@dataclass(frozen=True, slots=True)
class DefaultSizes:
    """max_num_seqs, max_num_batched_tokens and max_image_tokens if the operator does not choose them."""

    num_seqs: int
    num_tokens: int
    image_tokens: int
    """max_image_tokens."""


CPU_SIZES = DefaultSizes(16, 512, 1024)
ACCELERATOR_SIZES = DefaultSizes(256, 8192, 4096)
SMALL_SIZES = DefaultSizes(64, 2048, 2048)
"""For an accelerator of which JAX may use less than SMALL_BYTES: the scratch memory of a step must fit too.
"""
SMALL_BYTES = 24 * 2**30


def accelerator_sizes(memory_bytes: int | None) -> DefaultSizes:
    """Return the sizes for an accelerator of which JAX may use `memory_bytes`; None: it does not report how
    many.
    """
    return SMALL_SIZES if memory_bytes is not None and memory_bytes < SMALL_BYTES else ACCELERATOR_SIZES


def default_compilation_cache() -> Path:
    """Return the folder in which compiled programs are kept between starts."""
    return Path(os.path.expanduser("~")) / ".cache" / "penstock" / "xla"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options that an operator may choose. None means "derive it"; derived values are logged at the
    start.
    """

    served_model_name: str | None = None
    """Name in replies, and the only `model` that requests may ask for. None: the hub id by which the model
    was loaded, or the last part of its path."""
    dtype: str = "auto"
    """Dtype of weights and activations; "auto" is the checkpoint's own."""
    quantization: str = "none"
    """"int8" stores weights of linear layers in int8 with one scale for each output. "int4" has 4 bits and
    a scale for each 32 inputs, except in tables of embeddings, heads and layers of odd sizes, which are int8.
    With both the kernels for CPUs quantize activations on the way."""
    kv_cache_dtype: str = "auto"
    """What keys and values are kept in: "auto" is the dtype of activations; "int8" keeps 8-bit numbers, with
    a scale for each token and head."""
    tensor_parallel_size: int | None = 1
    """Over how many devices the model is cut, so that each has a part of the weights and of the cache. None:
    as many as there are and the model can be cut over, on a CPU one. A CPU's devices are made by the engine,
    so load it before other code computes with JAX."""
    pipeline_parallel_size: int = 1
    """Into how many stages the layers of the model are cut, each with `tensor_parallel_size` devices of its
    own. A step passes from stage to stage, while another step is in the stage that it has left. In a group
    of processes each has one stage."""
    expert_parallel: bool = False
    """Whether the experts of a mixture stay whole, so that each device has some of them. Else each device has
    a part of every expert."""
    context_parallel: bool = False
    """Whether the pages of the cache of latent attention are dealt over the devices. Else each device has all
    of them. XLA computes such attention, and its bits depend on which pages a request has."""
    native: str = "auto"
    """The kernels for CPUs, TPUs, Hopper GPUs, B200 and RTX 50: "auto" uses them where the machine and the
    model can, "require" refuses to start unless they compute all of the model or, on an accelerator, the
    attention of its decode steps, "off" leaves everything to XLA."""
    native_folder: Path | None = None
    """Folder of the CPU kernels' library, which is compiled into it if it is not there; None: the library
    that came with the wheel, or else ~/.cache/penstock/native."""
    threads: int | None = None
    """CPU threads that load weights, compile programs, compute, and fill masks; half of them make the weights
    of an update, while the others serve. None: the processors that affinity mask and CPU quota allow. XLA has
    one pool in a process, made when JAX's CPU backend starts, so load an engine before other code computes
    with JAX; else a warning says how many threads that pool has."""
    max_model_len: int | None = None
    """Most tokens of one request, prompt and generated together; None: the model's own limit, or less if the
    KV cache holds less. A model with LongRoPE (Phi-3, Phi-4-mini) computes with its frequencies for short
    contexts if this is at most its original_max_position_embeddings, and with those for long ones if not."""
    max_num_seqs: int | None = None
    """Most outputs that run at a time. None: depends on the platform, see `DefaultSizes`."""
    feature_slots: int | None = None
    """Most outputs with penalties or a bias (allowed ids and banned words are one) that run at a time; others
    wait. Each takes 8 bytes per token of the vocabulary on the device. None: max_num_seqs, but at most
    DEFAULT_FEATURE_SLOTS unless the served sampling defaults have penalties, because then every request has
    them."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step, shared by decodes and prefill chunks. None: depends on the platform, see
    `DefaultSizes`."""
    max_prefill_chunk: int | None = None
    """Most prompt tokens of one request in a step, even if nothing else runs. None: all of the step's budget
    that decodes leave."""
    target_itl_s: float | None = None
    """Seconds that a step with decodes and prompt tokens should take at most, judged by the steps so far.
    This bounds the time between two tokens of a running request while a prompt comes in (times the square
    root of n for n prompts at once). If decodes alone take more than two thirds of it, prompts get a third of
    a longer step. 0: no target. None: DEFAULT_TARGET_ITL_S under `ModelInfo.batch_invariant`, else 0, because
    tokens would depend on a step's size, and that on time."""
    scheduling_policy: str = "fcfs"
    """Which request goes first: "fcfs", in order of arrival; "priority", by the requests' priority, which may
    preempt others."""
    max_queued_requests: int = 1024
    """Most outputs that wait; further requests are refused."""
    page_size: int = 64
    """Tokens per KV page, a power of two."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache on each device, taken in full: pages that running requests do not need keep
    prefixes. None: on an accelerator what `hbm_utilization` leaves; on CPU what max_num_seqs requests of the
    longest context can fill, or for the demo model of 2,048 tokens each, and at most 1 GiB beside recurrent
    state (logged)."""
    hbm_utilization: float = 0.9
    """Share of the accelerator memory that JAX may take, for weights, programs and KV together. JAX may take
    75 % unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise; `penstock serve` makes that 95 %."""
    prefix_cache_pages: int | None = None
    """Most KV pages kept for prefixes that no running request uses, in each group of layers (those without a
    sliding window, and those with one); None: all free pages; 0: no prefix cache."""
    state_snapshots: int | None = None
    """Snapshots of recurrent state that are kept, of models that have such state. Requests with a common
    prefix, and outputs of one prompt, share what is computed up to a snapshot. 0: none, and so no prefix
    cache for these models. None: max_num_seqs, but no more than half of the memory that is left beside the
    state itself."""
    overlap: bool = True
    """Whether a step is dispatched before the tokens of the step before it are read."""
    max_decode_steps: int = 8
    """Most decode steps in one dispatch while no request could enter; 1: always one step per dispatch, as it
    is with `pipeline_parallel_size` above 1."""
    decode_window_s: float = 0.02
    """Seconds that a window of decode steps should take at most. If eight steps or more fit, rows under a
    constraint have steps of their own between windows, at most one within this time."""
    speculation: str = "auto"
    """Who proposes the next tokens of an output, which the model then checks in one step: "lookup" copies
    what followed the same words earlier in the prompt, in the output, or in requests with the same cache
    salt; "draft" is a second, smaller model, `draft_model`; "heads" is a layer of the checkpoint that
    predicts the token after the next one. "auto" is the draft where there is one, else lookup within the
    request's own tokens under `ModelInfo.batch_invariant`, else "off". Outputs are the same as with "off"."""
    draft_model: str | None = None
    """The model that guesses under speculation="draft" or "auto": a checkpoint directory, a GGUF file or a
    hub id. It has the tokenizer of the model that is served, and is computed in its dtype. Each KV page has
    room for its keys and values, too. Or an EAGLE-3 head of that model."""
    lookup_text: str | None = None
    """A text file that a lookup reads, too, for all requests: what outputs will look like; "demo" is one that
    comes with the demo model. It is in UTF-8 and has at most MOST_TEXT_TOKENS tokens and MOST_TEXT_CHARS
    characters."""
    max_proposed_tokens: int | None = None
    """Most tokens that are proposed for an output in a step; a request may lower that. None:
    DEFAULT_PROPOSED_TOKENS; without speculation it must be None."""
    switch_interval_s: float | None = 0.0005
    """Seconds after which Python's interpreter goes from one thread to another that wants it; CPython's own
    default is 0.005. It holds for the whole process from `Engine.start` to `Engine.shutdown`, which puts back
    the former value unless other code has set it since; of several engines, the last does that. None: left
    alone."""
    max_adapters: int = 0
    """Most LoRA adapters whose weights are on the device at a time; requests for others wait. 0: none, and
    every request that names one is refused."""
    max_cached_adapters: int = 64
    """Most adapters that are kept on the host, those on the device included. Of those that came from
    `adapter_dir` the least recently used leave; those that were loaded by name stay."""
    max_adapter_rank: int = 16
    """The largest rank that an adapter may have, a power of two from 16 to 512. Each place on the device has
    room for it."""
    adapter_experts: bool = False
    """Whether adapters may change the experts of a mixture. Each place on the device then has room for the
    matrices of all experts, which are many times those of the other layers."""
    adapter_dir: Path | None = None
    """Folder of folders of adapters: one is loaded when a request first names its folder. None: adapters are
    only those that were loaded by name."""
    max_logprobs: int = 20
    """Most `logprobs` that a request may ask for."""
    generation_config: Mapping[str, Any] | None = None
    """Sampling defaults that replace those of the model's generation_config.json, by the same names."""
    grammar_time_limit_s: float = 5.0
    """A constraint that takes longer to compile, in seconds, is refused."""
    max_images: int = 32
    """Most images of a request."""
    max_image_bytes: int = 20 * 2**20
    """Most bytes of an image, as it is sent."""
    max_image_pixels: int = 2**25
    """Most pixels of an image, as its header says; it is refused before it is decoded."""
    max_image_tokens: int | None = None
    """Most tokens that an image stands for: larger ones are made smaller. The programs that encode images are
    compiled for up to so many. None: depends on the platform, see `DefaultSizes`."""
    media_pool_tokens: int | None = None
    """Tokens of images whose embeddings are kept on the device: of those that running requests need, and of
    those that were used last. None: POOLED_IMAGES times max_image_tokens."""
    max_encode_patches: int | None = None
    """Most patches of images that are encoded in one step; a single image may have more. None: as many as
    the largest image has."""
    compilation_cache: Path | None = field(default_factory=default_compilation_cache)
    """Folder in which compiled programs are kept between starts; None: they are not kept."""
    compiled: Path | None = None
    """Folder of programs that `penstock compile` made for this machine, perhaps on another. They are used if
    all that they are made of agrees; else a warning says what differs, and programs are compiled here."""
    metrics: bool = True
    """Whether the engine measures what it does, for `Engine.metrics` and the server's metrics."""
    show_progress: bool = True
    """Whether progress bars are shown, if stderr is a terminal."""
    tool_call_parser: str = "auto"
    """The form in which the model writes calls of tools; auto: told from its chat template."""
    reasoning_parser: str = "auto"
    """The form in which it writes what it thinks; auto: told from its chat template."""

    def __post_init__(self) -> None:
        bad: list[str] = []
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                bad.append(f"{name}: must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if self.tensor_parallel_size is not None and not 1 <= self.tensor_parallel_size <= MOST_DEVICES:
            bad.append(
                f"tensor_parallel_size: must be from 1 to {MOST_DEVICES}, not {self.tensor_parallel_size}"
            )
        if not 1 <= self.pipeline_parallel_size <= MOST_DEVICES:
            bad.append(
                f"pipeline_parallel_size: must be from 1 to {MOST_DEVICES}, not {self.pipeline_parallel_size}"
            )
        if self.threads is not None and not 1 <= self.threads <= 4096:
            bad.append(f"threads: must be from 1 to 4096, not {self.threads}")
        if self.max_model_len is not None and self.max_model_len < 2:
            bad.append(f"max_model_len: must be at least 2, not {self.max_model_len}")
        num_seqs, num_tokens = self.max_num_seqs, self.max_num_batched_tokens
        if num_seqs is not None and not 1 <= num_seqs <= 4096:
            bad.append(f"max_num_seqs: must be from 1 to 4096, not {num_seqs}")
        if num_tokens is not None and num_tokens < max(16, num_seqs or 0):
            than = "16" if num_seqs is None else f"16 and max_num_seqs ({num_seqs})"
            bad.append(f"max_num_batched_tokens: must be at least {than}, not {num_tokens}")
        if self.feature_slots is not None and self.feature_slots < 1:
            bad.append(f"feature_slots: must be at least 1, not {self.feature_slots}")
        if self.max_prefill_chunk is not None and self.max_prefill_chunk < 1:
            bad.append(f"max_prefill_chunk: must be at least 1, not {self.max_prefill_chunk}")
        if self.target_itl_s is not None and not 0.0 <= self.target_itl_s <= 60.0:
            bad.append(f"target_itl_s: must be from 0 to 60, not {self.target_itl_s}")
        if self.prefix_cache_pages is not None and self.prefix_cache_pages < 0:
            bad.append(f"prefix_cache_pages: must be at least 0, not {self.prefix_cache_pages}")
        if self.state_snapshots is not None and not 0 <= self.state_snapshots <= MAX_SNAPSHOTS:
            bad.append(f"state_snapshots: must be from 0 to {MAX_SNAPSHOTS}, not {self.state_snapshots}")
        if not 1 <= self.max_decode_steps <= MAX_DECODE_STEPS:
            bad.append(f"max_decode_steps: must be from 1 to {MAX_DECODE_STEPS}, not {self.max_decode_steps}")
        if not 0.0 < self.decode_window_s <= 60.0:
            bad.append(f"decode_window_s: must be above 0 and at most 60, not {self.decode_window_s}")
        proposed = self.max_proposed_tokens
        if proposed is not None and not 1 <= proposed <= MAX_PROPOSED_TOKENS:
            bad.append(f"max_proposed_tokens: must be from 1 to {MAX_PROPOSED_TOKENS}, not {proposed}")
        if proposed is not None and self.speculation == "off":
            bad.append("max_proposed_tokens: goes with a speculation other than off")
        if self.switch_interval_s is not None and not 1e-5 <= self.switch_interval_s <= 1.0:
            bad.append(f"switch_interval_s: must be from 0.00001 to 1, not {self.switch_interval_s}")
        if self.max_queued_requests < 1:
            bad.append(f"max_queued_requests: must be at least 1, not {self.max_queued_requests}")
        if self.page_size < 1 or self.page_size & (self.page_size - 1) or self.page_size > 1024:
            bad.append(f"page_size: must be a power of two up to 1024, not {self.page_size}")
        if self.kv_cache_bytes is not None and self.kv_cache_bytes <= 0:
            bad.append(f"kv_cache_bytes: must be above 0, not {self.kv_cache_bytes}")
        if not 0.0 < self.hbm_utilization <= 1.0:
            bad.append(f"hbm_utilization: must be above 0 and at most 1, not {self.hbm_utilization}")
        if not 0 <= self.max_logprobs <= 1024:
            bad.append(f"max_logprobs: must be from 0 to 1024, not {self.max_logprobs}")
        if not 0.0 < self.grammar_time_limit_s <= 3600.0:
            bad.append(
                f"grammar_time_limit_s: must be above 0, at most 3600, not {self.grammar_time_limit_s}"
            )
        bad += _image_problems(self) + _adapter_problems(self) + _draft_problems(self)
        bad += _pipeline_problems(self)
        try:
            override_defaults(GenerationDefaults(), self.generation_config or {})
        except ConfigError as error:
            bad.append(str(error))
        if bad:
            raise ConfigError("; ".join(bad))


def _adapter_problems(config: EngineConfig) -> list[str]:
    bad: list[str] = []
    if not 0 <= config.max_adapters <= MOST_ADAPTERS:
        bad.append(f"max_adapters: must be from 0 to {MOST_ADAPTERS}, not {config.max_adapters}")
    if config.max_adapters > config.max_cached_adapters:
        described = f"must be at least max_adapters, {config.max_adapters}, not {config.max_cached_adapters}"
        bad.append(f"max_cached_adapters: {described}")
    if config.max_adapter_rank not in ADAPTER_RANKS:
        ranks = ", ".join(map(str, ADAPTER_RANKS))
        bad.append(f"max_adapter_rank: must be one of {ranks}, not {config.max_adapter_rank}")
    if config.adapter_dir is not None and not config.max_adapters:
        bad.append("adapter_dir: goes with max_adapters above 0")
    if config.adapter_experts and not config.max_adapters:
        bad.append("adapter_experts: goes with max_adapters above 0")
    return bad


def _draft_problems(config: EngineConfig) -> list[str]:
    if config.draft_model is not None and config.speculation not in ("auto", "draft"):
        return ['draft_model: goes with speculation="draft" or "auto"']
    looks_up = config.speculation == "lookup" or (config.speculation == "auto" and config.draft_model is None)
    if config.lookup_text is not None and not looks_up:
        return ['lookup_text: goes with speculation="lookup", or with "auto" and no draft_model']
    return (
        []
        if config.draft_model or config.speculation != "draft"
        else ['speculation: "draft" needs a draft_model']
    )


def _pipeline_problems(config: EngineConfig) -> list[str]:
    if config.pipeline_parallel_size == 1:
        return []
    beside = {
        "tensor_parallel_size": ("a number", config.tensor_parallel_size is not None),
        "speculation": ("auto or off", config.speculation in ("auto", "off")),
        "draft_model": ("left out", config.draft_model is None),
        "lookup_text": ("left out", config.lookup_text is None),
        "max_proposed_tokens": ("left out", config.max_proposed_tokens is None),
        "max_adapters": ("0", config.max_adapters == 0),
        "compiled": ("left out", config.compiled is None),
    }
    return [
        f"{name}: must be {what} where pipeline_parallel_size is above 1"
        for name, (what, is_so) in beside.items()
        if not is_so
    ]


def _image_problems(config: EngineConfig) -> list[str]:
    ranges = {
        "max_images": (1, 1024),
        "max_image_bytes": (1, 2**30),
        "max_image_pixels": (1, MOST_IMAGE_PIXELS),
        "max_image_tokens": (1, 2**16),
        "media_pool_tokens": (1, 2**24),
        "max_encode_patches": (1, 2**24),
    }
    values = {name: getattr(config, name) for name in ranges}
    bad = [
        f"{name}: must be from {least} to {most}, not {values[name]}"
        for name, (least, most) in ranges.items()
        if values[name] is not None and not least <= values[name] <= most
    ]
    tokens, pool = config.max_image_tokens, config.media_pool_tokens
    if tokens is not None and pool is not None and pool < tokens:
        bad.append(f"media_pool_tokens: must be at least max_image_tokens, {tokens}, not {pool}")
    return bad


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """The options that an engine runs with: these fields are never None."""

    max_num_seqs: int
    max_num_batched_tokens: int
    feature_slots: int
    max_image_tokens: int
    media_pool_tokens: int

    @property
    def most_rows(self) -> int:
        """Most rows of a step, where each proposed token counts as one."""
        rows = self.max_num_seqs
        if self.max_proposed_tokens is None:
            return rows
        wanted = min(rows * (1 + self.max_proposed_tokens), CHECKED_ROWS, self.max_num_batched_tokens)
        return max(rows, wanted)


def resolve(
    config: EngineConfig, sizes: DefaultSizes, *, defaults: GenerationDefaults | None = None
) -> ResolvedConfig:
    """Return the options with numbers where nothing was chosen: the platform's `sizes`, but no more rows than
    the tokens given, and no fewer tokens than the rows given. `defaults` are the served sampling defaults. If
    they have penalties, so has every request that does not set them otherwise, and there are as many feature
    slots as rows.
    """
    num_seqs = config.max_num_seqs or min(sizes.num_seqs, config.max_num_batched_tokens or sizes.num_seqs)
    image_tokens = config.max_image_tokens or min(
        sizes.image_tokens, config.media_pool_tokens or sizes.image_tokens
    )
    are_all_penalised = defaults is not None and defaults.sampling().has_penalties
    feature_slots = num_seqs if are_all_penalised else DEFAULT_FEATURE_SLOTS
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    values |= {
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens or max(sizes.num_tokens, num_seqs),
        "max_image_tokens": image_tokens,
        "media_pool_tokens": config.media_pool_tokens or POOLED_IMAGES * image_tokens,
        "feature_slots": min(num_seqs, config.feature_slots or feature_slots),
        # A window of decode steps is one program, and stages have one each.
        "max_decode_steps": 1 if config.pipeline_parallel_size > 1 else config.max_decode_steps,
        "max_proposed_tokens": None
        if config.speculation == "off" or config.pipeline_parallel_size > 1
        else config.max_proposed_tokens or DEFAULT_PROPOSED_TOKENS,
    }
    return ResolvedConfig(**values)
