"""Memory of a training step at its moments, traced on fake tensors: shapes only, nothing is allocated.

Every distinct block runs once, between the embedding and the loss; a deep model is composed from these traces
(`planning/training.py`). Live storages are counted, as in torch's MemTracker.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from glassformer.config import BlockConfig, ModelConfig, Stage
from glassformer.parallel.layout import Layout
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel import AttentionCall, Kernel
from glassformer.parts.linear import GroupedLinear, linears
from glassformer.parts.mixer.attend import change_kernels


@dataclass(frozen=True)
class Moments:
    """Bytes that a part of the model (a layer, or head and loss) takes at its moments, without weights.

    kept      held from its forward pass to its backward pass, its output included
    forward   peak within the forward pass, beyond what was held before it
    backward  peak within the backward pass, beyond what was held before it; gradients of its weights count
    cached    autocast copies of its weights, held until the loss is done, beyond `kept`
    """

    kept: int
    forward: int
    backward: int
    cached: int = 0


@dataclass(frozen=True)
class Traced:
    embedding: Moments
    layers: tuple[Moments, ...]
    """Moments of each layer of the model."""
    loss: Moments
    """Moments of the final norm, the head and the loss together."""
    operations: int


class Living(TorchDispatchMode):
    """Counter of the bytes of live tensor storages: `now`, and the peak `most`; storages in `before` do not count."""

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._known: dict[int, weakref.ref[Any]] = {}
        for value in before:
            self.see(value)
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.operations += 1
        for value in tree_leaves(made):
            if isinstance(value, Tensor):
                self.see(value)
        return made

    now = most = operations = 0

    def see(self, value: Tensor) -> None:
        storage = value.untyped_storage()
        if (key := id(storage)) in self._known:
            return
        size = storage.nbytes()

        def gone(_: object) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)

    def mark(self) -> tuple[int, int]:
        """Returns (bytes now, peak since the previous mark)."""
        most, self.most = self.most, self.now
        return self.now, most


def faked(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces the weights of a model on the meta device by fake tensors on the CPU. Runs inside a FakeTensorMode."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                trained = weight.requires_grad
                module._parameters[name] = nn.Parameter(torch.empty(weight.shape, dtype=dtype), requires_grad=trained)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def recomputing(layer: nn.Module, recompute: str) -> None:
    """Makes the backward pass recompute a layer, by `torch.utils.checkpoint`: `full`, all of it; `selective`, all but
    matmuls and fused attention; `alternate`, every second matmul too."""
    if recompute == "none":
        return
    within, count = layer.forward, 0

    def keeps(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        nonlocal count
        count += operation in PRODUCTS
        kept = operation in ATTENTION or (operation in PRODUCTS and (recompute == "selective" or count % 2 == 1))
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(*args: Any) -> Any:
        nonlocal count
        count = 0
        if recompute == "full":
            return checkpoint(within, *args, use_reentrant=False)
        chosen = partial(create_selective_checkpoint_contexts, keeps)
        return checkpoint(within, *args, use_reentrant=False, context_fn=chosen)

    layer.forward = forward


def adapted(layer: nn.Module, rank: int) -> int:
    """Adds W' = W + B A to every linear layer of a block, A (rank, in), B (out, rank), and freezes all else (LoRA; Hu
    et al. 2021, 2106.09685); a fused matrix has an A for each of its parts. Returns the number of trained values.

    Routed experts have no adapters."""
    layer.requires_grad_(False)
    trained = 0
    maps: list[Any] = linears(layer)
    for module in maps:
        outs = module.outs
        weight = module.weight
        module.register_parameter("down_adapter", nn.Parameter(weight.new_empty(rank * len(outs), weight.shape[1])))
        module.up_adapters = nn.ParameterList([weight.new_empty(out, rank) for out in outs])
        trained += rank * sum(weight.shape[1] + out for out in outs)

        def forward(x: Tensor, linear: Any = module, within: Any = module.forward) -> Tensor:
            parts = F.linear(x, linear.down_adapter).split(rank, -1)
            made = [F.linear(part, up) for part, up in zip(parts, linear.up_adapters, strict=True)]
            return within(x) + torch.cat(made, -1)

        module.forward = forward
    return trained


@dataclass(frozen=True)
class MicrobatchShare:
    """Share of a microbatch that one rank computes: the divisions of experts, tokens and sequences.

    ep      number of ranks that divide the experts; the number of rows that a rank's experts read does not change,
            because they get the tokens of all these ranks
    slices  number of slices of the tokens, if tensor parallelism divides the residual stream by tokens: a rank's
            routed experts read one slice; shared experts, whose matrices are divided, read all tokens
    cp      number of pieces of a sequence: a rank has the queries of one piece, and the keys of all pieces if the
            kernel stores a value for every pair of a query and a key
    """

    ep: int = 1
    slices: int = 1
    cp: int = 1

    @classmethod
    def of(cls, layout: Layout) -> MicrobatchShare:
        return cls(layout.ep, layout.tp if layout.sp else 1, layout.cp)

    def cut(self, model: nn.Module) -> None:
        _spread(model, self.ep)
        for module in list(model.modules()):
            if self.slices > 1 and any(isinstance(child, GroupedLinear) for child in module.children()):
                _sliced(module, self.slices)
        if self.cp > 1:
            change_kernels(model, lambda kernel: AmongPieces(kernel, self.cp))


class AmongPieces(Kernel):
    """A kernel with the memory use of a rank that has the queries of one of `pieces` of a sequence. If the kernel
    stores a value for every pair of a query and a key, keys and values of all pieces are gathered, (b, p t, g, h);
    otherwise they go round the ranks, a piece at a time (Liu et al. 2023, 2310.01889). All pieces are copies of one
    piece, so the result has the correct size and no meaning."""

    name = "among_pieces"

    def __init__(self, within: Kernel, pieces: int) -> None:
        self.within, self.pieces = within, pieces

    def __call__(self, call: AttentionCall) -> Tensor:
        if call.index is None and self.within.has_pairs(call.facts):
            call = call.replace(k=torch.cat([call.k] * self.pieces, 1), v=torch.cat([call.v] * self.pieces, 1))
        return self.within(call)


def _sliced(experts: Any, slices: int) -> None:
    """Makes routed experts read one of `slices` slices of the tokens; shared experts, with their gate, read all
    tokens."""
    within, shared = experts.forward, getattr(experts, "shared", None)

    def forward(x: Tensor, pass_: Pass) -> Tensor:
        size = max(1, x.shape[1] // slices)
        if shared is not None:
            experts.shared = None
        own = Pass(0, size, ids=pass_.ids[..., :size])
        own.once("real", lambda: None if pass_.real is None else pass_.real[:, :size])
        y = within(x[:, :size], own)
        y = F.pad(y, (0, 0, 0, x.shape[1] - size))
        if shared is None:
            return y
        experts.shared = shared
        return y + experts.of_shared(x)

    experts.forward = forward


def _spread(model: nn.Module, ep: int) -> None:
    for module in model.modules():
        if isinstance(module, GroupedLinear):
            module.outs = module.outs[: len(module.outs) // ep]
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = nn.Parameter(weight[: len(weight) // ep], weight.requires_grad)


def trace(
    config: ModelConfig,
    batch: int,
    context: int,
    dtype: torch.dtype,
    products: torch.dtype,
    recompute: str = "none",
    rank: int = 0,
    pieces: MicrobatchShare = MicrobatchShare(),
) -> Traced:
    """Returns the traced memory of a step of `batch` sequences with weights in `dtype` and matmuls in `products` (by
    autocast if they differ); with a `rank`, only adapters are trained; `pieces` is the rank's share of the microbatch.

    A recurrence over tokens is traced at three short lengths and extrapolated by a parabola."""
    counted = Counter(config.layers())
    # two blocks of each kind, because the first one computes tensors that later ones share
    short = [block for block, n in counted.items() for _ in range(min(n, 2))]
    few = config.replace(stack=(Stage(blocks=tuple(short)),))
    found = _of_length(few, batch, context, dtype, products, recompute, rank, pieces)
    first = {block: short.index(block) for block in counted}
    met: set[BlockConfig] = set()
    layers = []
    for block in config.layers():
        layers.append(found.layers[first[block] + (block in met)])
        met.add(block)
    return Traced(found.embedding, tuple(layers), found.loss, found.operations)


TOKENS = (32, 64, 96)


def _of_length(config: ModelConfig, batch: int, context: int, *how: Any) -> Traced:
    if context <= TOKENS[-1]:
        return _trace(config, batch, context, *how)
    one, two = (_trace(config, batch, s, *how) for s in TOKENS[:2])
    if two.operations < 1.25 * one.operations:
        return _trace(config, batch, context, *how)
    three = _trace(config, batch, TOKENS[2], *how)

    def through(*parts: Moments) -> Moments:
        values = zip(*(astuple(part) for part in parts), strict=True)
        return Moments(*(round(float(np.polyval(np.polyfit(TOKENS, y, 2), context))) for y in values))

    layers = map(through, one.layers, two.layers, three.layers)
    return Traced(
        through(one.embedding, two.embedding, three.embedding),
        tuple(layers),
        through(one.loss, two.loss, three.loss),
        three.operations,
    )


@lru_cache(maxsize=512)
def _trace(
    config: ModelConfig,
    batch: int,
    context: int,
    dtype: torch.dtype,
    products: torch.dtype,
    recompute: str,
    rank: int,
    pieces: MicrobatchShare,
) -> Traced:
    model = config.outline().train()
    pieces.cut(model)
    for layer in model.layers:
        if rank:
            adapted(layer, rank)
        recomputing(layer, recompute)
    if rank:
        for part in (model.embedding, model.head, model.final_norm, model.encoder):
            if part is not None:
                part.requires_grad_(False)
    with FakeTensorMode():
        faked(model, dtype)
        tokens = torch.zeros(batch, context, dtype=torch.int64)
        targets = tokens[:, 0] if config.head.gives == "classes" else tokens  # one label per text
        living = Living([tokens, *model.parameters(), *model.buffers()])
        ahead: list[tuple[int, int]] = []
        back: list[tuple[int, int]] = []

        def leaves(_module: nn.Module, _given: Any, x: Tensor) -> None:
            """Marks the end of the embedding or of a layer in the forward pass, and the arrival of its gradient."""
            ahead.append(living.mark())
            (x if x.requires_grad else x.requires_grad_()).register_hook(lambda _grad: back.append(living.mark()))

        for part in (model.embed, *model.layers):
            part.register_forward_hook(leaves)
        source = tokens if model.encoder is not None else None
        with living:
            with torch.autocast("cpu", products) if products != dtype else nullcontext():
                loss = model.loss(tokens, targets, source=source)
            ahead.append(living.mark())
            loss.backward()
            back.append(living.mark())
    back.reverse()  # now `back` is in the order of the forward pass, as `ahead` is
    before = [0, *(now for now, _ in ahead)]
    began = [*(now for now, _ in back[1:]), ahead[-1][0]]
    moments = [
        Moments(kept=now - held, forward=most - held, backward=peak - start)
        for held, (now, most), start, (_, peak) in zip(before, ahead, began, back, strict=False)
    ]
    layers: list[Moments] = []
    for i, layer in enumerate(model.layers, 1):  # a layer leaves the gradients of its weights, and its cached copies
        gradients = sum(weight.numel() for weight in layer.parameters() if weight.requires_grad) * dtype.itemsize
        cached = back[i][0] - began[i] + moments[i].kept - gradients
        layers.append(replace(moments[i], kept=moments[i].kept - cached, cached=cached))
    ends = replace(moments[-1], kept=moments[-1].kept + sum(layer.cached for layer in layers))
    return Traced(moments[0], tuple(layers), ends, living.operations)
