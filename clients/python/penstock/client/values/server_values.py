"""Values that describe a server: the served model, its limits, and how busy it is."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from penstock.client.values.results import WeightsVersion
from penstock.client.values.sampling_values import SamplingDefaults


class AbortOutcome(enum.Enum):
    """What an abort did to one request."""

    ABORTED = "aborted"
    ALREADY_FINISHED = "already_finished"
    NOT_FOUND = "not_found"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class AbortResult:
    request_id: str
    outcome: AbortOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A profile that the server has written."""

    path: str
    """Its folder, on the server's machine."""
    steps: int
    """Steps of the engine that were recorded whole; fewer than asked for if the time was over."""
    num_bytes: int
    """Size of its files."""
    duration: float
    """For how long was recorded, in seconds."""
    folder: Path | None = None
    """Where its files are on this machine; None if they were not sent. `perfetto_trace.json.gz` in it is what
    https://ui.perfetto.dev opens."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor that a weight update accepts."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What a server takes of the images in requests."""

    max_images: int
    """The most images of a request."""
    max_image_bytes: int
    """The most bytes of one. All of them must fit into `ServerInfo.max_request_bytes`, too."""
    max_image_pixels: int
    """The most pixels of one, its width times its height; all of a request have at most 4 times as many."""
    media_types: tuple[str, ...]
    """The forms that the server reads, such as "image/png"."""
    image_token_id: int
    """The token that stands for an image of `media` in a prompt."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    model: str
    architecture: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingDefaults
    weights: WeightsVersion
    features: tuple[str, ...]
    """The optional parts of the contract that the server has; using another one raises Unsupported.

    They are "chat", "prompt_logprobs", "json_schema" (also for JsonObject), "regex" (also for Ebnf and
    Choice), "adapters", "priority", "update_weights", "tracing", "profile", "images", "embed", "score",
    "hidden_states", "names", "rerank" and "classify". "batch_invariant" is a promise: a token's logits depend
    on its own request alone, bit for bit.
    """
    tensors: tuple[TensorInfo, ...] = ()
    weights_digest: bytes = b""
    """SHA-256 of the update in use, as in `WeightsUpdate.digest`; empty for the weights of the start."""
    weights_since: datetime | None = None
    """When the weights in use went live (UTC); None if the server did not say."""
    staged_update_id: str = ""
    """The update that waits for `commit_weights` or `discard_weights`; empty if none does."""
    template_variables: tuple[str, ...] = ()
    """The names for `template_options` that the model's own chat templates read."""
    image_limits: ImageLimits | None = None
    """What the model takes of images; None if it takes none."""
    hidden_size: int = 0
    """How many numbers a hidden state has, and so an embedding; 0 where the server sends neither."""
    default_pooling: str = "unspecified"
    """What `embed` makes vectors of where a call does not say it: "last_token", "mean" or
    "first_token"."""
    default_rerank_method: str = "unspecified"
    """What `rerank` computes relevance from where a call does not say it: "embeddings", "yes_no"
    or "classifier"."""
    tokenizer: TokenizerInfo | None = None
    """None unless it was asked for, and if the model has none."""


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """A tokenizer, for programs that render conversations themselves and have the server tokenize them."""

    special_tokens: Mapping[str, str]
    """The special tokens that have a part, by the names that chat templates know, such as "eos_token"."""
    chat_template: str
    """The model's chat template; of several the one named "default". Empty if there is none."""
    tokenizer_class: str
    """The class that loads it in Hugging Face transformers."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Limits of the server, fixed at its start."""

    server_version: str
    instance_id: str
    contract_revision: int
    max_running_requests: int
    max_queued_requests: int
    kv_page_tokens: int
    kv_pages_total: int
    max_chunk_bytes: int
    max_logprobs: int
    devices: tuple[str, ...]
    max_request_bytes: int = 0
    """The largest message of a request; 0 if the server did not say."""
    proposer: str = ""
    """Who proposes tokens that the model then checks, several in a step, such as "lookup"; empty: nobody."""
    max_proposed_tokens: int = 0
    """The most tokens that are proposed for an output in a step."""
    max_adapters: int = 0
    """The most LoRA adapters on the device; 0: the server has none."""
    max_cached_adapters: int = 0
    """The most LoRA adapters in host memory, those on the device included."""
    max_adapter_rank: int = 0
    """The largest rank of an adapter."""
    adapter_experts: bool = False
    """Whether adapters may change the experts of a mixture, too."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the server is now."""

    running_requests: int
    queued_requests: int
    queued_prompt_tokens: int
    kv_pages_used: int
    kv_pages_total: int
    paused: bool
    weights: WeightsVersion
    loaded_adapters: int = 0
    """LoRA adapters on the device."""


@dataclass(frozen=True, slots=True)
class FlushedCache:
    """What a flush of the prefix cache did, in KV pages."""

    pages_freed: int
    pages_in_use: int
    """Pages that running requests keep."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenized text, and the context that it must fit into."""

    token_ids: tuple[int, ...]
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What each token of the model stands for. It stays the same as long as the server runs."""

    tokens: tuple[bytes, ...] = field(repr=False)
    """Their bytes, by token id: of a special token those of its name, and none of an id that the tokenizer
    does not have."""
    special_token_ids: frozenset[int] = field(repr=False)
    """The tokens that a text leaves out unless `skip_special_tokens` is false."""
    is_exact: bool
    """Whether the bytes of any tokens, joined, are their text, but for `dropped_leading_spaces`. Else a token
    has the bytes of the text that it has alone."""
    dropped_leading_spaces: int
    """How many spaces a text loses at its start, if it begins with so many."""

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token; none for an id that is not in the vocabulary."""
        return self.tokens[token_id] if token_id < len(self.tokens) else b""

    def text_of(self, token_ids: Iterable[int], *, with_special: bool = False) -> str:
        """Decode the text of these tokens from its start, with U+FFFD for bytes that are no character.
        Special tokens are left out of it unless `with_special`. It is what Detokenize answers if `is_exact`.
        """
        hidden = frozenset[int]() if with_special else self.special_token_ids
        text = b"".join(self.bytes_of(i) for i in token_ids if i not in hidden).decode("utf-8", "replace")
        return text[min(self.dropped_leading_spaces, len(text) - len(text.lstrip(" "))) :]


@dataclass(frozen=True, slots=True)
class TracingStatus:
    """How much a server traces, and what became of its spans since it started."""

    previous: str
    """The level before the call: "off", "requests", "steps" or "detailed"."""
    current: str
    """The level now."""
    spans_exported: int
    """Spans that the collector has taken."""
    spans_dropped: int
    """Spans that were not sent, because too many waited for the collector."""
    spans_failed: int
    """Spans that the collector has refused, or that did not reach it."""
