"""`Block` joins a mixer and a feed-forward network; `Model` stacks blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from glassformer.errors import RequestError, check_whole
from glassformer.parts.core import auxiliary
from glassformer.parts.core.owner import Spread
from glassformer.parts.core.site import Site, unseen
from glassformer.parts.embedding import Embedding
from glassformer.parts.forward_pass import Along, Memory, Pass, position_in_document
from glassformer.parts.fused_products import FusedPart, serve, through
from glassformer.parts.head import Head
from glassformer.parts.loss import rows_with_targets
from glassformer.parts.mixer import Mixer
from glassformer.parts.residual import Residual
from glassformer.parts.residual.base import PartBranch, fused_parts, only
from glassformer.parts.state import ModelState, State

STATE_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8)
"""Dtypes in which a decode state can be stored"""


@dataclass(frozen=True)
class Inputs:
    """Arguments of a model's call as one value; `Model.forward` explains them."""

    tokens: Tensor
    state: ModelState | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None
    memory: Memory | None = None
    source: Tensor | None = None
    source_documents: Tensor | None = None
    global_tokens: Tensor | None = None
    segments: Tensor | None = None


class Block(nn.Module):
    """One layer: x (b, s, d) -> x (b, s, d). `residual` defines how mixer and ffn are added to the residual stream.

    Sites: resid_pre, resid_mid (if the wiring has one), resid_post.
    """

    def __init__(self, mixer: Mixer, ffn: nn.Module | None, residual: Residual):
        super().__init__()
        self.resid_pre = Site()
        self.mixer, self.ffn, self.residual = mixer, ffn, residual
        self.resid_post = Site()

    def forward(self, x: Tensor, pass_: Pass, state: State | None = None) -> Tensor:
        mixer = PartBranch(self.mixer, pass_, state)
        ffn = None if self.ffn is None else PartBranch(self.ffn, pass_)
        return self.resid_post(self.residual(self.resid_pre(x), mixer, ffn))

    def parts(self, x: Tensor, pass_: Pass) -> list[FusedPart] | None:
        """Returns the fused parts that one after another compute this layer for a tensor like x; None if it has further
        parts, or if its values are observed."""
        sites = type(self.resid_pre) is type(self.resid_post) is Site
        if not sites or Block.forward is not _FORWARD or not unseen(self):
            return None
        ffn = None if self.ffn is None else PartBranch(self.ffn, pass_)
        return fused_parts(self.residual, x, PartBranch(self.mixer, pass_), ffn)


_FORWARD = Block.forward  # a program may replace it


