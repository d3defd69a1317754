"""Config, tokenizer, chat template and weights in a GGUF, llama.cpp's file: reading and writing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from glassformer.config import MAX_LAYERS, ModelConfig, flatten
from glassformer.conversion.exports import ExportTarget, export_targets
from glassformer.conversion.families import FAMILIES
from glassformer.conversion.family import Family, Gguf, complaints
from glassformer.conversion.fields import Fields
from glassformer.conversion.metadata import Metadata, check, decoding, sampling, shortest
from glassformer.conversion.rope import write_scaling
from glassformer.conversion.storage import TensorFile, TensorSource, open_tensors, write_gguf
from glassformer.conversion.weights import fill, fold, packed_formats, tensors
from glassformer.errors import RequestError, did_you_mean, shown
from glassformer.files import check_output
from glassformer.loaded import Loaded
from glassformer.model import Model
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.position.scaling import (
    MAX_FACTOR,
    Llama3,
    Llama3ScalingConfig,
    LongRopeScalingConfig,
    RotaryScalingConfig,
)
from glassformer.text import Tokenizer
from glassformer.text.gguf import tokenizer_from_gguf, tokenizer_to_gguf

# Key of config.json -> key of the metadata, after the architecture's name.
USUAL = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "vocab_size": "vocab_size",
}
SCALING = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
MAGNITUDE = "rope.scaling.attn_factor"
HARMLESS = frozenset({
    "block_count", "tensor_data_layout", "rope.scaling.finetuned", "vocab_size", "context_length", "pooling_type",
    "attention.group_norm_epsilon", "embedding_length", "feed_forward_length", "attention.head_count_kv",
    "attention.key_length",
})  # fmt: skip
"""Metadata keys that only affect shapes, which the tensors also give."""
LOADED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "attention.sliding_window": (0,),
}
"""Metadata keys that llama.cpp's loaders apply -> values without effect, for families that do not read the key
themselves."""
FRACTIONS = frozenset({
    "attention.max_alibi_bias", "attention.clamp_kqv", "attention.scale", "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon", "attn_logit_softcapping", "final_logit_softcapping", "logit_scale",
    "residual_scale", "embedding_scale", "rope.freq_base", "rope.freq_base_swa", "rope.scaling.factor",
    "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
})  # fmt: skip
"""Metadata keys that llama.cpp reads as 32-bit floats, whatever the type of their field in config.json."""
FREQS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
ARCHITECTURES: dict[str, Family] = {family.gguf.architecture: family for family in FAMILIES.values() if family.gguf}
ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""Metadata keys of token ids that end an answer, in addition to the end-of-text id."""
FILLED = tuple(f"tokenizer.ggml.fim_{name}_token_id" for name in ("pad", "rep", "sep"))
"""Metadata keys of fill-in-the-middle token ids at which llama.cpp also ends an answer."""
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""Type of the matrices -> value of general.file_type."""


# Reading


def read_config(path: Path) -> ModelConfig:
    with open_tensors(path) as file:
        return _config(file)[1]


def is_on_grid_of_4_bits(path: Path) -> bool:
    """Returns True if all matrices of the blocks of a GGUF are Q4_0 or Q4_1: integers of 4 bits with a scale and a
    middle for each 32, values that packing to int4 keeps but for bf16 scales."""
    with open_tensors(path) as file:
        kinds = {one.dtype for name, one in file.entries.items() if name.startswith("blk.") and len(one.shape) == 2}
    return bool(kinds) and kinds <= {"Q4_0", "Q4_1"}


def read_tokenizer(path: Path) -> Tokenizer | None:
    """Returns the tokenizer of a GGUF; None if the file holds no tokenizer."""
    with open_tensors(path) as file:
        return _tokenizer(file)


def _tokenizer(file: TensorFile) -> Tokenizer | None:
    return tokenizer_from_gguf(file.metadata) if "tokenizer.ggml.model" in file.metadata else None


def read_gguf(path: Path, dtype: torch.dtype | None = None, device: Any = None, keep: bool = False) -> Loaded:
    """Returns the model of a GGUF, ready to run, with its tokenizer and its chat template. Quantised weights become
    `dtype`, fp32 for None; with `keep` they stay quantised."""
    with open_tensors(path) as file:
        family, config = _config(file)
        assert family.gguf is not None
        # Reads the tokenizer first, because its temporary memory is then free for the weights.
        metadata = Metadata(file.metadata)
        tokenizer = tokenizer_from_gguf(metadata) if metadata.get("tokenizer.ggml.model") is not None else None
        said = [metadata.fitting(key, lambda one: _is_id(one, config)) for key in (*ENDS, *FILLED)]
        generation = decoding(metadata)
        check(metadata, str(file.path), metadata["general.architecture"])
        metadata.clear()
        file.metadata.clear()  # one string per vocabulary entry: a hundredth of a small model's memory
        model = fill(config, family.gguf.names, file, dtype, device, keep)
        unpacked = "" if keep else packed_formats(file)
    ids = [tokenizer.eos_id, *said] if tokenizer is not None else []
    ends = (one for one in ids if _is_id(one, config))
    return Loaded(
        model, model.config, tokenizer, ends=tuple(dict.fromkeys(ends)), generation=generation, unpacked=unpacked
    )


def _config(file: TensorFile) -> tuple[Family, ModelConfig]:
    name = file.metadata.get("general.architecture")
    family = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if family is None or family.gguf is None:
        shown = name[:80] if isinstance(name, str) else type(name).__name__
        near = did_you_mean(shown, ARCHITECTURES) or f"; known are {', '.join(ARCHITECTURES)}"
        raise RequestError(
            f"{file.path}: general.architecture={shown!r} is not a known family{near}",
            code="unknown", field="general.architecture", value=name,
        )  # fmt: skip
    shapes = {name: entry.shape for name, entry in file.entries.items()}
    prefix = f"{name}."
    with complaints(str(file.path)):
        said = _Said(
            (key.removeprefix(prefix), _scalar(f"{file.path}: {key}", value))
            for key, value in file.metadata.items()
            if key.startswith(prefix)
        )
        fields = Fields(_fields(family.gguf, said, shapes, file.tensor), str(file.path))
    config = family.config(fields)
    said.forget(family.gguf, fields)
    said.check_read(str(file.path), prefix)
    return family, config


class _Said(Metadata):
    """Metadata of a GGUF under the prefix of its architecture, keys without the prefix."""

    def forget(self, gguf: Gguf, fields: Fields) -> None:
        """Marks each key as unread whose field of config.json the family did not read."""
        (asked := Metadata(self)).seen.clear()
        gguf.implied(asked)
        unread, heeded = {*fields.unread()}, {*asked.seen}
        names = {**USUAL, **gguf.fields}
        heeded |= {key for theirs, key in names.items() if not {theirs, theirs.partition(".")[0]} & unread}
        self.seen -= {key for theirs, key in names.items() if theirs.partition(".")[0] in unread} - heeded

    def check_read(self, path: str, prefix: str) -> None:
        """Warns of keys that were not read. Raises RequestError for an unread key that changes llama.cpp's
        computation."""
        unread = {key: value for key, value in self.unread().items() if key not in HARMLESS}
        for key, value in unread.items():
            if key in LOADED and value not in LOADED[key]:
                raise RequestError(
                    f"{path}: {prefix}{key}={shown(repr(value))}: llama.cpp obeys it, and models of this family are "
                    "computed without it here",
                    code="unsupported", field=f"{prefix}{key}", value=value, expected=str(LOADED[key][0]),
                )  # fmt: skip
        if strange := [prefix + key for key in unread if key not in LOADED]:
            warnings.warn(f"{path} has metadata that is not understood and may matter: {shown(', '.join(strange[:8]))}")


def _scalar(where: str, value: Any) -> Any:
    """Returns a metadata value, for a list per layer the value that all layers share. Raises RequestError if layers
    differ."""
    if isinstance(value, (list, np.ndarray)):
        each = [*value[: MAX_LAYERS + 1]]
        if not 0 < len(each) <= MAX_LAYERS or not all(np.isscalar(one) and one == each[0] for one in each):
            shown = f"{', '.join(str(one)[:20] for one in each[:4])}{', ...' if len(value) > 4 else ''}"
            raise RequestError(
                f"{where}={f'[{shown}]'!r}: only one value for all layers can be computed",
                code="unsupported", field=where.rpartition(": ")[2],
            )  # fmt: skip
        value = each[0].item() if isinstance(each[0], np.generic) else each[0]
    return shortest(value)


def _fields(
    gguf: Gguf, said: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], tensor: Callable[[str], Tensor]
) -> dict[str, Any]:
    """Returns the fields of config.json that follow from the metadata `said`, from the `shapes` of tensors and from the
    divisors of frequencies, which `tensor(name)` returns."""
    fields: dict[str, Any] = {}
    for theirs, key in {**USUAL, **gguf.fields}.items():
        if said.get(key) not in (None, 0) or said.get(key) is False:  # 0 means none in llama.cpp
            *outer, last = theirs.split(".")
            place = fields
            for step in outer:
                place = place.setdefault(step, {})
            place[last] = said[key]
    if "token_embd.weight" in shapes:
        fields["vocab_size"] = shapes["token_embd.weight"][0]
    fields["tie_word_embeddings"] = "output.weight" not in shapes
    for flag, name in gguf.flags.items():
        fields[flag] = (name.removeprefix("!") in shapes) != name.startswith("!")
    fields |= gguf.implied(said)
    turned, heads, width = map(said.get, ("rope.dimension_count", "attention.head_count", "embedding_length"))
    head_dim = said.get("attention.key_length")
    if head_dim is None and _is_positive_int(heads) and _is_positive_int(width):
        head_dim = width // heads
    if (width_of_v := said.get("attention.value_length", head_dim)) != head_dim and _is_positive_int(head_dim):
        raise _other("attention.value_length", width_of_v, f"{head_dim}, the length of a key")
    if turned is not None and not _is_positive_int(turned):
        raise _other("rope.dimension_count", turned, "a positive whole number")
    if _is_positive_int(turned) and _is_positive_int(head_dim):
        fields[gguf.fraction] = turned / head_dim
    scaling = {theirs: said[key] for key, theirs in SCALING.items() if key in said}
    factor = _positive("rope.scaling.factor", said.get("rope.scaling.factor", said.get("rope.scale_linear")) or 1)
    kind = said.get("rope.scaling.type", "none" if factor == 1 else "linear")  # llama.cpp's default
    magnitude = _positive(MAGNITUDE, said.get(MAGNITUDE, 1.0))
    pairwise = FREQS in shapes or SHORT in shapes
    if pairwise and factor != 1 and kind != "none":
        raise _other("rope.scaling.factor", factor, "1 if each frequency has a divisor")
    if magnitude != 1 and not (SHORT in shapes or kind == "yarn"):
        raise _other(MAGNITUDE, magnitude, "1 without yarn or longrope")
    if FREQS in shapes and _is_positive_int(turned):
        if [2 * n for n in shapes[FREQS]] != [turned]:
            raise RequestError(
                f"{FREQS} has shape {shapes[FREQS]}, and rope.dimension_count={turned} asks for half of it",
                code="conflict", field=FREQS, value=shapes[FREQS],
            )  # fmt: skip
        fields["rope_scaling"] = _llama3(tensor(FREQS), fields.get("rope_theta", 1e4), turned)
    elif SHORT in shapes and LONG in shapes:
        both = {
            key: [shortest(factor) for factor in tensor(name).tolist()]
            for key, name in (("short_factor", SHORT), ("long_factor", LONG))
        }
        scaling.pop("factor", None)
        given = {"attention_factor": magnitude} if MAGNITUDE in said else {}
        fields["rope_scaling"] = {**scaling, **given, **both, "rope_type": "longrope"}
    elif kind == "yarn":
        given = {"attention_factor": shortest(magnitude * _grown(factor))} if MAGNITUDE in said else {}
        fields["rope_scaling"] = {**scaling, **given, "rope_type": kind}
    elif kind != "none":
        fields["rope_scaling"] = {**scaling, "factor": factor, "rope_type": kind}
    return fields


def _grown(factor: float) -> float:
    """Returns the factor on cos and sin that llama.cpp's YaRN multiplies with `attn_factor`: 1 + 0.1 ln(factor)."""
    return 1.0 + 0.1 * math.log(factor)


