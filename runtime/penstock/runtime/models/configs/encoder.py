"""What an encoder has that a decoder lacks, and what makes classes of hidden states, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.runtime.requests.reader import Classes

Activation = Literal["tanh", "gelu", "relu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DistanceConfig:
    """What attention adds to a score for how far apart query and key are.

    entries: for each distance, query's position minus key's, its entry in the table, from the most negative
    one on; those beyond have the outermost. kind: the table has a number for each head ("bias", MPNet), or
    vectors of which each layer makes queries and keys of distances ("disentangled", DeBERTa; He et al. 2020,
    arXiv 2006.03654), for which `by_queries` and `by_keys` say what is multiplied by them. norm: the vectors
    pass a layer norm.
    """

    size: int
    entries: tuple[int, ...]
    kind: Literal["bias", "disentangled"]
    by_queries: bool = True
    by_keys: bool = False
    norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionConfig:
    """A layer behind the pooling, activation(weight x + bias), as the module Dense of Sentence Transformers.

    folder: that of its file in the checkpoint, such as "2_Dense". in_size, out_size: how many numbers it
    takes and makes. activation: None: there is none.
    """

    folder: str
    in_size: int
    out_size: int
    bias: bool
    activation: Activation | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """A model whose tokens attend to all tokens of their text, before them and behind them.

    token_types: the entries of a table of token types; 0: there is none. A token of type t has the id t *
    vocab_size + id in the engine. embedding_size: that of the tables, where a product makes hidden states of
    their sum; None: there is no such product. norm_embeddings: a layer norm follows them. final_norm: another
    one follows the last layer. passes: the module of each layer, for models of which several layers are one
    module. group_size: how many of these modules a checkpoint has in a group. projections: what embeddings
    pass behind the pooling, in this order.
    """

    token_types: int = 0
    embedding_size: int | None = None
    norm_embeddings: bool = True
    final_norm: bool = False
    distances: DistanceConfig | None = None
    passes: tuple[int, ...] = ()
    group_size: int = 1
    projections: tuple[ProjectionConfig, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierConfig:
    """What makes a number for each class of a text: out(norm(activation(dense(pooled)))), of which all but
    `out` may be absent.

    activation: None: there is no dense layer. norm: a layer norm without a
    bias follows it.
    """

    classes: Classes
    activation: Activation | None = None
    dense_bias: bool = True
    norm: bool = False
    bias: bool = True
