"""Initial weights depend on (seed, parameter name): any process draws any slice of any tensor without the rest."""

from __future__ import annotations

import hashlib
import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.naming import preset
from glassformer.parts.building import InitialWeights, fill
from glassformer.parts.core.init import BLOCK, Init, Numbers, by_role
from glassformer.parts.core.shard import piece_of, shards_of
from glassformer.parts.linear import GroupedLinear, Linear

TINY = "layers=2+d_model=32+heads=4+vocab_size=64+context=16"
MODELS = [
    f"llama+{TINY}+untied",
    f"gpt2+{TINY}",
    f"llama+{TINY}+gqa:2+moe:4:2+init=xavier",
    f"llama+{TINY}+mup+gqa:2",
    f"gpt2+{TINY}+sigmareparam+untied",
    f"gpt2+{TINY}+deepnorm",
    f"gpt2+{TINY}+qknorm:each_head+mixer.n_kv_heads=2",
    "mamba+layers=2+d_model=32+vocab_size=64+context=16",
    "mamba+layers=1+d_model=32+vocab_size=64+context=16+sigmareparam",
]


@cache
def begun(expression: str) -> tuple[ModelConfig, dict[str, Tensor], InitialWeights]:
    config = preset(expression)
    return config, dict(config.build(seed=3).state_dict()), config.initial_weights(seed=3)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[ModelConfig, dict[str, Tensor], InitialWeights]:
    return begun(request.param)