def _positive(key: str, value: Any) -> float:
    """Returns `value`, a positive number of the metadata. Raises RequestError for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-6 < value < 1e6:
        raise RequestError(code="range", field=key, value=value, expected="a number above 0")
    return value


def _other(key: str, value: Any, expected: str) -> RequestError:
    return RequestError(code="unsupported", field=key, value=value, expected=expected)


def _llama3(divisors: Tensor, base: Any, dim: int) -> dict[str, Any]:
    """Returns the field rope_scaling that divides the frequencies of `dim` / 2 pairs by `divisors`: of kind llama3 if
    it reproduces them, otherwise longrope with one factor per pair. `base`: the rotary base.

    Between 1 and 4 rotations within the original context, llama3's 1/divisor is linear from 1/factor to 1: any such
    pair determines the context."""
    factor = float(divisors.max())
    plain = float(base) ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    ramp = (1 / divisors.double() - 1 / factor) / (1 - 1 / factor) if factor > 1 else divisors.double()
    between = (ramp > 0.01) & (ramp < 0.99) & (factor <= MAX_FACTOR)
    for i in torch.nonzero(between).flatten().tolist():
        context = round(float((1 + 3 * ramp[i]) * 2 * math.pi / plain[i]))
        guess = Llama3ScalingConfig(factor=factor, original_context=context)
        if torch.allclose(_divisors(guess, base, dim), divisors.float(), rtol=1e-4):
            return write_scaling(guess)
    each = divisors.tolist()
    return {"rope_type": "longrope", "factor": 1.0, "short_factor": each, "long_factor": each}


def _divisors(scaling: Llama3ScalingConfig, base: float, dim: int) -> Tensor:
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return base**-exponent / Llama3(scaling, 1).frequencies(exponent, base, dim, 0)


def _is_positive_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and value > 0


def _is_id(value: Any, config: ModelConfig) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < config.vocab_size


# Writing


def write(
    model: Model,
    tokenizer: Tokenizer | None,
    path: Path,
    kind: str = "F16",
    name: str | None = None,
    ends: Sequence[int] = (),
    generation: Mapping[str, Any] | None = None,
) -> Family:
    """Writes a GGUF for llama.cpp and returns the model's family. `kind` (F32, F16, BF16, Q8_0) is the type of
    matrices, vectors stay fp32. Reparametrised matrices are folded. An answer ends at the tokenizer's end-of-text
    token, and at the first two others of `ends`: a GGUF holds two. `generation` has settings of sampling, by their
    names in generation_config.json.

    Raises RequestError that names the part that llama.cpp has no family for, or the feature that its tokenizers lack.
    """
    if kind not in FILE_TYPES:
        raise RequestError(
            f"a GGUF is written as {', '.join(FILE_TYPES)}, not as {kind!r}", code="unknown", field="dtype", value=kind
        )
    if tokenizer is None:
        raise RequestError(
            "a GGUF holds its tokenizer, and this model has no tokenizer", code="missing", field="tokenizer"
        )
    check_output(path, force=True)
    if model.config.encoder is not None:
        raise RequestError(
            "a GGUF holds one tower here, and this model has an encoder too; give a folder",
            code="conflict", field="encoder", expected="a decoder",
        )  # fmt: skip
    model = fold(model)
    target = llama_cpp(model.config)
    if not target.supported or target.family.gguf is None:
        blockers = ", ".join(f"{path}={mine}" for path, (mine, _) in list(target.blockers.items())[:3])
        raise RequestError(
            f"llama.cpp cannot hold this model; {target.family.model_type} is nearest, blocked by {blockers}",
            code="unsupported", field=next(iter(target.blockers), "model"),
        )  # fmt: skip
    gguf, others = target.family.gguf, (one for one in ends if tokenizer.eos_id != one < model.config.vocab_size)
    metadata: dict[str, Any] = {
        "general.architecture": gguf.architecture,
        "general.name": name or path.stem,
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": 2,
        **sampling(generation or {}),
        **_metadata(model.config, target.fields, gguf),
        **tokenizer_to_gguf(tokenizer, vocab_size=model.config.vocab_size),
        **dict(zip(ENDS, others, strict=False)),
    }
    written: dict[str, TensorSource | Tensor] = {**tensors(model, gguf.names, torch.float32), **_factors(model.config)}
    write_gguf(path, metadata, written, {name: _type(kind, source.shape) for name, source in written.items()})
    return target.family


def llama_cpp(config: ModelConfig) -> ExportTarget:
    """Returns the family of llama.cpp with the fewest blockers for this config; supported if a GGUF, read back, gives
    the same config."""
    config = config.replace(reparam=None)
    seen = [target for target in export_targets(config) if target.family.gguf]
    through = [_through(config, target) for target in seen if target.supported]
    return min(through or seen, key=lambda target: len(target.blockers))


def _through(config: ModelConfig, target: ExportTarget) -> ExportTarget:
    gguf = target.family.gguf
    assert gguf is not None
    model = config.outline()
    factors = _factors(config)
    try:
        made: dict[str, TensorSource | Tensor] = {**tensors(model, gguf.names), **factors}
    except KeyError as lacking:  # a module that llama.cpp has no tensor for
        return ExportTarget(target.family, {str(lacking.args[0]).lstrip("."): (True, None)})
    shapes = {name: tuple(source.shape) for name, source in made.items()}
    if factors and not gguf.factors:
        kind = getattr(_scaling(config), "kind", None)
        return ExportTarget(target.family, {"mixer.position.scaling.kind": (kind, None)})
    try:
        said = _metadata(config, target.fields, gguf)
        read = {key.partition(".")[2]: shortest(value) for key, value in said.items()}
        heeded = {key: value for key, value in read.items() if key not in gguf.unheeded}
        fields = _fields(gguf, heeded, shapes, lambda name: factors[name])
        theirs = target.family.config(Fields(fields)).resolved()
    except RequestError as reason:
        return ExportTarget(target.family, {"config": (str(reason).splitlines()[0], None)})
    differing = config.resolved().diff(theirs)
    blocked_by = {path: pair for path, pair in differing.items() if not _near(*pair)}
    return ExportTarget(target.family, blocked_by, target.fields)


def _near(mine: Any, theirs: Any) -> bool:
    """Returns True if two floats are equal up to one rounding to 32 bits, as a GGUF stores them, and one
    multiplication."""
    return isinstance(mine, float) and isinstance(theirs, float) and math.isclose(mine, theirs, rel_tol=2.0**-22)


def _type(kind: str, shape: tuple[int, ...]) -> str:
    """Returns the GGUF type of a tensor of this shape if matrices have type `kind`: F32 for vectors, F16 instead of
    Q8_0 if rows are not multiples of 32 elements."""
    if len(shape) == 1:
        return "F32"
    return "F16" if kind == "Q8_0" and shape[-1] % 32 else kind


def _metadata(config: ModelConfig, fields: dict[str, Any], gguf: Gguf) -> dict[str, Any]:
    flat = flatten(fields)
    said = {key: flat[theirs] for theirs, key in {**USUAL, **gguf.fields}.items() if flat.get(theirs) is not None}
    block = next(config.resolved().layers())
    mixer = block.mixer
    if block.ffn is not None:
        said["feed_forward_length"] = block.ffn.hidden
    if isinstance(mixer, AttentionConfig):
        said["attention.value_length"] = said["attention.key_length"] = mixer.head_dim
        if isinstance(mixer.position, RotaryConfig):
            said["rope.dimension_count"] = int((mixer.head_dim or 0) * mixer.position.fraction)
    scaling, given = fields.get("rope_scaling") or {}, _scaling(config)
    kind = scaling.get("rope_type") or scaling.get("type")
    if isinstance(given, LongRopeScalingConfig):  # a factor would slow every pair once more
        said["rope.scaling.type"] = kind
        said["rope.scaling.original_context_length"] = given.original_context
        said[MAGNITUDE] = given.build(config.ctx).magnitude
    elif kind in ("linear", "yarn"):
        said["rope.scaling.type"] = kind
        said |= {key: scaling[theirs] for key, theirs in SCALING.items() if theirs in scaling}
        if (magnitude := scaling.get("attention_factor")) is not None:
            said[MAGNITUDE] = magnitude / _grown(scaling["factor"])
    elif kind is not None and kind != "llama3":
        raise RequestError(
            f"GGUF has no {kind} scaling of rotary positions",
            code="unsupported", field="rope_scaling.rope_type", value=kind,
        )  # fmt: skip
    return {f"{gguf.architecture}.{key}": float(value) if key in FRACTIONS else value for key, value in said.items()}


def _scaling(config: ModelConfig) -> RotaryScalingConfig | None:
    mixer = next(config.resolved().layers()).mixer
    position = mixer.position if isinstance(mixer, AttentionConfig) else None
    return position.scaling if isinstance(position, RotaryConfig) else None


def _factors(config: ModelConfig) -> dict[str, Tensor]:
    """Returns the tensors of frequency divisors, one per rotated pair, of a longrope or llama3 scaling; {} for other
    positions."""
    mixer = next(config.resolved().layers()).mixer
    position = mixer.position if isinstance(mixer, AttentionConfig) else None
    if not isinstance(mixer, AttentionConfig) or not isinstance(position, RotaryConfig):
        return {}
    if isinstance(position.scaling, LongRopeScalingConfig):
        return {SHORT: torch.tensor(position.scaling.short), LONG: torch.tensor(position.scaling.long)}
    if isinstance(position.scaling, Llama3ScalingConfig):
        return {FREQS: _divisors(position.scaling, position.base, int((mixer.head_dim or 0) * position.fraction))}
    return {}
