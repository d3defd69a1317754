"""A model shared by several ranks against the same model in one process, in fp64."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from glassformer import generation
from glassformer.dynamics.weights import named_matrices, pulse, spectra
from glassformer.errors import RequestError
from glassformer.introspection import capture, edit
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parallel import tensor as tp
from glassformer.parallel.apply import Ranks
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.parallel.seams import Group, Seams
from glassformer.parts.core.owner import Owner, Vocabulary
from glassformer.parts.core.shard import Shard, piece_of, regions
from glassformer.parts.ffn.mlp import Mlp
from glassformer.parts.forward_pass import Pass
from glassformer.parts.linear import Linear
from tests.parallel.threads import as_threads
from tests.plugin import toy_parts  # noqa: F401  # parts from outside the package
from tests.quick import quickly
from tests.test_generic import EVERY, Case

VOCAB = 61
TINY = f"layers=2+d_model=32+heads=4+vocab_size={VOCAB}+context=16"
CLOSE = 1e-13

Curve = tuple[list[float], dict[str, Tensor]]


def draw(seed: int, b: int = 2, s: int = 11) -> tuple[Tensor, Tensor]:
    """Returns tokens (b, s) and targets (b, s), some targets ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, VOCAB, (b, s), generator=generator) for _ in range(2))
    return tokens, targets.masked_fill(torch.rand(b, s, generator=generator) < 0.2, -100)


def moved(weight: Tensor) -> Tensor:
    """No bias is zero and no norm is the identity."""
    values = torch.linspace(-1.0, 1.0, weight.numel(), dtype=torch.float64).view(weight.shape)
    return weight.double() + 0.05 * values.sin()