class Tower(nn.Module):
    """tokens (b, s) -> x (b, s, d): embedding -> layers -> final_norm?. An encoder, and a model without its head.

    Sites: embed, the layers' sites, final_norm (its output).
    """

    sequence: Spread | None = None
    """Division of the stream's tokens among tensor-parallel owners between the branches (`parts/core/owner.py`). If
    None, each owner has all tokens."""
    context: Along | None = None
    """Division of a sequence's tokens among processes, from the first layer to the loss, in calls without a state. If
    None, each process has all tokens."""

    def __init__(self, embedding: Embedding, layers: list[Block], final_norm: nn.Module | None):
        super().__init__()
        self.embedding = embedding
        self.embed = Site()
        self.layers = nn.ModuleList(layers)
        self.final_norm = final_norm
        self.final = Site(name="final_norm")

    @property
    def causal(self) -> bool:
        """True if no token of any layer depends on later ones."""
        mixers: list[Any] = [layer.mixer for layer in self.layers]
        networks: list[Any] = [layer.ffn for layer in self.layers]
        return all(mixer.causal for mixer in mixers) and all(ffn is None or ffn.causal for ffn in networks)

    @property
    def takes_prefix(self) -> bool:
        """True if the caller may name a prefix whose tokens attend to each other and everything else is causal."""
        mixers: list[Any] = [layer.mixer for layer in self.layers]
        networks: list[Any] = [layer.ffn for layer in self.layers]
        reads_on = all(mixer.causal or mixer.takes_prefix for mixer in mixers)
        return (
            any(mixer.takes_prefix for mixer in mixers)
            and reads_on
            and all(ffn is None or ffn.causal for ffn in networks)
        )

    @property
    def settled(self) -> int | None:
        """Largest length of a text within which the position encodings stay the same; None if they always do. In a
        longer text, a state's keys have encodings that differ from the new ones."""
        mixers: list[Any] = [layer.mixer for layer in self.layers]
        given = [mixer.attention_position for mixer in mixers if mixer.attention_position is not None]
        lengths = [one.settled for one in given if one.settled is not None]
        return min(lengths) if lengths else None  # `min` without a default, which a compiler cannot trace

    @property
    def writes(self) -> bool:
        """True if the model can generate text: no token depends on later ones, except within a prompt that is read in
        one pass"""
        return self.causal or self.takes_prefix

    def read(
        self,
        tokens: Tensor,
        pass_: Pass,
        state: ModelState | None = None,
        table: Embedding | None = None,
        rows: Tensor | None = None,
    ) -> Float[Tensor, "b s d"]:
        """Returns the last layer's normalised output. A tied embedding reads its rows from `table`. With `rows` (n,),
        indices among the b s tokens, returns only their outputs, (1, n, d)."""
        if pass_.documents is not None:
            self._check_documents()
        if pass_.global_tokens is not None:
            self._check_globals(tokens, pass_.global_tokens)
        x = self.embed(self.embedding(tokens, pass_, table))
        states: Sequence[Any] = state.layers if state else [None] * len(self.layers)
        if self.context is not None and state is None:
            x, pass_, states = self.context.begin(x, pass_, len(self.layers))
        if self.sequence is not None:
            x = self.sequence.spread(x)
        *lower, (last, of_last) = zip(self.layers, states, strict=True)
        x = self._through(lower if rows is not None else [*lower, (last, of_last)], x, pass_)
        x = x if rows is None else self._of_rows(last, x, pass_, of_last, rows)
        x = x if self.final_norm is None else self.final_norm(x)
        return self.final(x if self.sequence is None else self.sequence.gather(x))

    @staticmethod
    def _through(layers: Sequence[tuple[Any, State | None]], x: Tensor, pass_: Pass) -> Tensor:
        """Returns the output of layers, each with its decode state or None. Layers in a row that are fused parts are
        computed together."""
        waiting: list[FusedPart] = []
        for layer, kept in layers:
            parts = layer.parts(x, pass_) if type(layer) is Block and kept is None and serve(x) else None
            if parts is None:
                x, waiting = layer(through(x, waiting), pass_, kept), []
            waiting += parts or ()
        return through(x, waiting)

    @staticmethod
    def _of_rows(layer: Any, x: Tensor, pass_: Pass, state: State | None, rows: Tensor) -> Tensor:
        """Returns a layer's output (1, n, d) for the tokens `rows` (n,) only. The ffn skips all other tokens if its
        result for one token does not depend on others and no hook or observer needs them."""
        ffn: Any = layer.ffn
        if not (ffn is None or ffn.by_token) or not unseen(layer):
            return only(layer(x, pass_, state), rows)
        return layer.residual.of_rows(x, partial(layer.mixer, pass_=pass_, state=state), ffn, rows)

    def _check_globals(self, tokens: Tensor, chosen: Tensor) -> None:
        """Raises RequestError if the shape differs from the tokens', or if no layer has global tokens."""
        if chosen.shape != tokens.shape:
            raise RequestError(
                f"global_tokens has the shape {tuple(chosen.shape)} and the tokens {tuple(tokens.shape)}; say of each "
                "token whether it is global",
                code="conflict", field="global_tokens", value=tuple(chosen.shape), expected=str(tuple(tokens.shape)),
            )  # fmt: skip
        mixers: list[Any] = [layer.mixer for layer in self.layers]
        if not any(mixer.takes_globals for mixer in mixers):
            raise RequestError(
                "global_tokens: no layer has global tokens of a caller's choice; a visibility of kind longformer with "
                "causal=false has",
                code="conflict", field="global_tokens", expected="None",
            )  # fmt: skip

    def _check_documents(self) -> None:
        """Raises RequestError if a part lets one document see another."""
        for number, layer in enumerate(self.layers):
            parts: dict[str, Any] = {"mixer": layer.mixer, "ffn": layer.ffn}
            for name, part in parts.items():
                if part is not None and not part.separates_documents:
                    raise RequestError(
                        f"the {name} of layer {number} does not separate documents, so it takes neither packed nor "
                        "padded texts",
                        code="conflict", field="documents", value=f"layers.{number}.{name}",
                    )  # fmt: skip


