"""What an engine serves, and the sizes that follow from its options. No jax."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.runtime.images.image import ImageLimits
from penstock.runtime.requests.reader import Reader
from penstock.runtime.requests.request import Pooling
from penstock.runtime.requests.sampling import GenerationDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model that is served, as resolved."""

    name: str
    """The model's name in replies, and the one that requests may ask for."""
    architecture: str
    """The model's class, as config.json names it."""
    vocab_size: int
    """Token ids are from 0 to vocab_size - 1."""
    max_model_len: int
    """Most tokens of one request, prompt and generated together."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an output unless the request ignores them."""
    defaults: GenerationDefaults
    """The values that sampling parameters have if a request does not set them."""
    num_pages: int
    """Pages of the KV cache, of all groups of layers together."""
    page_size: int
    """Tokens per page."""
    devices: tuple[str, ...]
    """One entry per device, such as "cpu:0 cpu"."""
    images: ImageLimits | None = None
    """What it takes of the images of a request; None: the model reads none."""
    hidden_size: int = 0
    """How many numbers a hidden state has; 0: this is not known."""
    pooling: Pooling = Pooling.LAST_TOKEN
    """What an embedding is made of where a request does not say it."""
    answer_token_ids: tuple[int, int] | None = None
    """The tokens that mean yes and no in a checkpoint that was made to judge documents; None: its files name
    none."""
    reader: Reader | None = None
    """What the model is, if it generates nothing; None: it generates."""
    batch_invariant: bool = False
    """Whether a token's logits depend on its own request alone, bit for bit. They do where native kernels
    compute the whole model (on CPU, in bfloat16, also with weights or KV cache in fewer bits). XLA's products
    do not promise it."""
    directory: Path | None = None
    """Where the model's files lie; None: it has none."""

    @property
    def room(self) -> int:
        """How many tokens a prompt and a token after it may have. A model that generates nothing reads
        prompts as long as its context.
        """
        return self.max_model_len + (self.reader is not None)
