"""`ModelConfig`: a frozen tree of part configs that builds a module, counts its parameters and costs, and is saved to a
file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from torch import nn

from glassformer.errors import Code, RequestError, check_seed, shown
from glassformer.figures import plain_table
from glassformer.model import Block, Model, Tower
from glassformer.parts.building import InitialWeights, fill
from glassformer.parts.core.base import BuildContext, PartConfig, Value, part_classes, to_plain
from glassformer.parts.core.cost import OF_WORK, Cost, Shape
from glassformer.parts.core.init import Gpt2InitConfig, Init, InitConfig, Role
from glassformer.parts.core.module_template import ModuleTemplate
from glassformer.parts.core.outside import is_outside, naming_imports
from glassformer.parts.core.refused import request_error
from glassformer.parts.counted import Counting
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
    """Config of one layer: a mixer, a feed-forward network or None, and the norm that the residual wiring places."""

    mixer: MixerConfig
    ffn: FFNConfig | None
    norm: NormConfig
    residual: ResidualConfig = PreConfig()

    def resolved(self, ctx: BuildContext) -> BlockConfig:
        return self.replace(
            mixer=self.mixer.resolved(ctx),
            ffn=self.ffn.resolved(ctx) if self.ffn else None,
            residual=self.residual.resolved(ctx),
        )

    def build(self, ctx: BuildContext) -> Block:
        mixer, ffn = self.mixer.build(ctx), self.ffn.build(ctx) if self.ffn else None
        self.mixer.check_built(mixer, ctx)
        if self.ffn is not None and ffn is not None:
            self.ffn.check_built(ffn)
        return Block(mixer, ffn, self.residual.build(self.within(ctx)))

    def within(self, ctx: BuildContext) -> BuildContext:
        """Returns the context for the wiring."""
        return ctx.within(norm=self.norm, has_ffn=self.ffn is not None)

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        """Returns the costs of the parts by site name. Recomputing the block keeps its input, resid_pre."""
        stream = shape.keeps(ctx.d_model, shape.dtype)
        inner = {
            branch: shape.reading(shape.products) if self.residual.feeds(branch) else shape
            for branch in ("mixer", "ffn")
        }
        parts = {"resid_pre": Cost(kept_selective=stream, kept_full=stream)}
        for name, part in (("mixer", self.mixer), ("ffn", self.ffn)):
            if part is not None:
                parts[name] = part.costs(ctx, inner[name])
                if self.residual.adds_at_once(name, self.within(ctx)) and part.at_once(ctx, inner[name]):
                    parts[name] += Cost(kept=-inner[name].keeps(ctx.d_model))  # the norm, which is made again
        return Cost.of(parts) + self.residual.costs(self.within(ctx), shape)


class Stage(Value):
    """A sequence of blocks, repeated `repeat` times: for uniform stacks, alternations, and hybrids."""

    repeat: int = Field(1, gt=0, le=MAX_LAYERS)
    blocks: tuple[BlockConfig, ...] = Field(min_length=1)


class TowerConfig(Value):
    """Embedding, layers and final norm: an encoder, or a model without its head."""

    vocab_size: int | None = Field(None, gt=0, le=1 << 28)
    """Vocabulary size; if None, the surrounding model's, as for d_model and context"""
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
        """Number of residual additions in the stack, for depth factors: one for each mixer and one for each ffn.

        A stack without any ffn (Mamba) counts two for each layer, as its initialisation has always done."""
        mixers, ffns = self.n_layers, sum(n for n, block in self._kinds() if block.ffn is not None)
        return mixers + ffns if ffns else 2 * mixers

    def layers(self) -> Iterator[BlockConfig]:
        """Yields the block of each layer, bottom first."""
        for stage in self.stack:
            for _ in range(stage.repeat):
                yield from stage.blocks

    def _kinds(self) -> Iterator[tuple[int, BlockConfig]]:
        for stage in self.stack:
            for block in stage.blocks:
                yield stage.repeat, block

    @property
    def reads_memory(self) -> bool:
        """True if a layer reads another sequence in addition to its input."""
        return any(block.mixer.reads_memory for _, block in self._kinds())

    def parts_within(self, ctx: BuildContext) -> dict[str, Any]:
        """Returns the parts with the defaults that depend on the model filled in."""
        return {
            "embedding": self.embedding.resolved(ctx),
            "stack": stack_of([block.resolved(ctx) for block in self.layers()]),
        }

    def costs_within(self, ctx: BuildContext, shape: Shape) -> dict[str, Cost]:
        """Returns the costs of embedding, layers and final norm by site name."""
        parts = {
            "embedding": self.embedding.costs(ctx, shape).outside_blocks(),
            "layers": Cost.of(self._layer_costs(ctx, shape)),
        }
        if self.final_norm is not None:
            parts["final_norm"] = self.final_norm.costs(ctx, shape).outside_blocks()
        return parts

    def _layer_costs(self, ctx: BuildContext, shape: Shape) -> dict[str, Cost]:
        """Returns the costs of the layers by number. Layers with the same block config share one object, unless a part
        depends on the layer's number."""
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
        """Returns embedding, layers and final norm, on the meta device."""
        with torch.device("meta"):
            embedding = self.embedding.build(ctx)
            final_norm = self.final_norm.build(ctx) if self.final_norm else None
        return embedding, self._blocks(ctx), final_norm

    def _blocks(self, ctx: BuildContext) -> list[Block]:
        """Returns the layers: one of each kind is built, the others are copies of it."""
        templates: dict[int, ModuleTemplate] = {}
        blocks: list[Block] = []
        for layer, config in enumerate(self.layers()):
            if (template := templates.get(id(config))) is not None:
                blocks.append(template.make())  # type: ignore[arg-type]
                continue
            at = ctx.at(layer)
            with torch.device("meta"):
                blocks.append(config.build(at))
            if not at.asked:
                templates[id(config)] = ModuleTemplate(blocks[-1])
        return blocks


