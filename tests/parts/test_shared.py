"""Parameters that parts share, said at build: T5's way, one table of relative biases for all layers of a stack."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import glassformer as gf
from glassformer.config import ModelConfig, Stage
from glassformer.model import Model
from glassformer.parts.core.base import BuildContext, Reference
from glassformer.parts.core.cost import Cost, Shape
from glassformer.parts.core.init import Init
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel import NaiveConfig, ScoreBias
from glassformer.parts.position import AttentionPosition, AttentionPositionConfig

TOKENS = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))


class Table(nn.Module):
    """bias[n, min(q - k, buckets - 1)]"""

    def __init__(self, buckets: int, n_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(buckets, n_heads))

    def forward(self, n: Tensor, distance: Tensor) -> Tensor:
        return self.weight[distance.clamp(0, len(self.weight) - 1), n]

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        init.fill(self.weight, "embedding")


class Relative(AttentionPosition):
    def __init__(self, table: nn.Module | Reference):
        super().__init__()
        self.table = table

    def bias(self, pass_: Pass) -> ScoreBias:
        module: Any = self.table.module if isinstance(self.table, Reference) else self.table

        def bend(score: Tensor, b: Tensor, n: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
            return score + self.table(n, q_idx - k_idx)

        return ScoreBias(bend, True, "toy relative", (module.weight,))


class SharedRelativeConfig(AttentionPositionConfig, kind="toy_shared_relative"):
    buckets: int = 4

    def build(self, ctx: BuildContext) -> Relative:
        key = (type(self), self, ctx.n_heads)
        return Relative(ctx.shared(key, lambda: Table(self.buckets, ctx.n_heads)))

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        return Cost.once((type(self), self, ctx.n_heads), Cost.weights(self.buckets * ctx.n_heads))


class OwnRelativeConfig(AttentionPositionConfig, kind="toy_own_relative"):
    def build(self, ctx: BuildContext) -> Relative:
        return Relative(Table(4, ctx.n_heads))

    def costs(self, ctx: BuildContext, shape: Shape) -> Cost:
        return Cost.weights(4 * ctx.n_heads)


def config_of(position: AttentionPositionConfig, layers: int = 3) -> ModelConfig:
    config = gf.preset("llama@1m+d_model=32+heads=4+vocab_size=61+context=32+nope")
    (block,) = config.stack[0].blocks
    mixer = block.mixer.replace(position=position, kernel=NaiveConfig())
    return config.replace(stack=(Stage(repeat=layers, blocks=(block.replace(mixer=mixer),)),))


@pytest.fixture
def model() -> Model:
    model = config_of(SharedRelativeConfig()).build(seed=0)
    with torch.no_grad():
        table(model).normal_()
    return model


def table(model: Model) -> Tensor:
    return model.get_parameter("layers.0.mixer.position.table.weight")


def test_first_layer_owns_the_shared_table(model: Model):
    names = [name for name in model.state_dict() if "table" in name]
    assert names == ["layers.0.mixer.position.table.weight"]
    mixers: list[Any] = [layer.mixer for layer in model.layers]
    assert all(mixer.position.table.module is mixers[0].position.table for mixer in mixers[1:])
    assert len({id(mixer.qkv.weight) for mixer in mixers}) == 3
    own = config_of(OwnRelativeConfig()).build(seed=0)
    count = sum(p.numel() for p in own.parameters()) - sum(p.numel() for p in model.parameters())
    assert count == 2 * table(model).numel()
    for made, position in ((model, SharedRelativeConfig()), (own, OwnRelativeConfig())):
        assert config_of(position).num_params() == sum(p.numel() for p in made.parameters())


def test_shared_table_equals_separate_equal_tables(model: Model):
    """Outputs, and the gradient of the table is the sum of theirs."""
    own = config_of(OwnRelativeConfig()).build(seed=None)
    weights = model.state_dict()
    for i in (1, 2):
        weights[f"layers.{i}.mixer.position.table.weight"] = table(model).detach().clone()
    own.load_state_dict(weights)
    found, wanted = model(TOKENS), own(TOKENS)
    torch.testing.assert_close(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    parts = [own.get_parameter(f"layers.{i}.mixer.position.table.weight").grad for i in range(3)]
    torch.testing.assert_close(table(model).grad, torch.stack(parts).sum(0))  # type: ignore[arg-type]


def test_it_survives_copies_dtypes_and_files(model: Model, tmp_path: Path):
    full = model(TOKENS)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        table(model).zero_()
    torch.testing.assert_close(twin(TOKENS), full)  # the copy's layers share the copy's table
    with torch.no_grad():
        table(twin).zero_()
    torch.testing.assert_close(twin(TOKENS), model(TOKENS))
    twin.double()
    torch.testing.assert_close(twin(TOKENS).float(), model(TOKENS))
    with torch.no_grad():
        table(model).normal_()
    gf.save(model, None, tmp_path)
    loaded = gf.load(str(tmp_path)).model
    torch.testing.assert_close(loaded(TOKENS), model(TOKENS))
    assert len([name for name in loaded.state_dict() if "table" in name]) == 1


def test_a_model_on_meta_shares_too():
    """The initial weights of a seed are the same, whichever way the model is built."""
    outline = config_of(SharedRelativeConfig()).outline()
    assert all(p.is_meta for p in outline.parameters())
    first, second = (config_of(SharedRelativeConfig()).build(seed=3) for _ in range(2))
    for (name, one), other in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert table(first) is not table(second)


def test_tables_of_different_settings_are_not_shared():
    """Other keys: tables of 4 and of 5 rows, each shared by two layers."""
    four, five = (config_of(SharedRelativeConfig(buckets=n), 1).stack[0].blocks[0] for n in (4, 5))
    config = config_of(SharedRelativeConfig()).replace(stack=(Stage(repeat=2, blocks=(four, five)),))
    shapes = {name: len(value) for name, value in config.build().state_dict().items() if "table" in name}
    assert shapes == {f"layers.{i}.mixer.position.table.weight": rows for i, rows in ((0, 4), (1, 5))}


def test_asking_counts_as_asking_for_the_layer():
    """So that no copy of an owner is made."""
    ctx = gf.preset("llama@1m").ctx
    at = ctx.at(0)
    made: Callable[[Hashable], Any] = lambda key: at.within(n_heads=4).shared(key, nn.Identity)  # noqa: E731
    owner, other = made("a"), made("a")
    assert at.asked and not ctx.at(1).asked
    assert isinstance(owner, nn.Identity) and other.module is owner and made("b") is not owner
    assert ctx.at(1).shared("a", nn.Identity).module is owner  # type: ignore[union-attr]
