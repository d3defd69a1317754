"""Naming a model: EXPR -> ModelConfig.

    EXPR   := NAME[@SIZE][+CHANGE...]         gpt2    llama@10m    gpt2@10m+rope+rmsnorm+swiglu+gqa:2
    NAME   := a preset | a .yaml or .json config | a run or checkpoint folder | a .gguf file | hf:owner/name | smollm2
    CHANGE := a short name, with a value after a colon where it takes one | path=value

A change is a function ModelConfig -> ModelConfig that leaves everything else alone: a part that is already of the kind
named keeps its numbers. Where a model is trained, changes of the recipe may stand among them: +recipe.FIELD=VALUE, as
`glassformer why` writes what to try.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from glassformer import convert
from glassformer.architectures import FAMILIES, PRESETS
from glassformer.config import BlockConfig, ModelConfig, Stage, explain
from glassformer.errors import LONGEST as SHOWN
from glassformer.errors import RequestError, did_you_mean, shown
from glassformer.parts.base import of_kind, to_plain
from glassformer.parts.ffn import ExpertsConfig, FFNConfig, GluConfig, MlpConfig
from glassformer.parts.ffn.experts import share_of
from glassformer.parts.init import DeepNormInitConfig, Gpt2InitConfig
from glassformer.parts.mixer import AttentionConfig, MambaConfig, QKNormConfig
from glassformer.parts.mup import Mup
from glassformer.parts.norm import LayerNormConfig, NormConfig, RMSNormConfig
from glassformer.parts.position import (
    AlibiConfig,
    LearnedConfig,
    PositionConfig,
    RotaryConfig,
    SinusoidalConfig,
)
from glassformer.parts.reparam import SigmaReparamConfig
from glassformer.parts.residual import (
    DeepNormConfig,
    ParallelConfig,
    PostConfig,
    PreConfig,
    ResidualConfig,
    ResPostConfig,
    SandwichConfig,
)
from glassformer.parts.visibility import (
    BidirectionalConfig,
    CausalConfig,
    SlidingWindowConfig,
    VisibilityConfig,
)
from glassformer.training import Recipe

# size: (layers, d_model, heads). The name counts the layers' own parameters, about 12 L d^2, not the vocabulary's.
SIZES: dict[str, tuple[int, int, int]] = {
    "1m": (4, 128, 4),
    "3m": (4, 256, 4),
    "10m": (6, 384, 6),
    "30m": (10, 512, 8),
    "60m": (12, 640, 10),
    "124m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "774m": (36, 1280, 20),
    "1.5b": (48, 1600, 25),
    "3b": (36, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (60, 6656, 52),
    "70b": (80, 8192, 64),
}

LONGEST = 4096
CHANGES = re.compile(r"\+(?=[A-Za-z_])")
"""What parts one from the next."""

Change = Callable[[ModelConfig], ModelConfig]


def preset(expression: str | Path) -> ModelConfig:
    """The model that an EXPR, or the path of a config, names.

    Raises RequestError with the nearest names, the field, or the reason two parts do not fit."""
    name, size, changes = parse(expression)
    config = _named(name)
    return _changed(resize(config, size) if size else config, changes)


def _changed(config: ModelConfig, changes: Sequence[str]) -> ModelConfig:
    for change in changes:
        try:
            config = _change(change)(config)
        except ValidationError as error:
            raise RequestError(f"+{change}: {explain(error)}") from None
    config.check()
    return config


def load(
    expression: str | Path, *, dtype: Any = None, device: Any = None, quantize: str | None = None
) -> convert.Loaded:
    """A model with its weights, config and tokenizer: a run folder, a Hugging Face folder, a .gguf file, hf:owner/name,
    or smollm2; with changes (`smollm2+window:256`), the weights that still fit, and new ones where none do
    (`.fresh` names those).

    `dtype=None` keeps what the file has, fp32 for quantised weights. `quantize="int8"` or `"int4"` packs the matrices,
    `"bf16"` lays them out for a CPU's products in it, and `dtype` is then that of all else; `"keep"` leaves those of a
    .gguf file as they are packed there. A model of packed weights can be neither trained nor saved. Raises
    RequestError."""
    name, size, wanted = parse(expression)
    if name in PRESETS or name in FAMILIES:
        here = f"; the folder here is ./{expression}" if _exists(str(expression)) else ""
        raise RequestError(f"{name} is a config without weights; name a run, a checkpoint, or hf:owner/name{here}")
    if size:
        raise RequestError(f"{expression}: a checkpoint keeps its size; leave @{size} out")
    if wanted:
        preset(str(expression))  # what is wrong is said before weights are read
    change = partial(_changed, changes=wanted) if wanted else None
    return convert.load(name, dtype=dtype, device=device, quantize=quantize, change=change)


def parse(expression: str | Path) -> tuple[str, str | None, list[str]]:
    """(name, size, changes). A change begins with a letter, so `base=1e+6` is one and paths may hold a plus.

    What names a model means that model, whatever lies in the current folder; ./NAME is the folder. Raises RequestError
    where the name is empty, or a change could be none."""
    if not isinstance(expression, (str, Path)):
        raise RequestError(f"a model is named by text or a path, such as 'llama@10m', and not by {shown(expression)}")
    expression = str(expression).strip()
    if not expression:
        raise RequestError("an expression is empty; name a model such as llama@10m")
    if len(expression) > LONGEST:
        raise RequestError(f"an expression has at most {LONGEST} characters, and this one has {len(expression):,}")
    path = _leading_path(expression)
    first, *changes = CHANGES.split(expression[len(path) :])
    name, at, size = first.partition("@")
    if at and not size:
        raise RequestError(f"{expression!r} has an @ without a size; use one of {', '.join(SIZES)}")
    if first.endswith("+"):
        raise RequestError(f"{expression!r} ends with a plus; a change follows it, such as +rope")
    if not path + name:
        raise RequestError(f"{expression[:SHOWN]!r} names no model; begin with one, such as llama@10m")
    _, plus, rest = first.partition("+")
    if plus and (path or not _looks_like_path(first)):
        raise RequestError(f"{'+' + rest[:SHOWN]!r} is no change: one begins with a letter, such as +rope")
    return path + name, size or None, changes


def _leading_path(expression: str) -> str:
    """The longest leading piece that names a file or folder and no model, or nothing."""
    cuts = [len(expression), *(match.start() for match in re.finditer(r"[+@]", expression))]
    for cut in sorted(cuts, reverse=True):
        piece = expression[:cut]
        if piece and _exists(piece) and _looks_like_path(piece) and not _names_a_model(piece):
            return piece
    return ""


def _names_a_model(piece: str) -> bool:
    """Whether it is NAME[@SIZE][+CHANGE...] of a model that has a name here: a folder called so does not hide it."""
    first, *wanted = CHANGES.split(piece)
    name, at, size = first.partition("@")
    if not (name in PRESETS or name in FAMILIES or name in convert.PACKAGED) or (at and size.lower() not in SIZES):
        return False
    try:
        for change in wanted:
            _change(change)
    except RequestError:
        return False
    return True


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # too long, or no name at all
        return False


def _looks_like_path(name: str) -> bool:
    suffixes = {".yaml", ".yml", ".json", ".gguf"}
    return "/" in name or "\\" in name or Path(name).suffix in suffixes or (_exists(name) and Path(name).is_dir())


def _named(name: str) -> ModelConfig:
    if name in PRESETS or name in FAMILIES:
        return PRESETS[FAMILIES.get(name, name)]()
    if convert.is_checkpoint(name):
        return convert.read_config(name)
    path = Path(name)
    if _exists(name) and path.is_dir():
        if (path / "config.yaml").is_file():
            return ModelConfig.from_file(path / "config.yaml")
        convert.refuse_weights(path)
        raise RequestError(f"the folder {name} holds no config; name a run, a checkpoint or a config file")
    if _exists(name) and path.is_file():
        convert.refuse_weights(path)
        return ModelConfig.from_file(path)
    if _looks_like_path(name):
        raise RequestError(f"there is no file {name}")
    known = [*FAMILIES, *PRESETS, *convert.PACKAGED]
    raise RequestError(f"no model is named {name!r}{did_you_mean(name, known) or '; known: ' + ', '.join(known)}")


def resize(config: ModelConfig, size: str) -> ModelConfig:
    """The same parts at one of the sizes of the table: layers, width and heads change, ffn and head widths follow.

    Grouped heads keep their share as nearly as a divisor of the heads allows (one key/value head stays one)."""
    if size.lower() not in SIZES:
        raise RequestError(f"no size is named {size!r}; sizes are {', '.join(SIZES)}")
    n_layers, d_model, n_heads = SIZES[size.lower()]

    def fit(block: BlockConfig) -> BlockConfig:
        mixer, ffn = block.mixer, block.ffn
        if isinstance(mixer, AttentionConfig):
            group = mixer.n_heads / (mixer.n_kv_heads or mixer.n_heads)
            divisors = [g for g in range(1, n_heads + 1) if n_heads % g == 0]
            kv = min(divisors, key=lambda g: (abs(g - n_heads / group), -g)) if mixer.n_kv_heads != 1 else 1
            grouped = None if mixer.n_kv_heads is None else kv
            mixer = mixer.vary(n_heads=n_heads, n_kv_heads=grouped, head_dim=None)
        elif isinstance(mixer, MambaConfig):
            mixer = mixer.vary(dt_rank=None)
        return block.vary(mixer=mixer, ffn=ffn.vary(hidden=None) if ffn else None)

    each = n_layers / config.n_layers
    stack = tuple(
        Stage(repeat=max(1, round(stage.repeat * each)), blocks=tuple(fit(block) for block in stage.blocks))
        for stage in config.stack
    )
    return config.vary(d_model=d_model, stack=stack)


# Changes


def each_block(config: ModelConfig, change: Callable[[BlockConfig], BlockConfig]) -> ModelConfig:
    stack = tuple(stage.vary(blocks=tuple(change(block) for block in stage.blocks)) for stage in config.stack)
    return config.vary(stack=stack)


def each_attention(config: ModelConfig, change: Callable[[AttentionConfig], AttentionConfig]) -> ModelConfig:
    """Refuses a model without attention: the change would do nothing."""
    if not any(isinstance(block.mixer, AttentionConfig) for block in config.layers()):
        raise RequestError("this change is about attention, and the model has none")

    def fit(block: BlockConfig) -> BlockConfig:
        return block.vary(mixer=change(block.mixer)) if isinstance(block.mixer, AttentionConfig) else block

    return each_block(config, fit)


def _kept(old: Any, new: Any) -> Any:
    """What is there, with its numbers, where it is of the kind that is wanted; else the new one."""
    return old if type(old) is type(new) else new


def _position(config: ModelConfig, embedding: PositionConfig | None, attention: PositionConfig | None) -> ModelConfig:
    added = _kept(config.embedding.position, embedding)
    config = config.vary(embedding=config.embedding.vary(position=added))
    return each_attention(config, lambda mixer: mixer.vary(position=_kept(mixer.position, attention)))


def _norm(config: ModelConfig, choice: type[NormConfig]) -> ModelConfig:
    def swap(norm: NormConfig | None) -> NormConfig | None:
        return None if norm is None else _kept(norm, choice(eps=norm.eps))

    config = each_block(config, lambda block: block.vary(norm=swap(block.norm)))
    embedding = config.embedding.vary(norm=swap(config.embedding.norm))
    return config.vary(final_norm=swap(config.final_norm), embedding=embedding)


def _residual(config: ModelConfig, choice: type[ResidualConfig], **fields: Any) -> ModelConfig:
    """Post-norm blocks end in a norm, so a final one would only repeat it; the others need one. DeepNorm has an init of
    its own, which goes with it."""
    norm = next(config.layers()).norm

    def rewired(old: ResidualConfig) -> ResidualConfig:
        new = choice(dropout=old.dropout, scale=old.scale, depth_scaled=old.depth_scaled)
        return _kept(old, new).vary(**fields)

    config = each_block(config, lambda block: block.vary(residual=rewired(block.residual)))
    init = Gpt2InitConfig() if isinstance(config.init, DeepNormInitConfig) else config.init
    return config.vary(
        final_norm=None if choice.ends_in_norm else config.final_norm or norm,
        init=_kept(config.init, DeepNormInitConfig()) if choice is DeepNormConfig else init,
    )


def _branch_scale(config: ModelConfig) -> ModelConfig:
    return each_block(config, lambda block: block.vary(residual=block.residual.vary(depth_scaled=True)))


def _ffn(config: ModelConfig, name: str, value: str | None) -> ModelConfig:
    """Keeps the number of weights: three matrices of 2/3 the width for two, and back. Experts stay experts."""
    gated, activation = _FFN[name]
    size = None if value is None else _whole(name, value)

    def swap(block: BlockConfig) -> BlockConfig:
        old = block.ffn
        bias = bool(getattr(old, "bias", False))
        was_gated, hidden = _gated(old), old.hidden if old else None
        if hidden is not None and was_gated != gated:
            hidden = -(-2 * hidden // 24) * 8 if gated else round(hidden * 1.5)
        if isinstance(old, ExpertsConfig):
            return block.vary(ffn=old.vary(hidden=size or hidden, gated=gated, activation=activation))
        choice: Any = GluConfig if gated else MlpConfig
        new = choice(bias=bias)
        return block.vary(ffn=_kept(old, new).vary(hidden=size or hidden, activation=activation))

    return each_block(config, swap)


def _gated(ffn: FFNConfig | None) -> bool:
    return ffn.gated if isinstance(ffn, ExpertsConfig) else isinstance(ffn, GluConfig)


def _experts(config: ModelConfig, value: str) -> ModelConfig:
    """moe:E:K, of the ffn's kind and activation. A token meets as many weights as before: each of the K experts that it
    is sent to has 1/K of the width, or the one given (moe:E:K:F)."""
    if not 2 <= value.count(":") + 1 <= 3:
        raise RequestError(f"moe:{value}: use moe:experts:chosen, such as moe:8:2, or moe:experts:chosen:hidden")
    n_experts, top_k, *hidden = (_whole("moe", part) for part in value.split(":"))
    if not any(block.ffn for block in config.layers()):
        raise RequestError(f"moe:{value}: this model has no ffn whose kind the experts could have; add one first")

    def swap(block: BlockConfig) -> BlockConfig:
        old: Any = block.ffn
        if old is None:
            return block
        sizes = {"n_experts": n_experts, "top_k": top_k}
        if isinstance(old, ExpertsConfig):
            return block.vary(ffn=old.vary(**sizes, hidden=hidden[0] if hidden else None))
        width = hidden[0] if hidden else old.hidden and share_of(old.hidden, top_k)
        fields = {"gated": _gated(old), "activation": old.activation, "bias": old.bias}
        return block.vary(ffn=ExpertsConfig(**sizes, **fields, hidden=width))

    return each_block(config, swap)


def _heads(config: ModelConfig, groups: int | None) -> ModelConfig:
    return each_attention(config, lambda mixer: mixer.vary(n_kv_heads=groups))


def _visibility(config: ModelConfig, choice: VisibilityConfig) -> ModelConfig:
    return each_attention(config, lambda mixer: mixer.vary(visibility=choice))


def _mamba(config: ModelConfig) -> ModelConfig:
    """In every layer. The recurrence knows the order of tokens: positions added to the embedding go. With
    its own `expand` of 2 a mixer has some 6 tenths more weights than attention, with `mixer.expand=1` 2 tenths less."""
    config = config.vary(embedding=config.embedding.vary(position=None))
    return each_block(config, lambda block: block.vary(mixer=_kept(block.mixer, MambaConfig())))


def _qk_norm(config: ModelConfig, value: str | None) -> ModelConfig:
    if value not in (None, "head", "each_head", "full"):
        raise RequestError(f"qknorm:{value}: use qknorm, qknorm:head, qknorm:each_head or qknorm:full")
    new = QKNormConfig(norm=RMSNormConfig(eps=next(config.layers()).norm.eps))
    over = {"over": value} if value else {}
    return each_attention(config, lambda mixer: mixer.vary(qk_norm=(mixer.qk_norm or new).vary(**over)))


def _bias(config: ModelConfig, bias: bool) -> ModelConfig:
    """On the matrices of mixer and ffn."""

    def swap(block: BlockConfig) -> BlockConfig:
        mixer, ffn = block.mixer, block.ffn
        if isinstance(mixer, AttentionConfig):
            mixer = mixer.vary(bias=bias, out_bias=None)
        elif isinstance(mixer, MambaConfig):
            mixer = mixer.vary(bias=bias)
        return block.vary(mixer=mixer, ffn=ffn.vary(bias=bias) if ffn else None)

    return each_block(config, swap)


def _dropout(config: ModelConfig, value: str) -> ModelConfig:
    p = _number("dropout", value)
    if not 0 <= p < 1:
        raise RequestError(f"dropout:{value}: a probability from 0 up to, not including, 1 is right")
    config = each_block(config, lambda block: block.vary(residual=block.residual.vary(dropout=p)))
    if any(isinstance(block.mixer, AttentionConfig) for block in config.layers()):
        config = each_attention(config, lambda mixer: mixer.vary(dropout=p))
    return config.vary(embedding=config.embedding.vary(dropout=p))


def _sigma_reparam(config: ModelConfig, value: str | None) -> ModelConfig:
    gamma = None if value is None else _positive("sigmareparam", value)
    return config.vary(reparam=SigmaReparamConfig(gamma=gamma))


def _mup(config: ModelConfig, value: str | None) -> ModelConfig:
    return config.vary(mup=Mup() if value is None else (config.mup or Mup()).vary(base_width=_whole("mup", value)))


def _tied(config: ModelConfig, tied: bool) -> ModelConfig:
    return config.vary(head=config.head.vary(tied=tied))


def _embedding_norm(config: ModelConfig, on: bool) -> ModelConfig:
    norm = config.embedding.norm or next(config.layers()).norm
    return config.vary(embedding=config.embedding.vary(norm=norm if on else None))


PLAIN: dict[str, Change] = {
    "rope": lambda c: _position(c, None, RotaryConfig()),
    "alibi": lambda c: _position(c, None, AlibiConfig()),
    "learned": lambda c: _position(c, LearnedConfig(), None),
    "sinusoidal": lambda c: _position(c, SinusoidalConfig(), None),
    "nope": lambda c: _position(c, None, None),
    "rmsnorm": lambda c: _norm(c, RMSNormConfig),
    "layernorm": lambda c: _norm(c, LayerNormConfig),
    "pre": lambda c: _residual(c, PreConfig),
    "post": lambda c: _residual(c, PostConfig),
    "deepnorm": lambda c: _residual(c, DeepNormConfig),
    "sandwich": lambda c: _residual(c, SandwichConfig),
    "respost": lambda c: _residual(c, ResPostConfig),
    "parallel": lambda c: _residual(c, ParallelConfig, shared_norm=True),
    "branch_scale": _branch_scale,
    "gain": lambda c: each_attention(c, lambda mixer: mixer.vary(gain_control=True)),
    "parallel2": lambda c: _residual(c, ParallelConfig, shared_norm=False),
    "mha": lambda c: _heads(c, None),
    "mqa": lambda c: _heads(c, 1),
    "mamba": _mamba,
    "causal": lambda c: _visibility(c, CausalConfig()),
    "bidirectional": lambda c: _visibility(c, BidirectionalConfig()),
    "bias": lambda c: _bias(c, True),
    "nobias": lambda c: _bias(c, False),
    "tied": lambda c: _tied(c, True),
    "untied": lambda c: _tied(c, False),
    "embednorm": lambda c: _embedding_norm(c, True),
    "noembednorm": lambda c: _embedding_norm(c, False),
}
"""Changes without a value."""

VALUED: dict[str, Callable[[ModelConfig, str], ModelConfig]] = {
    "gqa": lambda c, v: _heads(c, _whole("gqa", v)),
    "window": lambda c, v: _visibility(c, SlidingWindowConfig(window=_whole("window", v))),
    "softcap": lambda c, v: each_attention(c, lambda mixer: mixer.vary(softcap=_positive("softcap", v))),
    "dropout": _dropout,
    "moe": _experts,
}
"""Changes that need a value after a colon: gqa:2."""

_EXAMPLES = {"gqa": "2", "window": "256", "softcap": "50", "dropout": "0.1", "moe": "8:2"}

_FFN = {
    **{name: (False, name) for name in ("relu", "gelu", "gelu_tanh", "silu", "relu2")},
    "glu": (True, "sigmoid"),
    "reglu": (True, "relu"),
    "geglu": (True, "gelu"),
    "swiglu": (True, "silu"),
}

OPTIONAL: dict[str, Callable[[ModelConfig, str | None], ModelConfig]] = {
    "qknorm": _qk_norm,
    "sigmareparam": _sigma_reparam,
    "mup": _mup,
    **{name: (lambda c, v, name=name: _ffn(c, name, v)) for name in _FFN},  # type: ignore[misc]
}
"""Changes that may have a value: swiglu, swiglu:1024, qknorm:full, sigmareparam:1, mup:128."""


def changes() -> list[str]:
    """Short names of all changes."""
    return [*PLAIN, *VALUED, *OPTIONAL]


def _change(text: str) -> Change:
    name, equals, value = text.partition("=")
    if equals:
        return partial(assign, path=name.strip(), value=value.strip())
    name, colon, value = text.partition(":")
    if name in PLAIN:
        if colon:
            raise RequestError(f"+{name} takes no value, and {value!r} was given")
        return PLAIN[name]
    if name in VALUED:
        if not value:
            raise RequestError(f"+{name} needs a value, such as +{name}:{_EXAMPLES[name]}")
        return lambda config: VALUED[name](config, value)
    if name in OPTIONAL:
        if colon and not value:
            raise RequestError(f"+{name}: has a colon without a value; give one, or leave the colon out")
        return lambda config: OPTIONAL[name](config, value or None)
    known = changes()
    raise RequestError(
        f"no change is named {name!r}{did_you_mean(name, known) or '; known: ' + ', '.join(known) + ', and path=value'}"
    )


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RequestError(f"{name}:{text}: {text!r} is not a number") from None


def _positive(name: str, text: str) -> float:
    number = _number(name, text)
    if not 0 < number < float("inf"):
        raise RequestError(f"{name}:{text}: a number above 0 is right")
    return number


def _whole(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise RequestError(f"{name}:{text}: a whole number from 1 up is right")
    return int(text)


# path=value

_ALIASES = {
    "layers": "layers",
    "heads": "mixer.n_heads",
    "kv_heads": "mixer.n_kv_heads",
    "n_heads": "mixer.n_heads",
    "n_kv_heads": "mixer.n_kv_heads",
    "head_dim": "mixer.head_dim",
    "hidden": "ffn.hidden",
    "z_loss": "head.z_loss",
}
_OF_BLOCK = ("mixer", "ffn", "norm", "residual")
_OF_MIXER = ("position", "visibility", "kernel", "qk_norm")


def assign(config: ModelConfig, path: str, value: str) -> ModelConfig:
    """Sets the value at a path. A path that starts at a part of a block (norm.eps, position.base) sets it in every
    block that has it; norm also in the final norm and the embedding's."""
    tree = config.to_dict()
    full = _ALIASES.get(path, path)
    first, *rest = steps = full.split(".")
    if first == RECIPE:
        raise RequestError(f"+{path}={value} is about training, not about the model; train and compare take it")
    blocks = [block for stage in tree["stack"] for block in stage["blocks"]]
    if first == "layers":
        if rest:
            raise RequestError(f"{path}={value}: layers is a number and has no fields; use layers={value}")
        if len(tree["stack"]) != 1 or len(blocks) != 1:
            raise RequestError("layers= is for a stack of equal blocks; set stack.0.repeat and so on")
        tree["stack"][0]["repeat"] = _value(value)
    elif first in _OF_MIXER:
        for block in _having(blocks, "mixer", first):
            _set(block["mixer"], steps, value, path)
    elif first in _OF_BLOCK:
        for block in _having(blocks, *steps[:2]) if rest else blocks:
            _set(block, steps, value, path)
        for holder, name in ((tree, "final_norm"), (tree["embedding"], "norm")):
            if first == "norm" and holder[name] is not None:
                _set(holder, [name, *steps[1:]], value, path)
    else:
        _set(tree, steps, value, path)
    return ModelConfig.from_dict(tree)


