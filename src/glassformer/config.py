"""A model as a value: a frozen tree of part configs that builds a module, counts itself, and is written to a file."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from torch import nn

from glassformer.errors import Code, RequestError, shown
from glassformer.figures import plain_table
from glassformer.model import Block, Model, Tower
from glassformer.parts.building import InitialWeights, check_seed, fill
from glassformer.parts.core.base import BuildContext, PartConfig, Value, to_plain
from glassformer.parts.core.cost import OF_WORK, Cost, Shape
from glassformer.parts.core.init import Gpt2InitConfig, Init, InitConfig, Role
from glassformer.parts.core.mould import Mould
from glassformer.parts.embedding import Embedding, EmbeddingConfig
from glassformer.parts.ffn import FFNConfig
from glassformer.parts.head import HeadConfig
from glassformer.parts.mixer import MixerConfig
from glassformer.parts.mup import Mup
from glassformer.parts.norm import NormConfig
from glassformer.parts.reparam import ReparamConfig
from glassformer.parts.residual import PreConfig, ResidualConfig

MAX_FILE_BYTES = 4 << 20
MAX_CONTEXT = 1 << 28
MAX_LAYERS = 4096
MAX_PARAMETERS = 1 << 44
SHOWN_BLOCKS = 12


class BlockConfig(Value):
    """One layer: a mixer, a feed-forward network or None, the norm that its wiring places."""

    mixer: MixerConfig
    ffn: FFNConfig | None
    norm: NormConfig
    residual: ResidualConfig = PreConfig()

    def explicit(self, ctx: BuildContext) -> BlockConfig:
        return self.vary(
            mixer=self.mixer.explicit(ctx),
            ffn=self.ffn.explicit(ctx) if self.ffn else None,
            residual=self.residual.explicit(ctx),
        )

    def build(self, ctx: BuildContext) -> Block:
        mixer, ffn = self.mixer.build(ctx), self.ffn.build(ctx) if self.ffn else None
        self.mixer.check_built(mixer, ctx)
        if self.ffn is not None and ffn is not None:
            self.ffn.check_built(ffn)
        return Block(mixer, ffn, self.residual.build(self.within(ctx)))

    def within(self, ctx: BuildContext) -> BuildContext:
        """The context of the wiring."""
        return ctx.within(norm=self.norm, has_ffn=self.ffn is not None)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Those of its parts by site name; recomputing the block takes its input, resid_pre."""
        stream = shape.keeps(ctx.d_model, shape.dtype)
        inner = {
            branch: shape.reading(shape.products) if self.residual.feeds(branch) else shape
            for branch in ("mixer", "ffn")
        }
        parts = {"resid_pre": Cost(kept_selective=stream, kept_full=stream)}
        parts["mixer"] = self.mixer.costs(ctx, inner["mixer"])
        if self.ffn is not None:
            parts["ffn"] = self.ffn.costs(ctx, inner["ffn"])
        return Cost.of(parts) + self.residual.costs(self.within(ctx), shape)


class Stage(Value):
    """`blocks`, one after the other, `repeat` times over: uniform stacks, alternations, and hybrids."""

    repeat: int = Field(1, gt=0, le=MAX_LAYERS)
    blocks: tuple[BlockConfig, ...] = Field(min_length=1)