class ModelConfig(TowerConfig):
    """A model as a value: a frozen tree of the configs of its parts.

    The class of a part's config selects the part. `gf.preset` makes a config from an expression; YAML and JSON files
    store it.

    Attributes
    ----------
    vocab_size : int
        Number of tokens of the vocabulary.
    d_model : int
        Width of the residual stream.
    embedding : EmbeddingConfig
        Embedding of tokens, and absolute positions.
    stack : tuple of Stage
        Layers: stages of repeated blocks.
    final_norm : NormConfig or None
        Norm before the head.

    Examples
    --------
    >>> config = gf.preset("llama@0.3m+vocab_size=100")
    >>> config.n_layers, config.d_model, config.stack[0].blocks[0].mixer.kind
    (3, 88, 'attention')
    """

    vocab_size: int = Field(gt=0, le=1 << 28)
    d_model: int = Field(gt=0, le=1 << 20)
    context: int = Field(gt=0, le=MAX_CONTEXT)
    """Number of tokens of a training sequence"""
    head: HeadConfig = HeadConfig()
    """Head, which maps vectors to logits"""
    init: InitConfig = Gpt2InitConfig()
    """Distribution of the initial weights."""
    reparam: ReparamConfig | None = None
    """Reparametrisation of the matrices of linear layers; None for plain matrices."""
    mup: Mup | None = None
    """Initial scales and learning rates by width; None for the standard parametrisation."""
    encoder: TowerConfig | None = None
    """Encoder of a source that layers with cross-attention attend to; None for a model without encoder"""

    @model_validator(mode="after")
    def _joined(self) -> ModelConfig:
        """Checks that encoder and decoder fit together."""
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
        """Context for building and counting the parts of the model."""
        return BuildContext(
            self.d_model, self.vocab_size, self.context, self.n_layers,
            reparam=self.reparam, mup=self.mup, branches=self.n_branches,
            memory_width=self.encoder.d_model if self.encoder else None,
        )  # fmt: skip

    @property
    def encoder_ctx(self) -> BuildContext:
        """Context for building and counting the parts of the encoder."""
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
        """True if the tokens of a prefix may attend to each other and everything else is causal."""
        blocks = [block for _, block in self._kinds()]
        found = [(block.mixer.causal(self.ctx), block.mixer.takes_prefix(self.ctx)) for block in blocks]
        reads_on = all(causal or takes for causal, takes in found)
        return any(takes for _, takes in found) and reads_on and all(b.ffn is None or b.ffn.causal for b in blocks)

    @property
    def writes(self) -> bool:
        """True if the model can generate text: no token outside the prompt depends on later ones."""
        return self.causal or self.takes_prefix

    @property
    def rates(self) -> dict[Role, float]:
        """Factors on the recipe's learning rate by role of a weight; 1 for roles that are absent."""
        return self.mup.rates(self.d_model) if self.mup else {}

    def resolved(self) -> ModelConfig:
        """Returns the same model with every default filled in, and without fields that only training uses.

        Two configs with equal resolved forms compute the same function of the same weights.

        Returns
        -------
        ModelConfig
            The config with every default filled in.

        Examples
        --------
        >>> config.resolved().stack[0].blocks[0].mixer.head_dim
        44
        """
        return self.replace(
            **self.parts_within(self.ctx),
            head=self.head.resolved(self.ctx),
            init=Gpt2InitConfig(),
            mup=None,
            encoder=self._resolved_encoder(),
        )

    def _resolved_encoder(self) -> TowerConfig | None:
        if self.encoder is None:
            return None
        ctx = self.encoder_ctx
        sizes = {"vocab_size": ctx.vocab_size, "d_model": ctx.d_model, "context": ctx.context}
        return self.encoder.replace(**sizes, **self.encoder.parts_within(ctx))

    # What it costs

    def costs(self, shape: Shape) -> Cost:
        """Returns the costs of the model for a shape, as a tree by site name; allocates nothing.

        Parameters
        ----------
        shape
            Batch, lengths, phase and dtypes. The source of an encoder-decoder counts as equal in length to the text,
            and is read at its start.

        Returns
        -------
        Cost
            Parameters, FLOPs, state bytes, kept bytes; `cost["layers.3.mixer"]` is the cost of one part.

        Examples
        --------
        >>> from glassformer.parts.core.cost import Shape
        >>> config.costs(Shape(s=1, t=1024, phase="decode"))["layers.2.mixer"].state_bytes
        720896
        """
        self._products_counted  # noqa: B018
        return self._sizes(shape)

    def _sizes(self, shape: Shape) -> Cost:
        """Returns the costs for a shape. For parts from outside the package, first compares the declared parameters and
        state with those of the built module, but runs no forward pass, as a check of FLOPs would."""
        self._tensors_counted  # noqa: B018
        return self._costs(shape)

    def _costs(self, shape: Shape) -> Cost:
        own = self.costs_within(self.ctx, shape)
        own["head"] = self.head.costs(self.ctx, shape).outside_blocks()
        order = ("embedding", "layers", "head", "final_norm")
        parts = {name: own[name] for name in order if name in own}
        if self.encoder is not None:
            encoder = Cost.of(self.encoder.costs_within(self.encoder_ctx, shape))
            begins = shape.s == shape.t and shape.phase != "decode"
            parts["encoder"] = encoder.without("state_bytes") if begins else encoder.without(*OF_WORK)
        return Cost.of(parts)

    @cached_property
    def _tensors_counted(self) -> None:
        """Checks the parameters and the state of a model with parts from outside the package. Raises RequestError."""
        if self._has_outside:
            self._counting().check_tensors()

    @cached_property
    def _products_counted(self) -> None:
        """Checks the FLOPs of a model with parts from outside the package. Raises RequestError."""
        if self._has_outside:
            self._counting().check_flops()

    @property
    def _has_outside(self) -> bool:
        return any(is_outside(part) for part in part_classes(self))

    def _counting(self) -> Counting:
        """Returns the check of this config's counts against the module that it builds."""
        few = [block for block, n in Counter(self.layers()).items() for _ in range(min(n, 2))]
        short = self.replace(stack=stack_of(few))  # the first of two layers makes what later ones share
        built = partial(short.build, seed=0)
        return Counting(self._outline, self._costs, short._outline, short._costs, built, self.context)

    def num_params(self, embeddings: bool = True) -> int:
        """Returns the exact number of parameters, tied ones once; allocates nothing.

        Parameters
        ----------
        embeddings
            If False, only layers and final norm count: the N of scaling laws.

        Returns
        -------
        int
            Number of parameters.

        Examples
        --------
        >>> config.num_params() == sum(p.numel() for p in config.build().parameters())
        True
        """
        cost = self._sizes(Shape())
        return cost.parameters - (0 if embeddings else sum(end.parameters for end in self._ends(cost)))

    def active_params(self, embeddings: bool = True) -> int:
        """Returns the number of parameters that one token uses; experts count only if the router selects them.

        Parameters
        ----------
        embeddings
            If False, only layers and final norm count.

        Returns
        -------
        int
            Number of parameters.

        Examples
        --------
        >>> moe = gf.preset("llama@0.3m+moe:8:2")
        >>> moe.active_params() < moe.num_params()
        True
        """
        cost = self._sizes(Shape())
        return cost.active_parameters - (0 if embeddings else sum(end.active_parameters for end in self._ends(cost)))

    def _ends(self, cost: Cost) -> list[Cost]:
        """Returns the costs of the embeddings and of the head."""
        return [cost["embedding"], cost["head"], *([cost["encoder.embedding"]] if self.encoder else [])]

    def flops(self, t: int, full: bool = True) -> float:
        """Returns the forward FLOPs of matmuls per token; training takes three times the number.

        Parameters
        ----------
        t
            Number of tokens of a sequence.
        full
            If True, every query counts against all t keys, as in 6 N + 12 l d t and in FLOP counters; if False,
            against the keys that it attends to, about half of them under a causal mask.

        Returns
        -------
        float
            FLOPs per token.

        Examples
        --------
        >>> config.flops(256, full=False) < config.flops(256)
        True
        """
        return self.costs(Shape(s=t, t=t, phase="prefill", every_key=full)).flops / t

    def state_bytes(self, t: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Returns the bytes of decode state of one sequence, as `model.init_state` allocates them.

        Parameters
        ----------
        t
            Number of tokens of the sequence.
        dtype
            Dtype of the state.

        Returns
        -------
        int
            Bytes.

        Examples
        --------
        >>> config.state_bytes(1024)
        1081344
        """
        return self._sizes(Shape(s=1, t=t, phase="decode", state_dtype=dtype)).state_bytes

    def __str__(self) -> str:
        """Returns the parts with the parameters of each, as lines; `repr` has every field."""
        size, rows = self._summary()
        return "\n".join([size, *(f"{part:<12}{count:>16,}  {words}".rstrip() for part, words, count in rows)])

    def _repr_html_(self) -> str:
        """Returns, for a notebook, a table of the parts and the parameters of each."""
        size, rows = self._summary()
        return plain_table(size, ("", "part", "parameters"), rows)

    def _summary(self) -> tuple[str, list[tuple[str, str, int]]]:
        """Returns the sizes, and (part, description, parameters) of each part."""
        ctx, kinds = self.ctx, [(n, block) for n, block in self._kinds()]
        rows: list[tuple[str, str, int]] = []
        if (encoder := self.encoder) is not None:
            count = Cost.of(encoder.costs_within(self.encoder_ctx, Shape())).parameters
            blocks = f"{encoder.n_layers} layers, {told(encoder.stack[0].blocks[0].mixer)}"
            rows.append(("encoder", blocks, count))
        rows.append(("embedding", told(self.embedding), self.embedding.num_params(ctx)))
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
        return size, [*rows, ("all", "", self.num_params())]

    # Modules

    def check(self) -> None:
        """Builds the modules on the meta device, which allocates nothing.

        Raises
        ------
        RequestError
            For parts that do not fit together.

        Examples
        --------
        >>> config.check()
        """
        self.outline()

    def outline(self) -> Model:
        """Returns the model on the meta device: its modules and shapes, without allocated memory.

        Returns
        -------
        Model
            The model, without weights.

        Examples
        --------
        >>> config.outline().embedding.weight.device
        device(type='meta')
        """
        if (params := self.num_params()) > MAX_PARAMETERS:
            raise RequestError(
                f"{params:,} parameters are more than the {MAX_PARAMETERS:,} allowed",
                code="range", field="size", value=params,
            )  # fmt: skip
        return self._outline()

    def _outline(self) -> Model:
        with torch.device("meta"):
            head = self.head.build(self.ctx)
        embedding, layers, final_norm = self.modules_within(self.ctx)
        encoder = Tower(*self.encoder.modules_within(self.encoder_ctx)) if self.encoder else None
        return Model(embedding, layers, final_norm, head, config=self, encoder=encoder)

    def build(self, seed: int | None = 0) -> Model:
        """Returns the model as a module, on torch's current device and in its current dtype.

        Parameters
        ----------
        seed
            Seed of the initial weights. Each weight depends only on the seed and its parameter's name, and is the same
            on every machine. If None, weights are left unfilled, to be loaded.

        Returns
        -------
        Model
            The module.

        Raises
        ------
        RequestError
            For parts that do not fit together, and too many parameters.

        Examples
        --------
        >>> model = config.build(seed=0)
        >>> model(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 100])
        """
        device, model = torch.get_default_device(), self.outline()
        if device.type == "meta":
            return model
        allocate(model, "cpu" if seed is not None else device)
        if seed is not None:
            fill(model, self.begin(seed))
            model.to(device)
        return model

    def begin(self, seed: int) -> Init:
        """Returns the rule that draws the initial weights from a seed.

        Parameters
        ----------
        seed
            Seed of the initial weights.

        Returns
        -------
        Init
            The rule.

        Examples
        --------
        >>> config.begin(0).seed
        0
        """
        of_towers = {"encoder.": self._rule(self.encoder_ctx).std} if self.encoder else {}
        return replace(self._rule(self.ctx), seed=check_seed(seed), of_towers=of_towers)

    def _rule(self, ctx: BuildContext) -> Init:
        return self.mup.rule(self.init, ctx) if self.mup else self.init.build(ctx)

    def initial_weights(self, seed: int = 0) -> InitialWeights:
        """Returns the weights of `build(seed)` as a mapping that draws any slice of any tensor separately.

        Parameters
        ----------
        seed
            Seed of the initial weights.

        Returns
        -------
        InitialWeights
            The weights, drawn when they are read.

        Examples
        --------
        >>> weights = config.initial_weights(seed=0)
        """
        return InitialWeights(self.outline(), self.begin(seed))

    # Files

    def to_dict(self) -> dict[str, Any]:
        """Returns the config as plain data, the content of its file.

        Returns
        -------
        dict
            Mappings, lists, strings and numbers.

        Examples
        --------
        >>> config.to_dict()["d_model"]
        88
        """
        return to_plain(self)

    def to_yaml(self) -> str:
        """Returns the text of the config's .yaml file.

        Returns
        -------
        str
            YAML.

        Examples
        --------
        >>> print(config.to_yaml()[:15])
        vocab_size: 100
        """
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def save(self, path: str | Path) -> None:
        """Writes the config into a file.

        Parameters
        ----------
        path
            The file, JSON if its name ends in .json, else YAML.

        Examples
        --------
        >>> config.save("model.yaml")
        >>> gf.ModelConfig.from_file("model.yaml") == config
        True
        """
        path = Path(path)
        text = json.dumps(self.to_dict(), indent=2) if path.suffix == ".json" else self.to_yaml()
        path.write_text(text, encoding="utf-8")

    @classmethod
    def from_dict(cls, value: Any, where: str = "") -> ModelConfig:
        """Makes a config from plain data.

        Parameters
        ----------
        value
            Mappings, lists, strings and numbers, as `to_dict` gives them.
        where
            Name of the file, for messages.

        Returns
        -------
        ModelConfig
            The config.

        Raises
        ------
        RequestError
            With the field, the value, and what is expected.

        Examples
        --------
        >>> gf.ModelConfig.from_dict(config.to_dict()) == config
        True
        """
        return validated(cls, value, "config", where)

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Reads a config from a .yaml or .json file.

        Parameters
        ----------
        path
            The file.

        Returns
        -------
        ModelConfig
            The config.

        Raises
        ------
        RequestError
            For a file that is missing or damaged, and for fields that are wrong.

        Examples
        --------
        >>> config.save("model.json")
        >>> gf.ModelConfig.from_file("model.json").vocab_size
        100
        """
        tree = read_tree(path)
        with naming_imports(Path(path).parent):
            return cls.from_dict(tree, str(path))

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Returns the JSON Schema of config files, with all registered parts, for editors and forms.

        Returns
        -------
        dict
            The schema.

        Examples
        --------
        >>> "d_model" in gf.ModelConfig.json_schema()["properties"]
        True
        """
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
            """Returns a mapping for each choice, and the bare kinds of choices that need no field."""
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
        """Returns the fields in which two configs differ.

        Parameters
        ----------
        other
            The config to compare with.

        Returns
        -------
        dict of str to tuple
            Path of the field -> (value here, value in `other`); None for a missing field.

        Examples
        --------
        >>> gf.preset("gpt2").diff(gf.preset("gpt2+rmsnorm"))["stack.0.blocks.0.norm.kind"]
        ('layernorm', 'rmsnorm')
        """
        mine, theirs = flatten(self.to_dict()), flatten(other.to_dict())
        paths = [*mine, *(path for path in theirs if path not in mine)]
        return {path: (mine.get(path), theirs.get(path)) for path in paths if mine.get(path) != theirs.get(path)}


def stack_of(blocks: Sequence[BlockConfig]) -> tuple[Stage, ...]:
    """Returns the shortest stack of these blocks: a repeated pattern, with its first blocks added if some are left
    over; or runs of equal blocks."""
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


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Gives the parameters and buffers of a model on the meta device memory on `device`, unfilled, as `to_empty` does,
    whose first call imports torch's symbolic shapes for half a second."""
    model._apply(lambda outline: torch.empty(outline.shape, dtype=outline.dtype, device=device))


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens a tree to paths: {"a": {"b": [1]}} -> {"a.b.0": 1}."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    flat: dict[str, Any] = {}
    for key, value in items:
        path = f"{prefix}{key}"
        flat |= flatten(value, path + ".") if isinstance(value, (dict, list, tuple)) else {path: value}
    return flat


