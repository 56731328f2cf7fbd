"""EAGLE-3 heads, as vLLM and SGLang read them. A head is no model of its own: it guesses for another one, of
which it reads hidden states. So only what reads draft models looks here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import cast

from penstock.runtime.models.config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig
from penstock.runtime.models.configs.eagle import NUM_TAPS, EagleConfig
from penstock.runtime.models.configs.tensor_names import TensorNames
from penstock.runtime.models.decoder import CausalLM
from penstock.runtime.models.eagle import EagleHead
from penstock.runtime.models.families.family import ModelFamily
from penstock.runtime.models.families.reading import read_model, read_rope, read_sizes
from penstock.runtime.models.hf_fields import Fields
from penstock.runtime.models.load_rules import ParamPath, Source, Stored, StoredAt

_ANY_CONTEXT = 1 << 30
"""A head guesses at any position, whatever it was trained for: its guesses are checked."""
_IN_LAYER: Mapping[str, str] = {
    "self_attn": "self_attn",
    "mlp": "mlp",
    "input_norm": "input_layernorm",
    "hidden_norm": "hidden_norm",
    "mlp_norm": "post_attention_layernorm",
}
"""The parts of a head that checkpoints have as parts of its layer, with what they call them there."""


def _parse(architecture: str, fields: Fields) -> ModelConfig:
    fields.only("model_type", "llama")
    fields.only("hidden_act", "silu")
    fields.only("pretraining_tp", 1)
    fields.only("tie_word_embeddings", False)
    fields.only("norm_before_fc", False)
    sizes = read_sizes(fields, kv_heads=0)
    if sizes.num_layers != 1:
        fields.problem("num_hidden_layers", f"must be 1, not {sizes.num_layers}: other heads are not read")
    attention = AttentionConfig(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        scale=sizes.head_dim**-0.5,
        rope=read_rope(fields, sizes.max_positions),
        qkv_bias=(bias := fields.boolean("attention_bias", False)),
        o_bias=bias,
    )
    mlp = MLPConfig(
        intermediate_size=fields.integer("intermediate_size"), bias=fields.boolean("mlp_bias", False)
    )
    vocab_size = fields.integer("vocab_size")
    draft_vocab_size = fields.integer("draft_vocab_size", vocab_size)
    if draft_vocab_size > vocab_size:
        fields.problem("draft_vocab_size", f"{draft_vocab_size} is more than vocab_size {vocab_size}")
    eagle = EagleConfig(
        target_hidden_size=fields.integer("target_hidden_size", sizes.hidden_size),
        draft_vocab_size=draft_vocab_size,
        taps=_read_taps(fields),
        fc_bias=fields.boolean("bias", False),
        adds_to_normed=fields.boolean("norm_before_residual", False),
        maps_tokens=draft_vocab_size != vocab_size,
    )
    layers = [LayerConfig(attention=attention, mlp=mlp)]
    names = TensorNames(decoder="", table="fc.weight")
    sizes = replace(sizes, max_positions=_ANY_CONTEXT)
    return read_model(architecture, fields, sizes, layers, eagle=eagle, names=names)


def _read_taps(fields: Fields) -> tuple[int, ...]:
    """Read the layers whose inputs the head reads. `eagle_config` names the layers before them, of which
    these are the outputs, as SGLang says; the field beside it, which vLLM reads, names them as they are.
    """
    inner = Fields(fields.mapping("eagle_config"), "eagle_config.", fields.problems)
    for name, value in (
        ("use_aux_hidden_state", True),
        ("use_input_layernorm_in_first_layer", True),
        ("use_last_layernorm", True),
        ("use_mtp_layernorm", False),
    ):
        inner.only(name, value)
    name = "eagle_aux_hidden_state_layer_ids"
    outputs, inputs = _read_ids(inner, name, least=0), _read_ids(fields, name, least=0)
    inner.refuse_unread()
    outputs = tuple(layer + 1 for layer in outputs)
    if inputs and outputs and inputs != outputs:
        fields.problem(name, "contradicts eagle_config, which names the layers before")
    return inputs or outputs


def _read_ids(fields: Fields, name: str, *, least: int) -> tuple[int, ...]:
    """Read NUM_TAPS numbers of layers in rising order, or none."""
    value = fields.raw(name)
    if value in (None, []):
        return ()
    ids = value if isinstance(value, list) else []
    are_numbers = all(isinstance(one, int) and not isinstance(one, bool) and one >= least for one in ids)
    if len(ids) != NUM_TAPS or not are_numbers or sorted(set(ids)) != ids:
        fields.problem(name, f"must list {NUM_TAPS} layers in rising order, not {value!r}")
        return ()
    return tuple(ids)


def for_tensors(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """Add what only the tensors say: what their names begin with, and which parts the head has."""
    eagle = config.eagle
    assert eagle is not None, "the config is that of a head"
    found = config.names.found_in(names)
    begin = found.decoder
    plain = f"{begin}layers.0."
    eagle = replace(
        eagle,
        layer="layers.0" if any(name.startswith(plain) for name in names) else "midlayer",
        has_embeddings=f"{begin}embed_tokens.weight" in names,
        maps_tokens=eagle.maps_tokens or "d2t" in names,
    )
    return replace(config, names=found, eagle=eagle)


def _stored(config: ModelConfig) -> StoredAt:
    eagle = config.eagle
    assert eagle is not None, "the config is that of a head"

    def stored(path: ParamPath, shape: tuple[int, ...]) -> Stored:
        part, *rest = map(str, path)
        if part in _IN_LAYER:
            name = ".".join(("model", eagle.layer, _IN_LAYER[part], *rest))
        else:
            name = ".".join(("lm_head" if part == "lm_head" else f"model.{part}", *rest))
        return Stored((Source(name, shape),))

    return stored


_FAMILY = ModelFamily(
    parse=_parse,
    stored=_stored,
    harmless=(r"^t2d$",),
    copies=lambda config: {},
    build=lambda config, dtype, linear: cast("CausalLM", EagleHead(config, dtype, linear)),
)
FAMILIES: Mapping[str, ModelFamily] = {
    "LlamaForCausalLMEagle3": _FAMILY,
    "Eagle3LlamaForCausalLM": _FAMILY,
}