class TowerConfig(Value):
    """Embedding, layers and final norm: what an encoder is, and a model without its head."""

    vocab_size: int | None = Field(None, gt=0, le=1 << 28)
    """None: that of the model around it; so for d_model and context."""
    d_model: int | None = Field(None, gt=0, le=1 << 20)
    context: int | None = Field(None, gt=0, le=MAX_CONTEXT)
    embedding: EmbeddingConfig = EmbeddingConfig()
    stack: tuple[Stage, ...] = Field(min_length=1)
    final_norm: NormConfig | None

    @field_validator("stack")
    @classmethod
    def _bounded(cls, stack: tuple[Stage, ...]) -> tuple[Stage, ...]:
        layers = sum(stage.repeat * len(stage.blocks) for stage in stack)
        if layers > MAX_LAYERS:
            raise ValueError(f"{layers} layers are more than the {MAX_LAYERS} allowed")
        return stack

    # The tree as a list of layers

    @property
    def n_layers(self) -> int:
        return sum(stage.repeat * len(stage.blocks) for stage in self.stack)

    @property
    def n_branches(self) -> int:
        """Residual additions in the stack, on which depth factors depend: one for each mixer and one for each ffn.

        A stack without any ffn (Mamba) counts two for each layer, the rule by which its weights have always begun."""
        mixers, ffns = self.n_layers, sum(n for n, block in self._kinds() if block.ffn is not None)
        return mixers + ffns if ffns else 2 * mixers

    def layers(self) -> Iterator[BlockConfig]:
        """The block of each layer, bottom first."""
        for stage in self.stack:
            for _ in range(stage.repeat):
                yield from stage.blocks

    def _kinds(self) -> Iterator[tuple[int, BlockConfig]]:
        for stage in self.stack:
            for block in stage.blocks:
                yield stage.repeat, block

    @property
    def reads_memory(self) -> bool:
        """Whether a layer reads another sequence beside its own."""
        return any(block.mixer.reads_memory for _, block in self._kinds())

    def parts_within(self, ctx: BuildContext) -> dict[str, Any]:
        """Its parts with the defaults that depend on the model written out."""
        return {
            "embedding": self.embedding.explicit(ctx),
            "stack": stack_of([block.explicit(ctx) for block in self.layers()]),
        }

    def costs_within(self, ctx: BuildContext, shape: Shape) -> dict[str, Cost]:
        """Those of embedding, layers and final norm, by site name."""
        parts = {
            "embedding": self.embedding.costs(ctx, shape).outside_blocks(),
            "layers": Cost.of(self._layer_costs(ctx, shape)),
        }
        if self.final_norm is not None:
            parts["final_norm"] = self.final_norm.costs(ctx, shape).outside_blocks()
        return parts

    def _layer_costs(self, ctx: BuildContext, shape: Shape) -> dict[str, Cost]:
        """Layers of one block config are one object, unless a part asks which layer it is."""
        made, costs = dict[int, Cost](), dict[str, Cost]()
        for layer, block in enumerate(self.layers()):
            if (cost := made.get(id(block))) is None:
                at = ctx.at(layer)
                cost = block.costs(at, shape)
                if not at.asked:
                    made[id(block)] = cost
            costs[str(layer)] = cost
        return costs

    def modules_within(self, ctx: BuildContext) -> tuple[Embedding, list[Block], nn.Module | None]:
        """Embedding, layers and final norm, on the meta device."""
        with torch.device("meta"):
            embedding = self.embedding.build(ctx)
            final_norm = self.final_norm.build(ctx) if self.final_norm else None
        return embedding, self._blocks(ctx), final_norm

    def _blocks(self, ctx: BuildContext) -> list[Block]:
        """The layers: one of a kind is built, and the others are copies of it."""
        moulds: dict[int, Mould] = {}
        blocks: list[Block] = []
        for layer, config in enumerate(self.layers()):
            if (mould := moulds.get(id(config))) is not None:
                blocks.append(mould.make())  # type: ignore[arg-type]
                continue
            at = ctx.at(layer)
            with torch.device("meta"):
                blocks.append(config.build(at))
            if not at.asked:
                moulds[id(config)] = Mould(blocks[-1])
        return blocks