def _having(blocks: list[Any], part: str, field: str) -> list[Any]:
    """The blocks whose part has the field, where layers differ; all where none has, for the complaint to name it."""
    return [block for block in blocks if block[part] is not None and field in block[part]] or blocks


def _set(tree: Any, steps: list[str], value: str, path: str) -> None:
    *way, last = steps
    for step in way:
        tree = _step(tree, step, path)
        if tree is None:
            raise RequestError(f"{path}={value}: there is no {step} here to change; add it first")
    key, new = _key(tree, last, path), _value(value)
    if key == "kind" and isinstance(new, str):
        part = of_kind(tree, new)
        tree.clear()
        tree.update(part)
    else:
        tree[key] = new


def _step(tree: Any, step: str, path: str) -> Any:
    return tree[_key(tree, step, path)]


def _key(tree: Any, step: str, path: str) -> Any:
    if isinstance(tree, list):
        if not step.isdecimal() or int(step) >= len(tree):
            raise RequestError(f"{path}: {step} is not an index below {len(tree)}")
        return int(step)
    if not isinstance(tree, dict):
        raise RequestError(f"{path}: {step!r} asks for a field of a plain value")
    if step not in tree:
        known = [*tree, *_ALIASES, *_OF_BLOCK, *_OF_MIXER] if "stack" in tree else list(tree)
        raise RequestError(
            f"{path}: no field is named {step!r}{did_you_mean(step, known) or '; known here: ' + ', '.join(tree)}"
        )
    return step


