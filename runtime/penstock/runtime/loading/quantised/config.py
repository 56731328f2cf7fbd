"""`quantization_config` in all its spellings: for each layer what reads it, or that it is not quantised.

A field that changes what weights mean is honoured or refused by name. What is said of activations is read and
not used, because activations are computed in the dtype that is served.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from penstock.runtime.errors import ConfigError
from penstock.runtime.loading.quantised import floats, integers
from penstock.runtime.loading.quantised.floats import Blocks
from penstock.runtime.loading.quantised.integers import Integers
from penstock.runtime.loading.quantised.layers import Layer, QuantisedWeight
from penstock.runtime.model_files import read_json_object
from penstock.runtime.models.hf_fields import Fields

FIELD = "quantization_config"
MLX_FIELD = "quantization"
_OF_FAMILIES = ("mxfp4",)
"""Methods whose tensors a family of models reads itself (gpt-oss)."""
_BITS = (4, 8)

Reader: TypeAlias = Callable[[Layer], QuantisedWeight]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """What a config says of all layers of a checkpoint."""

    method: str
    endings: tuple[str, ...]
    """What the names of a quantised layer's tensors end in."""
    marks: tuple[str, ...]
    """Those of them that only a quantised layer has."""
    dtypes: tuple[str, ...] = ()
    """Dtypes of a weight that only a quantised layer has."""
    reader: Callable[[str], Reader | None]
    """The name of a layer to what reads it; None: the config says that it is not quantised."""
    may_be_plain: Callable[[str], bool]
    """Whether the config allows a layer not to be quantised."""
    unused: tuple[str, ...] = ()
    """Endings of tensors that tell of activations or of the KV cache, and are not read."""
    has_metadata: bool = False
    """Whether files tell of layers beside their tensors."""
    is_of_config: bool = True
    """Whether config.json says it, and no file beside it."""
    notes: tuple[str, ...] = ()
    """What of the config is not used, for the log."""


def read_quantisation(directory: Path, config: Mapping[str, Any]) -> Quantisation | None:
    """Read what config.json, or the file beside it that older tools write, says of quantised layers; None if
    it says nothing, or what a family reads itself. Raises ConfigError.
    """
    for file, given in _given(directory, config):
        fields = Fields(given, f"{FIELD}." if file == "config.json" else "")
        quantisation = _read(fields)
        fields.refuse_unread()
        if fields.problems:
            raise ConfigError(f"{directory / file} cannot be served: {'; '.join(fields.problems)}")
        return quantisation and replace(quantisation, is_of_config=file == "config.json")
    return None


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Take out of a config.json what `read_quantisation` reads of it."""
    given = config.get(FIELD)
    kept = isinstance(given, dict) and given.get("quant_method") in _OF_FAMILIES
    read = set() if kept else {FIELD, "compression_config"}
    if _is_mlx(config.get(MLX_FIELD)):
        read.add(MLX_FIELD)
    return {name: value for name, value in config.items() if name not in read}


def _is_mlx(given: object) -> bool:
    """Say whether this is what MLX writes, which names no method."""
    return isinstance(given, dict) and "bits" in given and "quant_method" not in given


def _given(directory: Path, config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Read the file that tells of quantised layers, and what it says; empty if there is none."""
    for name in (FIELD, "compression_config"):
        given = config.get(name)
        if given and not isinstance(given, dict):
            raise ConfigError(f"{directory / 'config.json'}: {name} must be an object, not {given!r}")
        if given and given.get("quant_method") in _OF_FAMILIES:
            return []
        if given and not _is_mlx(given):
            return [("config.json", given)]
    for name in (MLX_FIELD, FIELD):
        given = config.get(name)
        if isinstance(given, dict) and _is_mlx(given):
            return [("config.json", {"quant_method": "mlx", **given})]
    for file, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (directory / file).is_file():
            return [(file, {"quant_method": method, **read_json_object(directory / file)})]
    return []