class ModelConfig(TowerConfig):
    """A whole model.

    >>> config = ModelConfig.from_file("model.yaml")
    >>> model = config.build(seed=0)
    """

    vocab_size: int = Field(gt=0, le=1 << 28)
    d_model: int = Field(gt=0, le=1 << 20)
    context: int = Field(gt=0, le=MAX_CONTEXT)
    """Tokens the model is trained to read at once."""
    head: HeadConfig = HeadConfig()
    init: InitConfig = Gpt2InitConfig()
    reparam: ReparamConfig | None = None
    """How linear maps hold their matrices; None: as they are."""
    mup: Mup | None = None
    """What begins and learns with the width; None: the standard parametrisation."""
    encoder: TowerConfig | None = None
    """A tower that reads a source, whose output layers with cross-attention read; None: there is none."""

    @model_validator(mode="after")
    def _joined(self) -> ModelConfig:
        """Both towers fit together."""
        if self.embedding.tied:
            raise RequestError(
                "embedding.tied=True: only an encoder's table can be that of the model around it",
                code="conflict", field="embedding.tied", value=True,
            )  # fmt: skip
        reads = self.embedding.reads
        if reads != "tokens" and self.head.predicts_tokens:
            raise RequestError(
                f"head: a model of {reads} predicts no tokens; give its head classes=, or vector=True",
                code="conflict", field="head", value=reads,
            )  # fmt: skip
        if (patches := self.embedding.patches) is not None and patches.tokens > self.context:
            raise RequestError(
                f"context={self.context}: an image is {patches.tokens} tokens, and all are read at once",
                code="range", field="context", value=self.context,
            )  # fmt: skip
        if (encoder := self.encoder) is None:
            return self
        if not self.reads_memory:
            raise RequestError(
                "encoder: no layer of the stack reads it; give one a mixer of kind cross_attention",
                code="conflict", field="encoder",
            )  # fmt: skip
        if encoder.reads_memory:
            raise RequestError(
                "encoder.stack: an encoder reads no other sequence; use attention there",
                code="conflict", field="encoder.stack",
            )  # fmt: skip
        for name in ("vocab_size", "d_model"):
            other = getattr(encoder, name)
            if encoder.embedding.tied and other not in (None, getattr(self, name)):
                raise RequestError(
                    f"encoder.{name}={other}: a tied table has {name}={getattr(self, name)}",
                    code="conflict", field=f"encoder.{name}", value=other,
                )  # fmt: skip
        return self

    @property
    def ctx(self) -> BuildContext:
        return BuildContext(
            self.d_model, self.vocab_size, self.context, self.n_layers,
            reparam=self.reparam, mup=self.mup, branches=self.n_branches,
            memory_width=self.encoder.d_model if self.encoder else None,
        )  # fmt: skip

    @property
    def encoder_ctx(self) -> BuildContext:
        """The context of the encoder's parts."""
        assert self.encoder is not None
        it = self.encoder
        return BuildContext(
            it.d_model or self.d_model, it.vocab_size or self.vocab_size, it.context or self.context, it.n_layers,
            reparam=self.reparam, mup=self.mup, branches=it.n_branches, tower="encoder",
        )  # fmt: skip

    @property
    def causal(self) -> bool:
        """True if no token of any layer depends on later ones."""
        blocks = [block for _, block in self._kinds()]
        return all(block.mixer.causal(self.ctx) and (block.ffn is None or block.ffn.causal) for block in blocks)

    @property
    def takes_prefix(self) -> bool:
        """Whether the caller may name a prefix whose tokens see each other, and all else is causal."""
        blocks = [block for _, block in self._kinds()]
        found = [(block.mixer.causal(self.ctx), block.mixer.takes_prefix(self.ctx)) for block in blocks]
        reads_on = all(causal or takes for causal, takes in found)
        return any(takes for _, takes in found) and reads_on and all(b.ffn is None or b.ffn.causal for b in blocks)

    @property
    def writes(self) -> bool:
        """Whether it can write a text on: no token depends on later ones, but for those of a prompt that is read at
        once."""
        return self.causal or self.takes_prefix

    @property
    def rates(self) -> dict[Role, float]:
        """Learning rates of weights by their role, over the recipe's; 1 where it is not named."""
        return self.mup.rates(self.d_model) if self.mup else {}

    def explicit(self) -> ModelConfig:
        """The same model with nothing left to defaults and nothing that only training knows: two configs are the same
        function of the same weights where these are equal."""
        return self.vary(
            **self.parts_within(self.ctx),
            head=self.head.explicit(self.ctx),
            init=Gpt2InitConfig(),
            mup=None,
            encoder=self._explicit_encoder(),
        )

    def _explicit_encoder(self) -> TowerConfig | None:
        if self.encoder is None:
            return None
        ctx = self.encoder_ctx
        sizes = {"vocab_size": ctx.vocab_size, "d_model": ctx.d_model, "context": ctx.context}
        return self.encoder.vary(**sizes, **self.encoder.parts_within(ctx))

    # What it costs

    def costs(self, shape: Shape) -> Cost:
        """What the model costs for this shape, as a tree by site name; allocates nothing. A source counts as as long as
        the text, and as read where the text begins.

        >>> print(config.costs(Shape.training(8, 1024)))
        >>> config.costs(Shape(s=1, t=1024, phase="decode"))["layers.3.mixer"].state_bytes
        """
        own = self.costs_within(self.ctx, shape)
        own["head"] = self.head.costs(self.ctx, shape).outside_blocks()
        order = ("embedding", "layers", "head", "final_norm")
        parts = {name: own[name] for name in order if name in own}
        if self.encoder is not None:
            encoder = Cost.of(self.encoder.costs_within(self.encoder_ctx, shape))
            begins = shape.s == shape.t and shape.phase != "decode"
            parts["encoder"] = encoder.without("state_bytes") if begins else encoder.without(*OF_WORK)
        return Cost.of(parts)

    def num_params(self, embeddings: bool = True) -> int:
        """Exact number of parameters, tied ones once; allocates nothing.

        Without `embeddings`: the layers and the final norm alone, the N of scaling laws."""
        cost = self.costs(Shape())
        return cost.parameters - (0 if embeddings else sum(end.parameters for end in self._ends(cost)))

    def active_params(self, embeddings: bool = True) -> int:
        """Those of `num_params` that one token meets: of experts, the chosen ones alone."""
        cost = self.costs(Shape())
        return cost.active_parameters - (0 if embeddings else sum(end.active_parameters for end in self._ends(cost)))

    def _ends(self, cost: Cost) -> list[Cost]:
        """Those of the tables of words and of the head."""
        return [cost["embedding"], cost["head"], *([cost["encoder.embedding"]] if self.encoder else [])]

    def flops(self, t: int, full: bool = True) -> float:
        """Forward FLOPs of matrix products per token of a t-token sequence (training takes three times as many).

        `full` counts every query against all t keys, as the literature's 6 N + 12 L d t does and as FLOP counters
        measure; otherwise only the keys it sees, about half under a causal mask."""
        return self.costs(Shape(s=t, t=t, phase="prefill", every_key=full)).flops / t

    def state_bytes(self, t: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of decode state in `dtype` that one sequence of t tokens needs: those that `init_state` allocates."""
        return self.costs(Shape(s=1, t=t, phase="decode", state_dtype=dtype)).state_bytes

    def _repr_html_(self) -> str:
        """In a notebook: a table of the parts and the parameters of each."""
        ctx, kinds = self.ctx, [(n, block) for n, block in self._kinds()]
        rows = [("embedding", told(self.embedding), self.embedding.num_params(ctx))]
        for n, block in kinds[:SHOWN_BLOCKS]:
            wiring = block.residual.num_params(block.within(ctx))
            rows.append((f"mixer × {n}", told(block.mixer), n * block.mixer.num_params(ctx)))
            if block.ffn is not None:
                rows.append((f"ffn × {n}", told(block.ffn), n * block.ffn.num_params(ctx)))
            rows.append((f"wiring × {n}", f"{told(block.residual)}, {told(block.norm)}", n * wiring))
        if rest := kinds[SHOWN_BLOCKS:]:
            rows.append(
                (f"{len(rest)} blocks more", "", sum(n * block.costs(ctx, Shape()).parameters for n, block in rest))
            )
        if self.final_norm is not None:
            rows.append(("final norm", told(self.final_norm), self.final_norm.num_params(ctx)))
        rows.append(("head", told(self.head), self.head.num_params(ctx)))
        size = f"{self.n_layers} layers, width {self.d_model:,}, {self.vocab_size:,} tokens, context {self.context:,}"
        return plain_table(size, ("", "part", "parameters"), [*rows, ("all", "", self.num_params())])

    # The module

    def check(self) -> None:
        """Builds the modules without allocating anything: raises RequestError where parts do not fit together."""
        self.outline()

    def outline(self) -> Model:
        """The model on the meta device: its modules and shapes, and nothing allocated."""
        if (params := self.num_params()) > MAX_PARAMETERS:
            raise RequestError(
                f"{params:,} parameters are more than the {MAX_PARAMETERS:,} allowed",
                code="range", field="size", value=params,
            )  # fmt: skip
        with torch.device("meta"):
            head = self.head.build(self.ctx)
        embedding, layers, final_norm = self.modules_within(self.ctx)
        encoder = Tower(*self.encoder.modules_within(self.encoder_ctx)) if self.encoder else None
        return Model(embedding, layers, final_norm, head, config=self, encoder=encoder)

    def build(self, seed: int | None = 0) -> Model:
        """The model, on torch's current device, in torch's current dtype.

        Each weight depends on `seed` and its parameter's name alone, on any machine the same; `seed=None` leaves them
        unfilled (to be loaded).
        """
        device, model = torch.get_default_device(), self.outline()
        if device.type == "meta":
            return model
        model.to_empty(device="cpu" if seed is not None else device)
        if seed is not None:
            fill(model, self.begin(seed))
            model.to(device)
        return model

    def begin(self, seed: int) -> Init:
        """How the weights of this model begin from a seed."""
        of_towers = {"encoder.": self._rule(self.encoder_ctx).std} if self.encoder else {}
        return replace(self._rule(self.ctx), seed=check_seed(seed), of_towers=of_towers)

    def _rule(self, ctx: BuildContext) -> Init:
        return self.mup.rule(self.init, ctx) if self.mup else self.init.build(ctx)

    def initial_weights(self, seed: int = 0) -> InitialWeights:
        """The weights of `build(seed)`, any slice of any tensor alone."""
        return InitialWeights(self.outline(), self.begin(seed))

    # Files

    def to_dict(self) -> dict[str, Any]:
        return to_plain(self)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def save(self, path: str | Path) -> None:
        """Writes .json or .yaml, by the name."""
        path = Path(path)
        text = json.dumps(self.to_dict(), indent=2) if path.suffix == ".json" else self.to_yaml()
        path.write_text(text, encoding="utf-8")

    @classmethod
    def from_dict(cls, value: Any, where: str = "") -> ModelConfig:
        """Raises RequestError that names the field, the value, and what would be right, and the file if it is said."""
        return validated(cls, value, "config", where)

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        return cls.from_dict(read_tree(path), str(path))

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON Schema of the file format, with every choice of part known now: for editors and forms."""
        definitions: dict[str, Any] = {}

        def inline(schema: Any) -> Any:
            if isinstance(schema, list):
                return [inline(item) for item in schema]
            if not isinstance(schema, dict):
                return schema
            if "x-axis" in schema:
                return {"oneOf": choices_of(schema["x-axis"])}
            definitions.update({name: inline(body) for name, body in schema.pop("$defs", {}).items()})
            return {key: inline(item) for key, item in schema.items()}

        def choices_of(axis_class: str) -> list[dict[str, Any]]:
            """A mapping for each choice, and the bare kinds of those that need no field."""
            base = next(known for known in _descendants(PartConfig) if known.__name__ == axis_class)
            choices = sorted(base.choices().items())
            bare = [kind for kind, one in choices if not any(f.is_required() for f in one.model_fields.values())]
            for _, choice in choices:
                if choice.__name__ not in definitions:
                    definitions[choice.__name__] = {}  # a choice may contain its own axis
                    body = inline(choice.model_json_schema())
                    body["required"] = ["kind", *body.get("required", [])]
                    definitions[choice.__name__] = body
            refs: list[dict[str, Any]] = [{"$ref": f"#/$defs/{choice.__name__}"} for _, choice in choices]
            return [*refs, {"enum": bare}] if bare else refs

        schema = inline(cls.model_json_schema())
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "$defs": definitions}

    def diff(self, other: ModelConfig) -> dict[str, tuple[Any, Any]]:
        """path -> (mine, theirs) for every value that differs; a missing one is None.

        >>> gf.preset("gpt2").diff(gf.preset("gpt2+rmsnorm"))
        {'stack.0.blocks.0.norm.kind': ('layernorm', 'rmsnorm'), ...}
        """
        mine, theirs = flatten(self.to_dict()), flatten(other.to_dict())
        paths = [*mine, *(path for path in theirs if path not in mine)]
        return {path: (mine.get(path), theirs.get(path)) for path in paths if mine.get(path) != theirs.get(path)}


