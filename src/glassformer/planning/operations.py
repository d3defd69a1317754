"""The operations of a training step and of a step of decoding, listed on fake tensors: nothing is computed."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from glassformer.config import ModelConfig
from glassformer.planning.trace import faked


class Call(NamedTuple):
    """An operation of ATen: those that are alike are one."""

    name: str
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the tensors of a product; none of other operations."""
    itemsize: int = 4
    """Bytes of a value of its operands."""
    flops: int = 0
    moved: int = 0
    """Bytes of the tensors that go in and come out."""


VIEW = Call("view")
"""Any operation that only gives memory another shape."""


class Listed(TorchDispatchMode):
    """Counts the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Call] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        out = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        if func.is_view:
            self.calls[VIEW] += 1
        elif out:  # what gives no tensor asks for a device or a layout, and fake tensors ask much
            counts = flop_registry.get(func.overloadpacket)
            flops = int(counts(*args, **(kwargs or {}), out_val=made)) if counts is not None else 0
            moved = sum(one.numel() * one.element_size() for one in (*given, *out))
            shapes = tuple(tuple(one.shape) for one in given) if flops else ()
            size = given[-1].element_size() if flops else 4
            self.calls[Call(func.overloadpacket.__name__, shapes, size, flops, moved)] += 1
        return made


@lru_cache(maxsize=64)
def calls_of_step(config: ModelConfig, batch: int, context: int, products: torch.dtype) -> dict[Call, int]:
    """Operations of a forward and a backward pass, products in this dtype by autocast."""
    model = config.outline().train()
    with FakeTensorMode():
        faked(model, torch.float32)
        tokens = torch.zeros(batch, context, dtype=torch.int64)
        with Listed() as ran:
            with torch.autocast("cpu", products) if products != torch.float32 else nullcontext():
                loss = model.loss(tokens, tokens, source=tokens if model.encoder is not None else None)
            loss.backward()
    return dict(ran.calls)


@lru_cache(maxsize=64)
def calls_of_token(config: ModelConfig, batch: int, context: int) -> dict[Call, int]:
    """Operations of a step of decoding at the end of `context` tokens, of a source as long too, in fp32."""
    model = config.outline().eval()
    with FakeTensorMode(), torch.no_grad():
        faked(model, torch.float32)
        token = torch.zeros(batch, 1, dtype=torch.int64)
        if model.encoder is None:
            state = model.init_state(batch, context)
        else:  # the source is read before
            state = model.init_state(batch, context, memory_len=context)
            model(token, state, source=token.expand(batch, context))
        state.seek(context - 1)
        with Listed() as ran:
            model(token, state)
    return dict(ran.calls)