def _read(fields: Fields) -> Quantisation | None:
    method = fields.raw("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        supported = ", ".join(map(repr, (*_METHODS, *_OF_FAMILIES)))
        fields.problem("quant_method", f"{method!r} is not supported; supported: {supported}")
        fields.rest()
        return None
    return _METHODS[method](fields)


@dataclass(frozen=True, slots=True)
class _Names:
    """Parts of names of layers that are not quantised, as transformers and vLLM read them."""

    parts: tuple[str, ...]

    @staticmethod
    def read(fields: Fields, *names: str) -> _Names:
        """Read the lists that these fields have, one after the other."""
        found: list[str] = []
        for name in names:
            value = fields.raw(name)
            if value is None:
                continue
            if not isinstance(value, list) or not all(isinstance(part, str) and part for part in value):
                fields.problem(name, f"must be a list of names, not {value!r}")
                continue
            found += value
        return _Names(tuple(found))

    def certainly(self, layer: str) -> bool:
        """Say whether a part is the layer's name, or whole words of it."""
        return any(f".{part}." in f".{layer}." for part in self.parts)

    def perhaps(self, layer: str) -> bool:
        """Say whether a part is found in the name, or matches its begin as a pattern. Projects differ in
        which of these they mean.
        """
        return any(part in layer or _matches(part, layer) for part in self.parts)


def _matches(pattern: str, name: str) -> bool:
    """Say whether a pattern matches the begin of a name. One that is no regular expression matches
    nothing.
    """
    try:
        return re.match(pattern, name) is not None
    except re.error:
        return False


def _but(plain: _Names, reader: Reader) -> Callable[[str], Reader | None]:
    """Make the reader of all layers but those of a list."""
    return lambda layer: None if plain.certainly(layer) else reader


def _integers(fields: Fields, bits: str, group: str, symmetric: bool) -> Integers:
    """Read bits and size of groups from fields of these names."""
    return Integers(_bits(fields, bits), _group(fields, group), symmetric)


def _bits(fields: Fields, name: str) -> int:
    bits = fields.integer(name)
    if bits not in _BITS:
        fields.problem(name, f"{bits} is not supported; supported: {', '.join(map(str, _BITS))}")
        return 4
    return bits


def _group(fields: Fields, name: str) -> int | None:
    """Read the size of a group; None, for -1 and null: all inputs."""
    return None if fields.raw(name) == -1 else fields.optional_integer(name)


def _awq(fields: Fields) -> Quantisation:
    """Read AutoAWQ's config, in the spelling of transformers and in its own."""
    bits, group = ("w_bit", "q_group_size") if "w_bit" in fields else ("bits", "group_size")
    fields.only(bits, 4)
    version = fields.raw("version")
    if str(version or "gemm").lower() != "gemm":
        fields.problem("version", f"{version!r} is not supported; supported: 'gemm'")
    fields.only("zero_point", True)
    fields.only("backend", "autoawq")
    fields.ignore(("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config"))
    scheme = _integers(fields, bits, group, False)
    plain = _Names.read(fields, "modules_to_not_convert")
    return Quantisation(
        method="awq",
        endings=("qweight", "qzeros", "scales"),
        marks=("qweight", "qzeros", "scales"),
        reader=_but(plain, functools.partial(integers.awq, scheme=scheme)),
        may_be_plain=plain.perhaps,
    )


_GPTQ_HARMLESS = (
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "disable_exllama",
    "exllama_config",
    "lm_head",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "offload_to_disk",
    "pad_token_id",
    "static_groups",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
)
"""How the weights were found, what computes with them elsewhere, and which layers have them, which the
tensors say."""


def _gptq(fields: Fields) -> Quantisation:
    """Read the config of AutoGPTQ, GPTQModel and transformers."""
    fields.only("pack_dtype", "int32")
    fields.only("checkpoint_format", "gptq", "gptq_v2")
    version = 2 if fields.raw("checkpoint_format") == "gptq_v2" else 1
    fields.ignore(_GPTQ_HARMLESS)
    scheme = _integers(fields, "bits", "group_size", fields.boolean("sym", True))
    usual = functools.partial(
        integers.gptq, scheme=scheme, version=version, ordered=fields.boolean("desc_act", False)
    )
    differing = _gptq_differing(fields, usual)

    def reader(layer: str) -> Reader | None:
        return next((reader for pattern, reader in differing if re.match(pattern, layer)), usual)

    return Quantisation(
        method="gptq",
        endings=("qweight", "qzeros", "scales", "g_idx"),
        marks=("qweight", "qzeros", "scales", "g_idx"),
        reader=reader,
        may_be_plain=lambda layer: True,  # the config has no list of them
    )


def _gptq_differing(
    fields: Fields, usual: functools.partial[QuantisedWeight]
) -> list[tuple[re.Pattern[str], Reader | None]]:
    """Read GPTQModel's `dynamic`: patterns of names, with "-:" before those of layers that are not quantised,
    and what differs in the others.
    """
    found: list[tuple[re.Pattern[str], Reader | None]] = []
    for pattern, given in fields.mapping("dynamic").items():
        where = f"dynamic.{pattern}"
        try:
            compiled = re.compile(pattern.removeprefix("-:").removeprefix("+:"))
        except re.error as error:
            fields.problem(where, f"is no regular expression ({error})")
            continue
        if pattern.startswith("-:"):
            found.append((compiled, None))
            continue
        if not isinstance(given, dict):
            fields.problem(where, f"must be an object, not {given!r}")
            continue
        scheme: Integers = usual.keywords["scheme"]
        own = Fields(given, f"{FIELD}.{where}.", fields.problems)
        scheme = Integers(
            _bits(own, "bits") if "bits" in own else scheme.bits,
            _group(own, "group_size") if "group_size" in own else scheme.group,
            own.boolean("sym", scheme.symmetric),
        )
        ordered = own.boolean("desc_act", usual.keywords["ordered"])
        own.ignore(_GPTQ_HARMLESS)
        own.refuse_unread()
        found.append((compiled, functools.partial(usual, scheme=scheme, ordered=ordered)))
    return found


def _fp8(fields: Fields) -> Quantisation:
    """Read the config of DeepSeek's and Qwen's checkpoints, and of vLLM's older ones."""
    fields.only("fmt", "e4m3", "float8_e4m3fn")
    fields.only("activation_scheme", "dynamic", "static")
    fields.only("scale_fmt", "float", "float32", "ue8m0")
    fields.ignore(("dequantize",))
    size = fields.raw("weight_block_size")
    blocks = _blocks(fields, "weight_block_size", size) if size is not None else Blocks(None, None)
    scale = "weight_scale" if size is None else "weight_scale_inv"
    notes = _cache_notes(fields)
    plain = _Names.read(fields, "modules_to_not_convert", "ignored_layers")
    return Quantisation(
        method="fp8",
        endings=("weight", scale),
        marks=("weight_scale", "weight_scale_inv"),
        dtypes=("F8_E4M3", "F8_E5M2"),
        unused=("input_scale", "activation_scale", *(_CACHE_ENDINGS if notes else ())),
        notes=notes,
        reader=_but(plain, functools.partial(floats.fp8, blocks=blocks, scale=scale)),
        may_be_plain=plain.perhaps,
    )


def _blocks(fields: Fields, name: str, size: object) -> Blocks:
    if isinstance(size, str):
        size = [int(part) if part.isdecimal() else part for part in size.split("x")]
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        fields.problem(name, f"must be two sizes, not {size!r}")
        return Blocks(None, None)
    return Blocks(*size)


_CACHE_ENDINGS = ("k_scale", "v_scale", "output_scale", "output_zero_point", "kv_scale")


def _cache_notes(fields: Fields) -> tuple[str, ...]:
    """Return a note if there is a `kv_cache_scheme`."""
    if not fields.raw("kv_cache_scheme"):
        return ()
    return ("kv_cache_scheme is not used: --kv-cache-dtype says what the KV cache is kept in",)


def _bitsandbytes(fields: Fields) -> Quantisation:
    """Read the config of bitsandbytes in transformers."""
    fields.ignore(
        (
            "bnb_4bit_compute_dtype",
            "bnb_4bit_use_double_quant",
            "llm_int8_enable_fp32_cpu_offload",
            "llm_int8_has_fp16_weight",
            "llm_int8_threshold",
        )
    )
    is_4bit, is_8bit = fields.boolean("load_in_4bit", False), fields.boolean("load_in_8bit", False)
    if is_4bit == is_8bit:
        fields.problem("load_in_4bit", "or load_in_8bit must be true, and the other one false")
    plain = _Names.read(fields, "llm_int8_skip_modules")
    if is_8bit:
        fields.ignore(("bnb_4bit_quant_type", "bnb_4bit_quant_storage"))
        return Quantisation(
            method="bitsandbytes",
            endings=("weight", "SCB", "weight_format"),
            marks=("SCB", "weight_format"),
            dtypes=("I8",),
            reader=_but(plain, integers.bitsandbytes_int8),
            may_be_plain=plain.perhaps,
        )
    fields.only("bnb_4bit_quant_type", "nf4", "fp4")
    fields.only("bnb_4bit_quant_storage", "uint8")
    return Quantisation(
        method="bitsandbytes",
        endings=("weight", *floats.BITSANDBYTES_MARKS),
        marks=floats.BITSANDBYTES_MARKS,
        dtypes=("U8",),
        reader=_but(plain, floats.bitsandbytes_4bit),
        may_be_plain=plain.perhaps,
    )


def _mlx(fields: Fields) -> Quantisation:
    """Read MLX's `quantization`: one scheme for all layers, and by their names others, or false."""
    fields.only("mode", "affine")
    scheme = _integers(fields, "bits", "group_size", False)
    differing: dict[str, Integers | None] = {}
    for name, given in fields.rest().items():
        if given is False:
            differing[name] = None
        elif isinstance(given, dict):
            own = Fields(given, f"{MLX_FIELD}.{name}.", fields.problems)
            own.only("mode", "affine")
            differing[name] = _integers(own, "bits", "group_size", False)
            own.refuse_unread()
        elif given is not True:
            fields.problem(name, f"{given!r} is not supported: it must be an object, or true or false")

    def reader(layer: str) -> Reader | None:
        own = differing.get(layer, scheme)
        return None if own is None else functools.partial(integers.mlx, scheme=own)

    return Quantisation(
        method="mlx",
        endings=("weight", "scales", "biases"),
        marks=("scales", "biases"),
        dtypes=("U32",),
        reader=reader,
        may_be_plain=lambda layer: True,  # the tensors say which are
    )


def _torchao(fields: Fields) -> Quantisation:
    """Read transformers' config of torchao. What the weights are is told in the files."""
    fields.ignore(("quant_type", "quant_type_kwargs", "include_input_output_embeddings"))
    fields.ignore(("untie_embedding_weights",))
    plain = _Names.read(fields, "modules_to_not_convert")
    endings = ("qdata", "scale", "zero_point", "act_pre_scale", "act_quant_scale", "act_quant_zero_point")
    marks = tuple(f"_weight_{ending}" for ending in endings)
    return Quantisation(
        method="torchao",
        endings=marks,
        marks=marks,
        reader=_but(plain, integers.torchao),
        may_be_plain=lambda layer: True,  # quant_type may leave some out
        has_metadata=True,
    )


_CT_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)
_CT_ENDINGS = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight_global_scale",
)