class Model(Tower):
    """tokens (b, s) -> logits (b, s, v).

        embedding -> layers -> final_norm? -> head

    With an `encoder`: a tower that reads a source (b, t); layers with cross-attention attend to its output.

    Sites: embed, the layers' sites, final_norm (its output), logits; the encoder's sites as `encoder.layers.0.z`.
    """

    ends: tuple[int, ...] = ()
    """Ids of end tokens, where decoding stops; set when a model is loaded"""
    division: Any = None
    """Record of the division among tensor-parallel owners (`parallel/tensor.py`); if None, the model is whole"""

    def __init__(
        self,
        embedding: Embedding,
        layers: list[Block],
        final_norm: nn.Module | None,
        head: Head,
        config: Any = None,
        encoder: Tower | None = None,
    ):
        super().__init__(embedding, layers, final_norm)
        self.config = config
        self.head = head
        self.logits = Site("bsv")
        self.encoder = encoder

    def forward(
        self,
        tokens: Int[Tensor, "b s"] | Float[Tensor, "b c h w"] | Float[Tensor, "b s r"],
        state: ModelState | None = None,
        positions: Int[Tensor, "b s"] | None = None,
        documents: Int[Tensor, "b s"] | None = None,
        memory: Memory | None = None,
        targets: Int[Tensor, "b ..."] | None = None,
        reduction: str = "mean",
        source: Int[Tensor, "b t"] | Float[Tensor, "b c h w"] | None = None,
        source_documents: Int[Tensor, "b t"] | None = None,
        global_tokens: Bool[Tensor, "b s"] | None = None,
        segments: Int[Tensor, "b s"] | None = None,
    ) -> Tensor:
        """Returns logits (b, s, v) for the token after each position; with `targets`, their loss (see `loss`). A
        pooling head returns class logits (b, c) or vectors (b, d).

        With a `state`, the tokens continue its sequence, and the state advances; gradients flow only through the tokens
        of this call.

        `positions` replaces the default positions 0, 1, 2, ...: learned, sinusoidal and rotary encodings use them, and
        ALiBi's distances are between them; later calls continue from the last one. A window or a causal mask still
        depends on the order of the tokens only. `documents` gives the document id of each token: tokens of different
        ids do not attend to each other, and positions restart at each run of equal ids. Padding has id 0; padding
        tokens do not count in the load of experts, nor do tokens after the last counted target of a row. `memory` is
        another sequence for layers that read one (`cross_attention`). A state keeps it: later calls with that state
        omit it. `source` is the text that an encoder turns into `memory`, and `source_documents` the document ids of
        its tokens: 0 for padding, otherwise the id of the tokens that read it, if `documents` are given.
        `global_tokens` is a mask of tokens that all tokens of their document see and that see all of it, in layers
        whose visibility has global tokens (a bidirectional `longformer`), instead of the first ones of each document.
        `segments` gives the kind of text of each token, for models that distinguish them (BERT's token types). A model
        whose embedding has `patches` reads images (b, c, h, w) instead of tokens, one with `vectors` real vectors (b,
        s, r).
        """
        given = Inputs(tokens, state, positions, documents, memory, source, source_documents, global_tokens, segments)
        along = self.context if state is None else None
        if targets is None:
            logits = self.logits(self.unembed(self.states_of(given), documents))
            return logits if along is None else along.join(logits)
        rows = self._rows_read(tokens, targets, reduction)
        with auxiliary.gathering() as added:
            x = self.states_of(given, targets, rows)
        if rows is not None:
            targets = targets.flatten()[rows][None]

        def loss_of(x: Tensor, targets: Tensor, reduction: str) -> Tensor:
            if self.logits.watched:
                return self.head.loss_of(self.logits(self.unembed(x, documents)), targets, reduction)
            return self.head(x, self.embedding, targets, reduction, documents)

        if along is not None:
            return along.loss(loss_of, x, targets, reduction, added)
        return auxiliary.join(loss_of(x, targets, reduction), added)

    if TYPE_CHECKING:  # nn.Module declares that a call returns Any
        __call__ = forward

    def _rows_read(self, tokens: Tensor, targets: Tensor, reduction: str) -> Tensor | None:
        """Returns the indices (n,), among the b s tokens, of the vectors that a loss needs; None for all of them."""
        above = (self.final_norm, self.final, self.head, self.logits)
        each = targets.shape == self.embedding.places(tokens).shape[:2]  # the loss refuses other shapes
        shared = self.sequence is not None or self.context is not None
        if shared or self.head.pool is not None or reduction != "mean" or not each:
            return None
        return rows_with_targets(targets) if all(map(unseen, filter(None, above))) else None

    def loss(
        self,
        tokens: Int[Tensor, "b s"] | Float[Tensor, "b c h w"] | Float[Tensor, "b s r"],
        targets: Int[Tensor, "b ..."],
        documents: Int[Tensor, "b s"] | None = None,
        reduction: str = "mean",
        **given: Any,
    ) -> Tensor:
        """Returns the mean cross-entropy in nats; targets of -100 do not count. `reduction="none"` gives losses (b, s).
        Other arguments are as in `forward`.

        In training, the result includes the head's own term (`head.z_loss`); the terms of other parts (`balance_loss`
        of experts) are included only in its gradient. The call goes through `forward`, so the model's hooks run."""
        return self(tokens, documents=documents, targets=targets, reduction=reduction, **given)

    def hidden_states(self, tokens: Tensor, *given: Any, **named: Any) -> Float[Tensor, "b s d"]:
        """Returns the last layer's normalised output, the input of the head. Arguments as in `forward`."""
        return self.states_of(Inputs(tokens, *given, **named))

    def states_of(
        self, given: Inputs, targets: Tensor | None = None, rows: Tensor | None = None
    ) -> Float[Tensor, "b s d"]:
        """Returns `hidden_states` for the arguments as one value. In a causal model, `targets` show which tokens no
        loss depends on; `rows` as in `read`."""
        tokens, state, source = given.tokens, given.state, given.source
        pass_ = locate(self.embedding.places(tokens), given)
        if targets is not None and targets.shape == tokens.shape and self.causal:
            pass_.targets = targets
        if given.global_tokens is not None and pass_.start:
            raise RequestError(
                f"global_tokens belong to a text's start, and the state has read {pass_.start} tokens; leave them out",
                code="conflict", field="global_tokens", expected="None",
            )  # fmt: skip
        self.check_source(len(tokens), state, given.memory, source)
        pass_.memory = given.memory if source is None else self.encode(source, given.source_documents)
        x = self.read(tokens, pass_, state, rows=rows)
        if state is not None:
            state.advance(pass_.start + pass_.tokens, pass_.tokens)
        return x

    @property
    def reads_by_layer(self) -> bool:
        """True if `states_by_layer` can compute its hidden states: no encoder, and no tokens shared among owners."""
        return self.encoder is None and self.sequence is None

    def states_by_layer(self, tokens: Tensor, state: ModelState) -> Iterator[Float[Tensor, "b s d"]]:
        """Computes `hidden_states(tokens, state)` in pieces, with the same bits: yields the residual stream after each
        layer, and last the hidden states, once the state has read the tokens."""
        pass_ = locate(self.embedding.places(tokens), Inputs(tokens, state))
        x = self.embed(self.embedding(tokens, pass_, None))
        for layer, kept in zip(self.layers, state.layers, strict=True):
            x = layer(x, pass_, kept)
            yield x
        x = self.final(x if self.final_norm is None else self.final_norm(x))
        state.advance(pass_.start + pass_.tokens, pass_.tokens)
        yield x

    def encode(
        self,
        source: Int[Tensor, "b t"] | Float[Tensor, "b c h w"],
        documents: Int[Tensor, "b t"] | None = None,
        global_tokens: Bool[Tensor, "b t"] | None = None,
    ) -> Memory:
        """Returns the encoder's output for a source, to be passed as `memory`. `documents` are 0 at padding,
        `global_tokens` as in `forward`."""
        self.check_source(len(source), source=source)
        assert self.encoder is not None
        places, limit = self.encoder.embedding.places(source), self.encoder.embedding.limit
        length = places.shape[1]
        if length == 0 or (limit is not None and length > limit):
            most = "" if limit is None else f" and at most {limit}"
            raise RequestError(
                f"the source has {length} tokens; give at least one{most}",
                code="range", field="source", value=length, expected=f"at least 1 token{most}",
            )  # fmt: skip
        pass_ = locate(places, Inputs(source, documents=documents, global_tokens=global_tokens))
        return Memory(self.encoder.read(source, pass_, table=self.embedding), documents)

    def check_source(
        self, rows: int, state: ModelState | None = None, memory: Memory | None = None, source: Any = None
    ) -> None:
        """Raises RequestError if an encoder has no input, if the number of texts differs from `rows`, or if a source is
        given to a model without an encoder."""
        if source is not None and self.encoder is None:
            raise RequestError(
                "this model has no encoder, so it takes no source; give the text as tokens",
                code="conflict", field="source", expected="None",
            )  # fmt: skip
        if source is not None and len(source) != rows:
            raise RequestError(
                f"the source has {len(source)} rows and the tokens have {rows}; give a source for each row",
                code="conflict", field="source", value=len(source), expected=str(rows),
            )  # fmt: skip
        if self.encoder is not None and _needs_source(source, memory, state):
            raise RequestError(
                "this model reads a source in addition to its text: give source=(b, t) token ids",
                code="missing", field="source", expected="token ids (b, t)",
            )  # fmt: skip

    def reading(self, source: Int[Tensor, "1 t"] | Float[Tensor, "1 c h w"]) -> Model:
        """Returns this model, with the same weights and sites, and with a default source for all calls that give none,
        row for row: for readings and loops that pass only tokens. Raises RequestError if the model reads no source."""
        self.check_source(len(source), source=source)
        return _Reading(self, source)

    def unembed(self, x: Float[Tensor, "b s d"], documents: Int[Tensor, "b s"] | None = None) -> Tensor:
        """Returns logits (b, s, v) of hidden states. These do not pass the site `logits`, which only `forward` does. A
        pooling head takes the tokens of a row's first document."""
        return self.head(x, self.embedding, documents=documents)

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def _repr_html_(self) -> str | None:
        """Returns, for a notebook, the table of the config; None without a config."""
        return None if self.config is None else self.config._repr_html_()

    def init_state(
        self,
        batch: int,
        max_len: int,
        dtype: torch.dtype | None = None,
        rewind: int = 0,
        device: Any = None,
        memory_len: int = 0,
    ) -> ModelState:
        """Returns an empty decode state for `batch` sequences of at most `max_len` tokens, in the weights' dtype.

        `dtype` may be narrower: bf16, or int8 with a scale for each vector; sums of a recurrence stay in fp32.
        `rewind`: number of tokens that `truncate` can remove from a full window, or from a recurrence. `device` is by
        default the weights'; on "meta" nothing is allocated, and `nbytes` gives the size. `memory_len`: tokens of
        another sequence, for layers that read one."""
        whole = {"batch": (batch, 1), "max_len": (max_len, 1), "rewind": (rewind, 0), "memory_len": (memory_len, 0)}
        for name, (value, least) in whole.items():
            check_whole(name, value, least)
        dtype, device = dtype or self.dtype, device or self.device
        if dtype not in STATE_DTYPES:
            *most, last = map(str, STATE_DTYPES)
            raise RequestError(
                f"dtype={dtype} cannot keep a state; use {', '.join(most)} or {last}",
                code="unsupported", field="dtype", value=str(dtype),
            )  # fmt: skip
        limit = self.embedding.limit
        if limit is not None and max_len > limit:
            raise RequestError(
                f"max_len={max_len} is past this model's learned positions, which end at {limit}",
                code="range", field="max_len", value=max_len,
            )  # fmt: skip
        mixers: list[Any] = [layer.mixer for layer in self.layers]
        layers = [mixer.init_state(batch, max_len, dtype, device, rewind) for mixer in mixers]
        for layer in layers:
            if memory_len and layer is not None:
                layer.reserve(memory_len)
        return ModelState(layers, batch, max_len, rewind)


