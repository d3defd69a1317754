"""A layer that is a copy of another is the one that would have been built in its place."""

from __future__ import annotations

from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import glassformer as gf
from glassformer.parts.core.base import BuildContext, Reference
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.module_template import ATOMS, ModuleTemplate
from glassformer.parts.norm import LayerNorm, NormConfig
from tests.test_generic import CURES, ENCODERS, EXPERTS, MATRIX, PUBLISHED, RECURRENT, Case

EVERY = [*MATRIX[::5], *PUBLISHED, *CURES, *EXPERTS, *RECURRENT, *ENCODERS]


def told(value: Any, names: dict[int, str]) -> Any:
    """Returns a value as comparable data, other modules and tensors by their names."""
    if id(value) in names:
        return names[id(value)]
    if isinstance(value, Tensor):
        return type(value), value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, dict):
        return type(value), [(key, told(one, names)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [told(one, names) for one in value]
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return value.__qualname__
    if isinstance(value, ATOMS):
        return value
    return type(value), told(dict(vars(value)), names) if hasattr(value, "__dict__") else repr(value)


def structure(module: nn.Module) -> list[Any]:
    names = {id(one): path for path, one in module.named_modules()}
    return [
        (path, type(one), {key: told(value, names) for key, value in vars(one).items()})
        for path, one in module.named_modules()
    ]


def mutable(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """Everything that can change in a module, however deep, but what is another's: layers may refer to one of them."""
    if isinstance(value, (*ATOMS, Reference)) or id(value) in seen:
        return
    seen[id(value)] = value
    if not isinstance(value, tuple):
        yield value
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
    for one in (*inner, *(vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ())):
        yield from mutable(one, seen)


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_a_copied_layer_is_the_one_that_would_be_built(case: Case):
    config = case.config()
    with torch.device("meta"):
        ctx = config.ctx  # which knows what layers share
        built = [block.build(ctx.at(layer)) for layer, block in enumerate(config.layers())]
        model = config.build(seed=None)
    assert [structure(layer) for layer in model.layers] == [structure(layer) for layer in built]


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_layers_share_nothing_that_can_change(case: Case):
    with torch.device("meta"):
        first, second, *_ = case.config().build(seed=None).layers
    kept = list(mutable(first, {}))
    both = {id(one) for one in kept} & {id(one) for one in mutable(second, {})}
    assert [one for one in kept if id(one) in both] == []


class Deep(nn.Module):
    """Module with every kind of member that a user's part may have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 2))
        self.tied, self.frozen = self.weight, nn.Parameter(torch.empty(2), requires_grad=False)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.long))
        self.inner = nn.Linear(2, 2)
        self.again = self.inner
        self.hidden = {"a list": [nn.Linear(1, 1)], "known": self.inner}
        self.register_forward_hook(lambda module, given, made: None)


def test_template_copy_keeps_shared_members_shared():
    with torch.device("meta"):
        deep = Deep()
        made: Any = ModuleTemplate(deep).make()
    assert structure(made) == structure(deep)
    assert made.tied is made.weight is not deep.weight and not made.frozen.requires_grad
    assert made.again is made.inner is made.hidden["known"] is not deep.inner
    assert made.hidden["a list"][0] is not deep.hidden["a list"][0]
    assert made.steps is not deep.steps and dict(made.named_buffers()).keys() == {"steps"}
    assert len(made._forward_hooks) == 1 and made._forward_hooks is not deep._forward_hooks


def test_a_part_that_asks_for_its_layer_is_built_for_each():
    class ByLayerConfig(NormConfig, kind="by_layer"):
        def build(self, ctx: BuildContext) -> LayerNorm:
            return LayerNorm(ctx.d_model, eps=1e-5 * (1 + ctx.layer))

        def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
            return Cost.weights(2 * ctx.d_model)

    config = gf.preset("gpt2@1m+layers=3")
    block = config.stack[0].blocks[0].replace(norm=ByLayerConfig())
    layers: Any = config.replace(stack=(config.stack[0].replace(blocks=(block,)),)).build(seed=0).layers
    assert [round(layer.residual.mixer_norm.eps * 1e5) for layer in layers] == [1, 2, 3]