@dataclass(frozen=True, slots=True)
class _Group:
    """A group of compressed-tensors' config."""

    targets: tuple[str, ...]
    reader: Reader | None

    def names(self, layer: str) -> bool:
        """Say whether a target is the layer's name or matches it."""
        return _is_listed(self.targets, layer)

    def takes(self, layer: str) -> bool:
        """Say whether a target is a class of layers, or the layer."""
        return "Linear" in self.targets or self.names(layer)


def _is_listed(listed: Sequence[str], layer: str) -> bool:
    return any(
        _matches(name.removeprefix("re:"), layer) if name.startswith("re:") else name == layer
        for name in listed
    )


def _compressed_tensors(fields: Fields) -> Quantisation:
    """Read the config of compressed-tensors, which llm-compressor writes."""
    outer = fields.raw("format")
    if outer not in (None, "mixed-precision", "dense", *_CT_FORMATS):
        fields.problem("format", f"{outer!r} is not supported; supported: {', '.join(_CT_FORMATS)}")
    fields.ignore(("global_compression_ratio", "quantization_status", "version"))
    sparsity = Fields(fields.mapping("sparsity_config"), f"{FIELD}.sparsity_config.", fields.problems)
    sparsity.only("format", "dense")
    fields.only("transform_config", {})
    notes, ignored = _cache_notes(fields), _Names.read(fields, "ignore").parts
    groups = []
    for name, given in fields.mapping("config_groups").items():
        if isinstance(given, dict):
            groups.append(_ct_group(given, f"{FIELD}.config_groups.{name}.", fields.problems, outer))
        else:
            fields.problem(f"config_groups.{name}", f"must be an object, not {given!r}")
    if not groups:
        fields.problem("config_groups", "names no group")

    def reader(layer: str) -> Reader | None:
        if _is_listed(ignored, layer):
            return None
        return next((group.reader for group in groups if group.takes(layer)), None)

    return Quantisation(
        method="compressed-tensors",
        endings=_CT_ENDINGS,
        marks=_CT_ENDINGS[1:],
        dtypes=("I8", "F8_E4M3"),
        reader=reader,
        may_be_plain=lambda layer: reader(layer) is None,
        unused=(
            "input_scale",
            "input_zero_point",
            "input_global_scale",
            *(_CACHE_ENDINGS if notes else ()),
        ),
        notes=notes,
    )