# recipe.FIELD=VALUE

RECIPE = "recipe"
_OF_RECIPE = {
    "warmup": "schedule.warmup", "schedule.kind": "schedule", "optimizer.kind": "optimizer",
    "betas.0": "optimizer.betas.0", "betas.1": "optimizer.betas.1", "adam_eps": "optimizer.eps",
}  # fmt: skip
_AXES = ("schedule", "optimizer")
"""Fields of the recipe whose value is a choice with fields of its own."""


def split_recipe(expression: str) -> tuple[str, dict[str, str]]:
    """The expression without its +recipe.FIELD=VALUE, and those: {field: value}. RequestError for half of one."""
    name, size, changes = parse(expression)
    kept, wishes = [f"{name}@{size}" if size else name], {}
    for change in changes:
        if not change.startswith(f"{RECIPE}."):
            kept.append(change)
            continue
        field, _, value = (part.strip() for part in change.removeprefix(f"{RECIPE}.").partition("="))
        if not field or not value:
            raise RequestError(f"+{change}: use +recipe.FIELD=VALUE, such as +recipe.warmup=0.1")
        wishes[field] = value
    return "+".join(kept), wishes


def with_recipe(recipe: Recipe, wishes: Mapping[str, str]) -> Recipe:
    """The recipe with these fields changed. `warmup` is the schedule's, `betas` and `adam_eps` are the optimizer's;
    another schedule or optimizer comes with its own defaults. Raises RequestError for a field that there is not."""
    paths = {field: _OF_RECIPE.get(field, field) for field in wishes}
    tree = to_plain(recipe)
    for field in sorted(wishes, key=lambda field: paths[field] not in _AXES):  # these first: the others are theirs
        _set(tree, paths[field].split("."), wishes[field], f"{RECIPE}.{field}")
        if paths[field] in _AXES:
            tree = to_plain(Recipe.of(**tree))
    return Recipe.of(**tree)


def own_value(expression: str, config: ModelConfig, field: str) -> Any:
    """The config's value of a field where a change of its EXPR sets it, else None."""
    named = {change.partition("=")[0].strip() for change in parse(expression)[2]}
    return getattr(config, field) if field in named else None


def _value(text: str) -> Any:
    if text.lower() in ("none", "null"):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text
