"""What reads the images of a model, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VisionActivation = Literal["silu", "gelu_tanh", "gelu"]
"""The activation of an MLP over patches."""
BothWays = Literal["none", "windows", "all"]
"""In which layers of the decoder the tokens of an image see those behind them in the same image: in none,
in those with a window, or in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The part of a model that makes embeddings of images. Each kind of encoder has a class of its own, and
    `models/vision/encoders.py` says what belongs to each.

    out_size: channels of a token, those of the decoder. image_token_id: the token whose embeddings are
    replaced by those of images. depth: blocks; hidden_size, intermediate_size, num_heads: theirs.
    patch_size: pixels on a side of a patch.
    """

    out_size: int
    image_token_id: int
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    in_channels: int = 3

    @property
    def num_outputs(self) -> int:
        """How many embeddings a token of an image has: one, and those that are added in layers."""
        return 1

    @property
    def both_ways(self) -> BothWays:
        return "none"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_features(self) -> int:
        """How many values one patch has."""
        return self.in_channels * self.patch_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVisionConfig(VisionConfig):
    """The encoder of Qwen's models: a transformer over patches, of which a square of merge_size x merge_size
    becomes one token.

    gated: the MLPs are gated; rms_norms: norms are by root mean square, else layer norms. patch_bias: the
    product that reads patches has one. position_side: a learned table of position_side^2 positions is
    interpolated to the image's grid; None: there is none. deepstack: the blocks (from 0) whose outputs are
    merged too, and added to what the first layers of the decoder give. window: patches of a side of the
    windows within which blocks attend, but for those in full_blocks; None: all blocks attend to the whole
    image. video_token_id: stands for a video, which is not taken.
    """

    video_token_id: int
    temporal_patch_size: int = 2
    merge_size: int = 2
    activation: VisionActivation = "gelu_tanh"
    gated: bool = False
    rms_norms: bool = False
    patch_bias: bool = True
    position_side: int | None = None
    deepstack: tuple[int, ...] = ()
    window: int | None = None
    full_blocks: tuple[int, ...] = ()
    rope_theta: float = 10_000.0

    @property
    def num_outputs(self) -> int:
        return 1 + len(self.deepstack)

    @property
    def patch_features(self) -> int:
        """How many values one patch has."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class SiglipVisionConfig(VisionConfig):
    """The encoder of Gemma 3: SigLIP, a transformer over the patches of a square image, all of which are of
    one size. The outputs of a square of patches are averaged to one token.

    tokens_per_side: squares on each side of an image. begin_token_id, end_token_id: tokens that texts have
    before and behind an image.
    """

    image_size: int
    tokens_per_side: int
    begin_token_id: int
    end_token_id: int
    activation: VisionActivation = "gelu_tanh"
    eps: float = 1e-6

    @property
    def both_ways(self) -> BothWays:
        return "all"

    @property
    def side(self) -> int:
        """Patches on each side of an image."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """Patches of every image."""
        return self.side**2

    @property
    def num_tokens(self) -> int:
        """Tokens of every image."""
        return self.tokens_per_side**2

    @property
    def per_token(self) -> int:
        """Patches of a token."""
        return self.num_patches // self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralConfig(VisionConfig):
    """Pixtral's encoder, and the projector that makes tokens of its patches.

    A square of merge_size x merge_size patches becomes one token. merger_eps: that of the norm before the
    product that merges a square; None: patches are projected as they are. projector_bias: the projector's two
    products have one.
    """

    merge_size: int = 2
    activation: VisionActivation = "gelu"
    projector_activation: VisionActivation = "gelu"
    projector_bias: bool = False
    merger_eps: float | None = None
    rope_theta: float = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig(VisionConfig):
    """An encoder of square tiles of image_size pixels on a side, and the projector that makes tokens of its
    patches. A square of merge_size x merge_size patches becomes one token.
    """

    image_size: int
    merge_size: int = 2

    @property
    def side(self) -> int:
        """How many patches a tile has on a side."""
        return self.image_size // self.patch_size

    @property
    def patches_per_tile(self) -> int:
        return self.side**2

    @property
    def tokens_per_tile(self) -> int:
        return (self.side // self.merge_size) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class InternConfig(TileConfig):
    """InternViT and its projector.

    qkv_bias: the products that make queries, keys and values have one; qk_norm: queries and keys are
    normalised, over all heads. rms_norms: norms are by root mean square, else layer norms, with `eps`.
    has_positions: there is a table of positions.
    """

    activation: VisionActivation = "gelu"
    projector_activation: VisionActivation = "gelu"
    qkv_bias: bool = False
    qk_norm: bool = False
    rms_norms: bool = False
    eps: float = 1e-6
    has_positions: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4VisionConfig(TileConfig):
    """The encoder of Llama 4 and its projector.

    adapter_size: channels between the products that make a token of a square. rope_theta: of the rotation by
    column and row.
    """

    adapter_size: int
    rope_theta: float = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4VisionConfig(VisionConfig):
    """The encoder of Gemma 4, whose outputs of a square of merge_size x merge_size patches are averaged to
    one token.

    most_tokens: of an image. begin_token_id, end_token_id: tokens that stand before and behind an image.
    video_token_id, audio_token_id: stand for a video and for a sound, which are not taken. num_positions: of
    each of the two tables of positions, for columns and for rows. has_bounds: what the products are given and
    what they give is clipped to bounds of the checkpoint. standardizes: the averages have a bias and a scale.
    sees_windows_ahead: see `both_ways`.
    """

    most_tokens: int
    begin_token_id: int
    end_token_id: int
    video_token_id: int
    audio_token_id: int
    num_positions: int
    merge_size: int = 3
    has_bounds: bool = False
    standardizes: bool = False
    sees_windows_ahead: bool = False
    eps: float = 1e-6
    rope_theta: float = 100.0

    @property
    def both_ways(self) -> BothWays:
        return "windows" if self.sees_windows_ahead else "none"