class _Reading(Model):
    """A model with a default source; everything else is shared with the original model."""

    source: Tensor

    def __init__(self, model: Model, source: Tensor):
        vars(self).update(vars(model), source=source)

    def states_of(self, given: Inputs, *rest: Any) -> Tensor:
        if _needs_source(given.source, given.memory, given.state):
            given = replace(given, source=self.source.expand(len(given.tokens), *self.source.shape[1:]))
        return super().states_of(given, *rest)


def _needs_source(source: Tensor | None, memory: Memory | None, state: ModelState | None) -> bool:
    """Returns True if the encoder has no input and no state has read a source."""
    return source is None and memory is None and (state is None or not state.length)


def locate(tokens: Tensor, given: Inputs) -> Pass:
    """Returns the pass of the new tokens (b, s), which come after those that the state has read."""
    pass_ = _placed(tokens, given.state, given.positions, given.documents)
    pass_.global_tokens, pass_.segments = given.global_tokens, given.segments
    return pass_


def _placed(tokens: Tensor, state: ModelState | None, positions: Tensor | None, documents: Tensor | None) -> Pass:
    start = state.length if state is not None else 0
    end = start + tokens.shape[1]
    given = None if positions is None else positions.expand(tokens.shape)
    if state is None:
        if documents is not None and positions is None:
            positions = position_in_document(documents)
        return Pass(start, end, tokens.device, positions, documents, given=given)
    if end > state.max_len:
        raise RequestError(
            f"the state holds {state.max_len} tokens and {end} were given; make it with max_len={end} or more",
            code="range", field="state.max_len", value=state.max_len,
        )  # fmt: skip
    if state.rows is not None and documents is None:
        if given is not None:
            raise RequestError(
                "rows that continue from different lengths count positions separately; leave positions out",
                code="conflict", field="positions",
            )  # fmt: skip
        return Pass(start, state.seen or end, tokens.device, positions, rows=state.rows, tokens=tokens.shape[1])
    if positions is None and documents is None and state.positions is not None and start:  # count from the last
        positions = state.positions[:, start - 1 : start] + torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    if documents is None and state.documents is not None:  # a row continues its last document
        documents = state.documents[:, start - 1 : start].expand_as(tokens)
    if documents is not None:
        documents = state.record_documents(documents)
        if positions is None:
            positions = position_in_document(documents)[:, start:]
    if positions is not None and (given is not None or state.positions is not None):
        slots = torch.arange(start, device=tokens.device)
        before = slots if documents is None else position_in_document(documents)[:, :start]
        given = state.record_positions(positions, before)
    return Pass(start, end, tokens.device, positions, documents, given=given)