def stack_of(blocks: Sequence[BlockConfig]) -> tuple[Stage, ...]:
    """The shortest stack of these blocks: a pattern repeated, with its beginning where one is left over, or runs."""
    for period in range(1, len(blocks) // 2 + 1):
        pattern = tuple(blocks[:period])
        if all(block == pattern[i % period] for i, block in enumerate(blocks)):
            repeat, rest = divmod(len(blocks), period)
            return (Stage(repeat=repeat, blocks=pattern), *((Stage(blocks=pattern[:rest]),) if rest else ()))
    runs: list[Stage] = []
    for block in blocks:
        if runs and runs[-1].blocks == (block,):
            runs[-1] = Stage(repeat=runs[-1].repeat + 1, blocks=(block,))
        else:
            runs.append(Stage(blocks=(block,)))
    return tuple(runs)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": [1]}} -> {"a.b.0": 1}."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    flat: dict[str, Any] = {}
    for key, value in items:
        path = f"{prefix}{key}"
        flat |= flatten(value, path + ".") if isinstance(value, (dict, list, tuple)) else {path: value}
    return flat


def first_difference(was: Any, now: Any, besides: Collection[str] = ()) -> tuple[str, Any, Any] | None:
    """(path, old value, new value) of the first leaf in which two plain trees differ, fields of the names `besides`
    apart; None where there is none."""
    old, new = (flatten({"": tree}) for tree in (was, now))
    for path in dict.fromkeys((*new, *old)):
        if old.get(path) != new.get(path) and not set(path.split(".")) & set(besides):
            return path.removeprefix("."), old.get(path), new.get(path)
    return None


def _descendants(cls: type[PartConfig]) -> Iterator[type[PartConfig]]:
    for child in cls.__subclasses__():
        yield child
        yield from _descendants(child)


# Showing


def told(part: PartConfig) -> str:
    """A part in a few words: its kind, and what is not as by default."""
    words = []
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if value != field.get_default(call_default_factory=True):
            said = told(value) if isinstance(value, PartConfig) else "none" if value is None else f"{value}"
            words.append(f"{name} {said}")
    return f"{part.kind} ({', '.join(words)})" if words else part.kind


# Reading values that somebody else wrote


def _once(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """A mapping of them, which takes no key with two values: one of them would silently count."""
    made: dict[Any, Any] = {}
    for key, value in pairs:
        if key in made and made[key] != value:
            raise ValueError(f"{shown(key)} is given twice")
        made[key] = value
    return made


class _NoAliases(yaml.SafeLoader):
    """Refuses anchors: a small file must not unfold into a large tree."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        _once([(key.value, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)])
        return super().construct_mapping(node, deep)


def read_tree(path: str | Path) -> Any:
    """The plain tree in a .yaml or .json file. Raises RequestError."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RequestError(
                f"{path} has {path.stat().st_size:,} bytes; a config has at most {MAX_FILE_BYTES:,}",
                code="range", field=path.name,
            )  # fmt: skip
        text = path.read_text(encoding="utf-8")
        return json.loads(text, object_pairs_hook=_once) if path.suffix == ".json" else yaml.load(text, _NoAliases)
    except RequestError:
        raise
    except FileNotFoundError:
        raise RequestError(f"there is no file {path}", code="missing", field=path.name, value=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        code: Code = "disk" if isinstance(error, OSError) else "syntax"
        raise RequestError(f"{path} cannot be read: {error}", code=code, field=path.name) from None
    except (ValueError, yaml.YAMLError, RecursionError, LookupError, AttributeError, TypeError) as error:
        reason = shown(error, 200)
        raise RequestError(
            f"{path} is not a valid {path.suffix.lstrip('.') or 'yaml'} file: {reason}", code="syntax", field=path.name
        ) from None


def validated(cls: Any, value: Any, what: str, where: str = "") -> Any:
    """cls from a plain tree; every complaint becomes one sentence, which begins with the file where it is said."""
    file = f"{where}: " if where else ""
    if not isinstance(value, dict):
        raise RequestError(
            f"{file}a {what} is a mapping of fields, and this is {type(value).__name__}",
            code="type", field=what, value=type(value).__name__,
        )  # fmt: skip
    try:
        return cls.model_validate(value)
    except ValidationError as error:
        raise request_error(error, file, what) from None
    except RecursionError:
        raise RequestError(f"{file}the {what} is nested too deeply", code="range", field=what) from None


def first_problem(error: ValidationError) -> Any:
    """The first thing wrong, unknown keys first: a misspelt key often explains the rest."""
    return min(error.errors(), key=lambda one: one["type"] != "unknown_field")


def request_error(error: ValidationError, where: str = "", what: str = "config") -> RequestError:
    """The RequestError that says what pydantic found; its sentence begins with `where`. Its field is `what`, where the
    fields contradict each other."""
    first = first_problem(error)
    path = ".".join(str(step) for step in first["loc"])
    field = ".".join(filter(None, (path, str(first.get("ctx", {}).get("name", "")))))
    unknown = first["type"] == "unknown_field"
    value = None if first["type"] == "missing" else first["input"]
    if unknown and isinstance(value, dict):
        value = value.get(first["ctx"]["name"])
    expected = first["msg"].removeprefix("Value error, ")
    message, field = f"{where}{explain(error)}", (field if unknown else path) or what
    if isinstance(cause := first.get("ctx", {}).get("error"), RequestError):  # from a check of the config's own
        field = ".".join(filter(None, (path, cause.field))) or what
        return RequestError(message, code=cause.code, field=field, value=cause.value, expected=cause.expected)
    return RequestError(message, code=_code_of(first["type"]), field=field, value=value, expected=expected)


def _code_of(kind: str) -> Code:
    """The code of a RequestError for a kind of complaint of pydantic's."""
    if kind.endswith(("_type", "_parsing", "_from_float")):
        return "type"
    known: dict[str, Code] = {
        "unknown_field": "unknown", "part": "unknown", "kind": "conflict", "literal_error": "unknown",
        "value_error": "conflict", "missing": "missing",
    }  # fmt: skip
    return known.get(kind, "range")


def explain(error: ValidationError) -> str:
    """One sentence about the first thing wrong."""
    first = first_problem(error)
    path = ".".join(str(step) for step in first["loc"])
    if first["type"] == "unknown_field":
        return f"{path}: {first['msg']}" if path else first["msg"]
    if first["type"] == "missing":
        return f"field {path} is missing"
    given = "" if isinstance(first["input"], (dict, list)) else f"={first['input']!r}"[:80]
    message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if first["type"] == "tuple_type":
        message = "a list, such as [1, 2], is right here"
    where = f"{path}{given}: " if path or given else ""
    return f"{where}{message[0].lower()}{message[1:]}"