def trained(model: Model, steps: int, finish: Any = lambda model: None) -> list[float]:
    """Returns the losses of `steps` steps of AdamW."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1), []
    for step in range(steps):
        loss = model.loss(*draw(step % 2))
        optimizer.zero_grad()
        loss.backward()
        finish(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def begin(model: Model) -> Model:
    model.double().train()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(moved(weight))
    return model


@cache
def alone(expression: str, steps: int) -> Curve:
    model = begin(preset(expression).build(seed=0))
    losses = trained(model, steps)
    return losses, {name: weight.detach() for name, weight in model.named_parameters()}


def together(groups: ProcessGroups, expression: str, steps: int) -> Curve:
    """Trains by the ranks of tp, each with its pieces of weights that were moved whole; returns losses and weights."""
    config, group = preset(expression), groups.group("tp")
    model = tp.divide(begin(config.build(seed=0)), group, groups.layout.sp)
    losses = trained(model, steps, tp.sum_partial)
    return losses, {
        name: tp.division_of(model).join(name, weight.detach()) for name, weight in model.named_parameters()
    }


def compare(expression: str, layout: str, steps: int) -> tuple[float, float]:
    """Returns the largest difference of a loss in `steps` steps, and of a weight after them."""
    losses, weights = alone(expression, steps)
    of_losses, of_weights = [0.0], [0.0]
    for curve, found in as_threads(layout, lambda groups: together(groups, expression, steps)):
        of_losses += [abs(a - b) for a, b in zip(curve, losses, strict=True)]
        of_weights += [float((found[name] - weight).abs().max()) for name, weight in weights.items()]
    return max(of_losses), max(of_weights)


MODELS = {
    "llama": f"llama@1m+{TINY}+gqa:2+qknorm+bias+sinks",
    "gpt2": f"gpt2@1m+{TINY}+head.bias=true+z_loss=1e-3+head.smoothing=0.1",
    "bloom": f"bloom@1m+{TINY}+qknorm:each_head+softcap:20",
    "t5 bias": f"llama@1m+{TINY}+relbias+geglu+untied+parallel",
    "mamba": f"mamba@1m+{TINY.replace('+heads=4', '')}+mixer.norm_eps=1e-3",
    "latent": f"llama@1m+{TINY}+mla:12+mixer.q_rank=10",
    "experts": f"llama@1m+{TINY}+moe:4:2+ffn.n_shared=1",
    "retention": f"llama@1m+{TINY}+retention",
    "linear": f"gpt2@1m+{TINY}+linear_attention",
    "shared keys": f"llama@1m+{TINY}+share:2",
}
FAST = ("llama", "mamba")


@pytest.mark.parametrize("name", quickly(MODELS, lambda _, name: name in FAST))
@pytest.mark.parametrize("layout", ["tp=2", "tp=2,sp=1"])
def test_a_shared_model_learns_as_one_process(name: str, layout: str):
    """Two steps: the losses agree where the first gradient did, and the weights where the second did."""
    assert max(compare(MODELS[name], layout, 2)) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "tp=4", "tp=2,sp=1", "tp=4,sp=1"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "retention"])  # norms sums that may be near 0
def test_twenty_steps_are_those_of_one_process(name: str, layout: str):
    expression = MODELS[name].replace("gqa:2", "mha")
    of_losses, of_weights = compare(expression, layout, 20)
    assert of_losses < CLOSE
    assert of_weights < 1e-7  # of gradients that are zero but for rounding Adam makes steps


def test_unknown_parts_are_computed_whole_and_correctly():
    """None of the parts declares how an owner takes its share; the token table around them is still divided."""
    expression = f"llama@1m+{TINY}+ema+l1norm+sine"
    assert max(compare(expression, "tp=2,sp=1", 2)) < CLOSE
    division = tp.cut(preset(expression).outline(), Owner(0, 2)).division
    assert set(division.cuts) == {"embedding.weight", "head.weight"} & set(division.shapes)


class LouderMlp(Mlp):
    """Subclass that adds a mean over the hidden layer, which no owner has whole and the parent does not declare."""

    def forward(self, x: Tensor, pass_: Pass | None = None) -> Tensor:
        return super().forward(x) * (1 + self.up_proj(x).mean(-1, keepdim=True))


def test_subclass_is_cut_only_if_declared():
    model = preset(f"gpt2@1m+{TINY}").outline()
    layer: Any = model.layers[0]
    layer.ffn = LouderMlp(32, 128)
    cuts = tp.cut(model, Owner(0, 2)).division.cuts
    assert "layers.1.ffn.up_proj.weight" in cuts and "layers.0.ffn.up_proj.weight" not in cuts


def test_a_rank_draws_the_bits_of_its_pieces():
    config = preset(f"llama@1m+{TINY}+gqa:2+bias")
    weights = dict(config.build(seed=3).named_parameters())

    def drawn(groups: ProcessGroups) -> tuple[dict[str, Tensor], int]:
        model = Ranks(groups).build(config, 3, "cpu")
        found = {name: tp.division_of(model).join(name, weight.detach()) for name, weight in model.named_parameters()}
        return found, sum(weight.numel() for weight in model.parameters())

    for found, held in as_threads("tp=2", drawn):
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())
        assert held < 0.52 * sum(weight.numel() for weight in weights.values())


# Looking, editing, writing


def looked_at(model: Model, tokens: Tensor) -> dict[str, Tensor]:
    """Captures, an ablated head, and a text."""
    sites = ["*.q", "*.k", "*.pattern", "*.z", "*.hidden", "*.resid_mid", "*.out", "logits"]
    found = capture(model, tokens, sites)
    found["one head"] = capture(model, tokens, "layers.1.mixer.pattern", heads=3)["layers.1.mixer.pattern"]

    def without(z: Tensor) -> Tensor:
        z[:, :, 3] = 0
        return z

    with edit(model, {"layers.0.mixer.z": without}), torch.no_grad():
        found["ablated"] = model(tokens)
    with edit(model, {"layers.1.mixer.pattern": lambda pattern: pattern.roll(1, 1)}), torch.no_grad():
        found["heads exchanged"] = model(tokens)
    found["written"] = generation.generate(model, tokens[:1, :4], max_new_tokens=6, temperature=0)
    return {name: value.detach() for name, value in found.items()}


@pytest.mark.parametrize("layout", ["tp=2", "tp=2,sp=1"])
def test_captures_edits_and_tokens_equal_one_process(layout: str):
    expression, tokens = f"llama@1m+{TINY}+gqa:2", draw(0)[0]
    whole = looked_at(preset(expression).build(seed=0).double().eval(), tokens)

    def work(groups: ProcessGroups) -> dict[str, Tensor]:
        model = Ranks(groups).build(preset(expression), 0, "cpu").double().eval()
        return looked_at(model, tokens)

    for found in as_threads(layout, work):
        assert found.keys() == whole.keys()
        for name, value in whole.items():
            assert found[name].shape == value.shape, name
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", quickly(MODELS, lambda _, name: name in ("llama", "experts")))
def test_the_monitor_sees_whole_matrices(name: str):
    """Norms and spectra of weights and gradients, head by head, are those of one process."""

    def seen(model: Model) -> dict[str, Any]:
        model.loss(*draw(0)).backward()
        if model.division is not None:
            tp.sum_partial(model)
        matrices = named_matrices(model)
        return {**pulse(matrices), **spectra(matrices)}

    whole = seen(begin(preset(MODELS[name]).build(seed=0)).float())

    def work(groups: ProcessGroups) -> dict[str, Any]:
        return seen(tp.divide(begin(preset(MODELS[name]).build(seed=0)).float(), groups.group("tp")))

    for found in as_threads("tp=2", work):
        assert found.keys() == whole.keys()
        for statistic, places in whole.items():
            assert found[statistic].keys() == places.keys(), statistic
            for where, values in places.items():
                assert found[statistic][where] == pytest.approx(values, rel=1e-4, abs=1e-7), (statistic, where)


# What cannot be shared


@pytest.mark.parametrize(
    ("change", "tp_", "message"),
    [
        ("gqa:2", 4, "tp=4 does not divide n_kv_heads=2; use 1 or 2"),
        ("heads=4", 3, "tp=3 does not divide n_heads=4; use 1, 2 or 4"),
        ("ffn.hidden=90", 4, "tp=4 does not divide hidden=90; use 2, 3, 5 or 6"),
        ("qknorm:full", 2, "tp=2: qknorm:full norms the values of all heads at once; use tp=1"),
        ("sigmareparam", 2, "tp=2: reparam makes a matrix of the whole one; use tp=1"),
        ("mixer.dropout=0.1", 2, "tp=2: mixer.dropout would drop other weights of the pattern"),
        ("retention+mixer.norm=all", 2, "tp=2: mixer.norm norms the values of all heads at once; use tp=1"),
    ],
)
def test_tensor_parallelism_refuses_unfit_models(change: str, tp_: int, message: str):
    with pytest.raises(RequestError) as raised:
        tp.check(preset(f"llama@1m+{TINY}+{change}"), tp_)
    assert str(raised.value).startswith(message)
    tp.check(preset(f"llama@1m+{TINY}+{change}"), 1)


# Cutting


@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["column", "replicated"])), min_size=1, max_size=3),
    st.integers(1, 4), st.integers(1, 3), st.sampled_from(["maps", "row", "vocab"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_regions_of_all_owners_are_the_parameter(
    maps: list[tuple[int, Any]], owners: int, width: int, kind: str
) -> None:
    """Each value is in one owner's part, or in every owner's if the map is on every rank."""
    if kind == "maps":
        cuts = tuple(Shard(cut, rows=units * owners) for units, cut in maps)
        values = torch.arange(sum(cut.rows or 0 for cut in cuts) * width).view(-1, width)
    else:
        cuts = (Shard(kind),)  # type: ignore[arg-type]
        values = torch.arange((width + owners) * (owners * len(maps))).view(width + owners, -1)
    count = torch.zeros_like(values)
    for owner in range(owners):
        part, row = piece_of(values, cuts, owner, owners), 0
        for region in regions(values.shape, cuts, owner, owners):
            there = tuple(slice(*span) for span in region)
            rows = region[0][1] - region[0][0]
            assert torch.equal(values[there], part[row : row + rows])
            count[there] += 1
            row += rows
        assert row == len(part)
    wanted = torch.ones_like(values)
    for cut, rows in zip(cuts, wanted.split([cut.rows or len(values) for cut in cuts]), strict=True):
        if cut.cut == "replicated":
            rows.fill_(owners)
    assert torch.equal(count, wanted)


def test_gather_undoes_spread_and_each_is_the_others_gradient():
    """Sizes do not divide by the ranks, down to a rank with nothing."""

    def work(groups: ProcessGroups) -> None:
        seams = Seams(Group(groups.group("tp")))
        for size in (1, 3, 4, 7):
            x = torch.arange(2.0 * size * 3).view(2, size, 3).requires_grad_()
            own = seams.spread(x, 1)
            assert torch.equal(seams.join(own, 1, size), x)
            torch.testing.assert_close(torch.autograd.grad(own.square().sum(), x)[0], 2 * x)  # each its own part
            held = own.detach().requires_grad_()
            back = torch.autograd.grad((seams.gather(held, 1, size) * (groups.rank + 1)).sum(), held)[0]
            assert torch.equal(back, torch.full_like(held, 3.0))  # 1 + 2, from two ranks
            part = seams.scatter(x * (groups.rank + 1), 1)
            assert torch.equal(part, 3 * own)

    as_threads("tp=2", work)


# Mutations: each mistake in the plan shows


def whole_rows(values: Tensor, shards: tuple[Shard, ...], owner: int, owners: int) -> Tensor:
    """Plain row sharding: half of [W_Q; W_K; W_V] is not half of each."""
    return shards[0].piece(values, owner, owners) if len(shards) == 1 else values.chunk(owners)[owner]


def mean(group: Group, x: Tensor) -> Tensor:
    return Group._reduced(group, x, torch.distributed.ReduceOp.SUM) / group.of


def no_partial(model: nn.Module) -> None:
    """The gradients of what every rank has are left as they are."""


def swapped(self: Shard) -> int:
    """Rows for columns."""
    return 0 if self.cut == "row" else 1


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "rows for columns": (Shard, "axis", property(swapped)),
    "plain row sharding of q|k|v": (tp, "piece_of", whole_rows),
    "a mean for a sum": (Group, "summed", mean),
    "no sum of the shared weights' gradients": (tp, "sum_partial", no_partial),
    "enter left out": (Seams, "enter", lambda self, x: x),
    "leave left out": (Seams, "leave", lambda self, x: x),
    "the gradient of leave summed": (Seams, "leave", Seams.mix),
    "the gradient of a sum inside a branch not summed": (Seams, "mix", Seams.leave),
    "a gathered value's gradient not summed": (Seams, "gather", Seams.join),
    "a token taken for another owner's": (Vocabulary, "here", lambda self, t: (t % (self.last - self.first), t >= 0)),
    "the largest logit of one owner": (Group, "largest", lambda self, x: x * (1 + self.number)),
}
NEEDS = {"a gathered value's gradient not summed": "tp=2,sp=1"}
OF_MAMBA = {"the gradient of a sum inside a branch not summed"}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_in_the_plan_shows(name: str, monkeypatch: pytest.MonkeyPatch):
    where, what, instead = MUTATIONS[name]
    expression = MODELS["mamba" if name in OF_MAMBA else "llama"]
    monkeypatch.setattr(where, what, instead)
    with_mistake = NEEDS.get(name, "tp=2")
    try:
        assert max(compare(expression, with_mistake, 2)) > 1e-9
    except (RuntimeError, ValueError) as error:  # what does not fit
        assert "shape" in str(error) or "size" in str(error)


def test_columns_of_another_head_show(monkeypatch: pytest.MonkeyPatch):
    """W_O must be cut where the heads of q, k and v are."""
    output = Linear.take_share

    def take_share(self: Linear, owner: Owner) -> None:
        if self.cuts[0].cut == "row" and self.weight.shape[0] == self.weight.shape[1] * owner.of:
            self.weight = nn.Parameter(self.weight.roll(1, 1))
        output(self, owner)

    monkeypatch.setattr(Linear, "take_share", take_share)
    assert max(compare(MODELS["llama"], "tp=2", 1)) > 1e-9


def test_missing_head_changes_the_result(monkeypatch: pytest.MonkeyPatch):
    """Two owners of the same heads, and none of the others."""
    monkeypatch.setattr(Shard, "span", lambda self, size, owner, owners: (0, size // owners))
    assert max(compare(MODELS["llama"].replace(f"vocab_size={VOCAB}", "vocab_size=62"), "tp=2", 1)) > 1e-9


# Every model of the generic suite


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_model_is_shared_or_refused(case: Case):
    config = case.config()
    try:
        tp.check(config, 2)
    except RequestError as refused:
        assert str(refused).startswith("tp=2") and ("use tp=1" in str(refused) or "does not divide" in str(refused))
        return
    tokens, targets = draw(0, s=12)
    model = begin(config.build(seed=0))
    loss = model.loss(tokens, targets)
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}

    def work(groups: ProcessGroups) -> None:
        shared = tp.divide(begin(config.build(seed=0)), groups.group("tp"), groups.layout.sp)
        mine = shared.loss(tokens, targets)
        mine.backward()
        tp.sum_partial(shared)
        assert abs(mine.item() - loss.item()) < 1e-12
        for name, weight in shared.named_parameters():
            if (wanted := gradients[name]) is None:
                assert weight.grad is None, name
            else:
                assert weight.grad is not None, name
                found = tp.division_of(shared).join(name, weight.grad)
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12 * max(1.0, float(wanted.abs().max())))

    for layout in ("tp=2", "tp=2,sp=1"):
        as_threads(layout, work)