def _ct_group(given: Mapping[str, object], prefix: str, problems: list[str], outer: object) -> _Group:
    """Read one of config_groups; `outer` is the format of the config."""
    fields = Fields(given, prefix, problems)
    targets = _Names.read(fields, "targets").parts
    for target in targets:
        if target != "Linear" and re.fullmatch(r"[A-Z]\w*", target):
            fields.problem("targets", f"{target!r} is not supported: of classes only 'Linear' is")
    fields.ignore(("input_activations",))
    if fields.raw("output_activations"):
        fields.problem("output_activations", "is not supported")
    form = fields.raw("format") or outer
    if form not in (None, *_CT_FORMATS):
        fields.problem("format", f"{form!r} is not supported; supported: {', '.join(_CT_FORMATS)}")
    weights = fields.mapping("weights")
    fields.refuse_unread()
    if not weights:
        fields.problem("weights", "is required")
        return _Group(targets, None)
    reader = _ct_reader(Fields(weights, f"{prefix}weights.", problems), form)
    return _Group(targets, reader)


def _ct_reader(fields: Fields, form: object) -> Reader | None:
    """Choose what reads a layer whose `weights` these are."""
    fields.ignore(("actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"))
    fields.only("dynamic", False)
    fields.only("type", "int", "float")
    kind, strategy = fields.raw("type") or "int", fields.raw("strategy")
    symmetric, bits = fields.boolean("symmetric", True), _bits(fields, "num_bits")
    group, block = _group(fields, "group_size"), fields.raw("block_structure")
    is_fp4 = kind == "float" and bits == 4
    blocks = Blocks(1, None)
    match strategy or ("channel" if group is None else "group"):
        case "tensor":
            blocks, group = Blocks(None, None), None
        case "channel":
            group = None
        case "group":
            blocks = Blocks(1, group)
            if group is None:
                fields.problem("group_size", "is required")
        case "tensor_group" if is_fp4:
            pass
        case "block" if kind == "float" and not is_fp4:
            blocks = _blocks(fields, "block_structure", block)
        case other:
            fields.problem("strategy", f"{other!r} is not supported for {bits} bits of the type {kind!r}")
    fields.refuse_unread()
    if kind == "float" and not symmetric:
        fields.problem("symmetric", "must be true for floats")
    scheme = Integers(bits, group, symmetric)
    if kind == "int" and form in (None, "pack-quantized"):
        return functools.partial(integers.packed, scheme=scheme)
    if kind == "int" and bits == 8 and form in ("int-quantized", "naive-quantized"):
        return functools.partial(integers.plain_integers, scheme=scheme)
    if kind == "float" and bits == 8 and form in (None, "float-quantized", "naive-quantized"):
        return functools.partial(floats.fp8, blocks=blocks, scale="weight_scale")
    sizes = {"mxfp4-pack-quantized": 32, "nvfp4-pack-quantized": 16}
    if is_fp4 and sizes.get(str(form)) == group:
        return functools.partial(floats.fp4, kind="mxfp4" if group == 32 else "nvfp4")
    fields.problem("num_bits", f"{bits} of the type {kind!r} and group_size {group} do not fit {form!r}")
    return None


def _auto_round(fields: Fields) -> Quantisation | None:
    """Read Intel's AutoRound, which writes tensors as AutoGPTQ or AutoAWQ do."""
    packing = fields.raw("packing_format")
    fields.ignore(
        (
            "autoround_version",
            "batch_size",
            "block_name_to_quantize",
            "data_type",
            "dataset",
            "enable_minmax_tuning",
            "enable_norm_bias_tuning",
            "enable_quanted_input",
            "gradient_accumulate_steps",
            "iters",
            "low_gpu_mem_usage",
            "lr",
            "minmax_lr",
            "nsamples",
            "scale_dtype",
            "seqlen",
            "to_quant_block_names",
        )
    )
    if packing == "auto_round:auto_gptq":
        return replace(_gptq(fields), method="auto-round")
    if packing == "auto_round:auto_awq":
        fields.ignore(("sym",))
        return replace(_awq(fields), method="auto-round")
    fields.problem(
        "packing_format",
        f"{packing!r} is not supported; supported: 'auto_round:auto_gptq', 'auto_round:auto_awq'",
    )
    fields.rest()
    return None


_METHODS: Mapping[str, Callable[[Fields], Quantisation | None]] = {
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
    "mlx": _mlx,
    "torchao": _torchao,
}