def first_difference(was: Any, now: Any, besides: Collection[str] = ()) -> tuple[str, Any, Any] | None:
    """Returns (path, old value, new value) of the first leaf that differs between two plain trees, where fields named
    in the last argument are ignored; None if the trees are equal."""
    old, new = (flatten({"": tree}) for tree in (was, now))
    for path in dict.fromkeys((*new, *old)):
        if old.get(path) != new.get(path) and not set(path.split(".")) & set(besides):
            return path.removeprefix("."), old.get(path), new.get(path)
    return None


def _descendants(cls: type[PartConfig]) -> Iterator[type[PartConfig]]:
    for child in cls.__subclasses__():
        yield child
        yield from _descendants(child)


# Text forms


def told(part: PartConfig) -> str:
    """Returns a part as short text: its kind, and the fields that differ from their defaults."""
    words = []
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if value != field.get_default(call_default_factory=True):
            said = told(value) if isinstance(value, PartConfig) else "none" if value is None else f"{value}"
            words.append(f"{name} {said}")
    return f"{part.kind} ({', '.join(words)})" if words else part.kind


# Reading of files from elsewhere


def _once(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """Returns a mapping of the pairs; raises ValueError for a key with two values, because one would silently be
    lost."""
    made: dict[Any, Any] = {}
    for key, value in pairs:
        if key in made and made[key] != value:
            raise ValueError(f"{shown(key)} is given twice")
        made[key] = value
    return made


class _NoAliases(yaml.SafeLoader):
    """Loader that refuses anchors: a small file must not expand into a large tree."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        _once([(key.value, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)])
        return super().construct_mapping(node, deep)


def read_tree(path: str | Path) -> Any:
    """Returns the plain tree in a .yaml or .json file. Raises RequestError."""
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
        raise RequestError(f"the file {path} is missing", code="missing", field=path.name, value=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        code: Code = "disk" if isinstance(error, OSError) else "syntax"
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{path} cannot be read ({reason})", code=code, field=path.name) from None
    except (ValueError, yaml.YAMLError, RecursionError, LookupError, AttributeError, TypeError) as error:
        reason = shown(error, 200)
        raise RequestError(
            f"{path} is not a valid {path.suffix.lstrip('.') or 'yaml'} file: {reason}", code="syntax", field=path.name
        ) from None


def validated(cls: Any, value: Any, what: str, where: str = "") -> Any:
    """Makes a `cls` from a plain tree. Every validation error becomes one sentence, which starts with `where` if
    given."""
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