def test_owner_of_half_of_every_tensor_gets_the_initial_half(
    model: tuple[ModelConfig, dict[str, Tensor], InitialWeights],
):
    """Rows, which is what sharded data parallelism cuts, and columns of matrices."""
    _, whole, initial = model
    assert set(initial.tensors) == set(whole)
    for name, values in whole.items():
        n = len(values)
        for rows in (slice(0, n // 2), slice(n // 2, n)):
            assert torch.equal(initial.piece(name, rows), values[rows]), (name, rows)
        if values.dim() == 2:
            columns = slice(values.shape[1] // 2, None)
            assert torch.equal(initial.piece(name, columns=columns), values[:, columns]), name
            assert torch.equal(initial.piece(name, slice(1, 3), columns), values[1:3, columns]), name


@pytest.mark.parametrize("owners", [2])
def test_an_owner_draws_its_shard_of_every_map(owners: int):
    """The cuts that the parts declare: heads, channels, experts, tokens."""
    for expression in MODELS[:3]:
        _, whole, initial = begun(expression)
        shards = shards_of(initial.outline)
        for name, values in whole.items():
            index = torch.arange(values.numel()).view_as(values)
            for owner in range(owners) if values.dim() == 2 and name in shards else ():
                mine = piece_of(index, shards[name], owner, owners)
                rows, columns = mine[:, 0] // values.shape[1], mine[0] % values.shape[1]
                runs = rows.tensor_split((rows.diff() != 1).nonzero().flatten() + 1)
                across = slice(int(columns[0]), int(columns[-1]) + 1)
                pieces = [initial.piece(name, slice(int(run[0]), int(run[-1]) + 1), across) for run in runs]
                assert torch.equal(torch.cat(pieces), piece_of(values, shards[name], owner, owners)), name


def test_a_slice_is_drawn_without_the_rest(monkeypatch: pytest.MonkeyPatch):
    """A quarter of the experts, and a quarter of a table's rows, draw about a quarter of the numbers."""
    drawn = 0
    normal = Tensor.normal_

    def counted(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        nonlocal drawn
        drawn += self.numel()
        return normal(self, *args, **kwargs)  # type: ignore[arg-type]

    config = preset("llama+layers=2+d_model=256+heads=4+vocab_size=16384+context=16+moe:4:2+hidden=1024+untied")
    initial = config.initial_weights(seed=0)
    monkeypatch.setattr(Tensor, "normal_", counted)
    for name in ("embedding.weight", "layers.0.ffn.up_proj.weight", "layers.1.ffn.up_proj.weight"):
        n, d = initial.tensors[name].shape
        drawn = 0
        initial.piece(name, slice(n // 4, n // 2))
        assert n * d // 4 <= drawn <= n * d // 4 + 2 * BLOCK, name


@pytest.mark.parametrize("shape", [(7,), (5, 3), (1000, 700), (3, BLOCK + 5), (40, 1, 4)])
def test_initial_rows_do_not_depend_on_the_slice(shape: tuple[int, ...]):
    numbers = Numbers(0, "w", shape, 2.0)

    def rows(first: int, last: int) -> Tensor:
        return torch.cat([values for _, _, values in numbers.blocks(first, last)])

    whole = rows(0, shape[0])
    assert whole.shape == shape
    for first, last in ((0, 1), (1, shape[0]), (shape[0] // 2, shape[0]), (shape[0] - 1, shape[0])):
        assert torch.equal(rows(first, last), whole[first:last])


def test_numbers_have_their_distribution():
    """Moments, tails and independence of normal and uniform numbers, within four standard errors."""
    n = 1 << 20
    z = torch.cat([values for _, _, values in Numbers(0, "w", (1 << 10, 1 << 10), 0.5).blocks()]).flatten() / 0.5
    assert abs(z.mean()) < 4 / math.sqrt(n) and abs(z.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs(z.pow(4).mean() - 3) < 4 * math.sqrt(96 / n)
    assert abs((z > 1.959964).double().mean() - 0.025) < 4 * math.sqrt(0.025 * 0.975 / n)
    lags = (z[:-BLOCK] * z[BLOCK:]).mean(), (z[:-1] * z[1:]).mean()
    assert all(abs(lag) < 4 / math.sqrt(n - BLOCK) for lag in lags)  # one block and the next are independent
    u = torch.cat([values for _, _, values in Numbers(0, "w", (n,), 3.0, -1.0).blocks()])
    assert u.min() >= -1 and u.max() <= 2
    assert abs(u.mean() - 0.5) < 4 * math.sqrt(9 / 12 / n) and abs(u.var() - 9 / 12) < 0.01


def test_seeds_names_and_maps_have_different_numbers():
    config = preset(f"llama+{TINY}+moe:4:2")
    values = []
    for seed in (0, 1):
        for module in config.build(seed=seed).modules():
            if isinstance(module, Linear):
                values += [one.flatten()[:64] for one in module.weight.split(module.outs)]
    scaled = [one / one.std() for one in values]
    assert len(scaled) > 60
    for i, a in enumerate(scaled):
        assert all((a - b).abs().max() > 0.1 for b in scaled[:i])


def test_neither_depth_nor_order_changes_a_layer():
    """Rules that do not depend on the depth give a layer the same weights in a deeper model, and with another ffn."""
    init = "init=gpt2+init.depth_scaled=false"
    shallow = preset(f"llama+{TINY}+{init}").build(seed=5).state_dict()
    deep = preset(f"llama+{TINY}+layers=5+{init}").build(seed=5).state_dict()
    other = preset(f"llama+{TINY}+{init}+gelu").build(seed=5).state_dict()
    assert all(torch.equal(values, deep[name]) for name, values in shallow.items())
    kept = [name for name in shallow if ".ffn." not in name]
    assert all(torch.equal(shallow[name], other[name]) for name in kept)


def test_the_queries_of_a_fused_matrix_do_not_depend_on_its_keys():
    fused = [preset(f"llama+{TINY}{change}").build(seed=5).layers[0].mixer for change in ("", "+gqa:2")]
    assert torch.equal(fused[0].qkv.weight[:32], fused[1].qkv.weight[:32])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_rounds_the_same_numbers(dtype: torch.dtype):
    config = preset(MODELS[0])
    single = config.build(seed=3).state_dict()
    torch.set_default_dtype(dtype)
    try:
        model = config.build(seed=3).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {values.dtype for values in model.values()} == {dtype}
    assert all(torch.equal(values, single[name].to(dtype)) for name, values in model.items())


def test_threads_do_not_change_the_numbers():
    threads = torch.get_num_threads()
    found = []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            found.append(preset(MODELS[0]).build(seed=3).state_dict())
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(values, found[1][name]) for name, values in found[0].items())


def test_the_numbers_of_rule_2():
    """A change of these numbers requires a new `WEIGHTS_RULE`, so that comparisons do not mix the two."""
    weight = nn.Parameter(torch.empty(4, 4))
    holder = nn.Module()
    holder.register_parameter("weight", weight)
    holder.init_weights = lambda init: init.fill(weight, "hidden")  # type: ignore[assignment, method-assign]
    fill(holder, Init(by_role(1.0, 1.0), seed=0), "layers.0.ffn.up_proj")
    words = "2/0/layers.0.ffn.up_proj.weight@0/0"  # rule, seed, name and place in it, block
    seed = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little") >> 1
    expected = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=1e-6)


class Own(nn.Module):
    """A user's part: one drawn matrix, one that is changed after it is drawn, one by a generator."""

    def __init__(self, d: int):
        super().__init__()
        self.plain, self.centred, self.free = (nn.Parameter(torch.empty(d, d)) for _ in range(3))

    @torch.no_grad()
    def init_weights(self, init: Init) -> None:
        init.fill(self.plain, "hidden")
        init.fill(self.centred, "hidden")
        self.centred -= self.centred.mean()
        self.free.copy_(torch.empty(self.free.shape).exponential_(generator=init.generator))


def test_a_part_may_fill_its_weights_as_it_likes():
    """Weights that cannot be drawn by slices are made whole, then cut."""
    with torch.device("meta"):
        outline = nn.Sequential(Own(8), Own(8), nn.Linear(8, 8))
    whole = nn.Sequential(Own(8), Own(8), nn.Linear(8, 8))
    fill(whole, Init(seed=0))
    initial = InitialWeights(outline, Init(seed=0))
    assert set(initial._maps) == {"0.plain", "1.plain"}
    for name, values in whole.state_dict().items():
        assert torch.equal(initial.piece(name, slice(2, 5)), values[2:5]), name
    assert abs(whole[0].centred.mean()) < 1e-6  # type: ignore[arg-type]
    assert not torch.equal(whole[0].free, whole[1].free)  # type: ignore[arg-type]


def test_an_unknown_name_is_refused():
    with pytest.raises(RequestError) as raised:
        begun(MODELS[0])[2].piece("layers.9.mixer")
    assert (raised.value.code, raised.value.field) == ("unknown", "name")


def test_grouped_matrix_is_initialised_as_its_maps():
    """Each expert's map has the standard deviation of one map, not of the matrix stacked of all."""
    experts = GroupedLinear(4, 64, 32)
    for one in experts.weight.detach().split(experts.outs):
        assert abs(one.std() / math.sqrt(2 / (64 + 32)) - 1) < 0.1
