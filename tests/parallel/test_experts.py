"""Experts over ranks against one process that takes the ranks' tokens as micro-batches, in fp64."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from glassformer.introspection import capture, edit
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parallel import experts
from glassformer.parallel.apply import Ranks
from glassformer.parallel.layout import Layout
from glassformer.parallel.pieces import Held, IndexBox, Piece, gap_or_overlap
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.parallel.sharing import Sharing
from glassformer.parallel.sums import Tree, add_to, norm_of_rows
from glassformer.parallel.tensor import division_of
from glassformer.training.gradients import clip
from glassformer.training.optimizers.adamw import AdamWConfig
from tests.parallel.threads import as_threads
from tests.refused import refused

VOCAB, ATOMS, STEPS, CLOSE = 61, 4, 3, 1e-13
TINY = f"llama@1m+layers=2+d_model=32+heads=4+vocab_size={VOCAB}+context=16"
MODELS = {
    "all that moves routers": (
        f"{TINY}+moe:4:2+ffn.balance_rate=0.01+ffn.z_loss=0.01+ffn.balance_loss=0.1+ffn.n_shared=1+ffn.router_bias=true"
        "+ffn.capacity=1.25"
    ),
    "one map, its bias, weights of the input": f"{TINY}+moe:8:1+ffn.gated=false+ffn.activation=relu+ffn.bias=true"
    "+ffn.weigh=input",
}


def draw(step: int, atom: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + atom)
    return (
        torch.randint(0, VOCAB, (2, 11), generator=generator),
        torch.randint(0, VOCAB, (2, 11), generator=generator),
    )


here = threading.local()
"""Whether counts of this rank's thread are summed: `reducing` is of all threads."""


def total(x: Tensor) -> Tensor:
    if not getattr(here, "summed", False):
        return x
    summed = x.clone()
    dist.all_reduce(summed)
    return summed


def built(expression: str) -> Model:
    model = preset(expression).build(seed=0).double().train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "router" in name:
                weight *= 8.0  # so that loads are uneven, and experts without rows happen
    return model


def trained(model: Model, mine: range, groups: ProcessGroups | None) -> tuple[list[float], list[float]]:
    """The losses of the atoms `mine` over some steps, and the shares of assignments that were dropped."""
    own = set() if groups is None else {name for name, _ in experts.own(model)}
    optimizer, losses, dropped = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1), [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for atom in mine:
            loss = model.loss(*draw(step, atom))
            (loss / ATOMS).backward()
            losses.append(loss.item())
            dropped += [float(layer.ffn.router.dropped) for layer in model.layers]
        for name, weight in model.named_parameters():
            if groups is not None and name not in own:
                dist.all_reduce(weight.grad)
        optimizer.step()
        here.summed = groups is not None
        for module in model.modules():
            if hasattr(module, "after_step"):
                module.after_step()
        here.summed = False
    return losses, dropped


@cache
def alone(expression: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = built(expression)
    losses, dropped = trained(model, range(ATOMS), None)
    return losses, dropped, model.state_dict()


@pytest.mark.parametrize("layout", ["fsdp=2,ep=2", "fsdp=4,ep=4"])
@pytest.mark.parametrize("name", MODELS)
def test_experts_of_several_ranks_learn_as_those_of_one(name: str, layout: str) -> None:
    """Losses, every parameter, selection biases, and what was dropped, over several steps of AdamW."""
    losses, dropped, weights = alone(MODELS[name])

    def work(groups: ProcessGroups) -> tuple[list[float], list[float], dict[str, Tensor]]:
        model = experts.divide(built(MODELS[name]), groups.group("ep"))
        found = trained(model, groups.mine(ATOMS), groups)
        return *found, {key: division_of(model).join(key, value) for key, value in model.state_dict().items()}

    ranks = as_threads(layout, work, total)
    world, each = len(ranks), ATOMS // len(ranks)
    for rank, (found, lost, held) in enumerate(ranks):
        mine = [step * ATOMS + i * world + rank for step in range(STEPS) for i in range(each)]
        assert max(abs(losses[i] - one) for i, one in zip(mine, found, strict=True)) < CLOSE
        assert lost == [one for i in mine for one in dropped[2 * i : 2 * i + 2]]
        for key, value in held.items():
            assert (value - weights[key]).abs().max() <= CLOSE * weights[key].abs().max().clamp_min(1), key
    assert ("capacity" not in MODELS[name]) or any(dropped)


def steps_of(groups: ProcessGroups) -> tuple[list[float], list[Piece]]:
    """The gradient norms of some clipped steps, and what the rank holds of weights and moments at the end."""
    sharing = Sharing() if groups.world == 1 else Ranks(groups)
    config = preset(MODELS["all that moves routers"])
    given = built(MODELS["all that moves routers"]).state_dict()
    model = sharing.build(config, 0, "cpu", given=given).train()
    optimizer, norms = AdamWConfig().create(model, 5e-3, 0.1), []
    for step in range(STEPS):
        sums = Tree[list[Tensor | None]](add_to)
        for atom in groups.mine(ATOMS):
            (model.loss(*draw(step, atom)) / ATOMS).backward()
            sums.push([weight.grad for weight in model.parameters()])
            model.zero_grad(set_to_none=True)
        for weight, gradient in zip(model.parameters(), sums.total(), strict=True):
            weight.grad = gradient
        sharing.add_up(model)
        norms.append(norm_of_rows(sharing.squares(model)))
        clip(model.parameters(), 0.1, norms[-1])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        here.summed = groups.world > 1
        for module in model.modules():
            if hasattr(module, "after_step"):
                module.after_step()
        here.summed = False
    return norms, [*Held.of_model(model).pieces, *Held.of_optimizer(model, optimizer).pieces]


@pytest.fixture
def in_fp64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.parametrize("layout", ["fsdp=2,ep=2", "fsdp=4,ep=2", "fsdp=4,ep=4", "fsdp=2,ep=2,replicate=2"])
def test_experts_and_divided_weights_learn_as_one_process(layout: str) -> None:
    """Norms, and every piece of weights and moments; those of all ranks together tile the whole."""
    norms, pieces = steps_of(ProcessGroups.alone())
    whole = {piece.name: piece for piece in pieces}
    ranks = as_threads(layout, steps_of, total)
    boxes: dict[str, set[IndexBox]] = {name: set() for name in whole}
    for found, held in ranks:
        assert max(abs(a - b) / a for a, b in zip(norms, found, strict=True)) < 1e-12
        for piece in held:
            right = whole[piece.name].values[piece.box.within(whole[piece.name].box)]
            assert (piece.values - right).abs().max() <= 1e-11, piece.name
            boxes[piece.name].add(piece.box)
    for name, piece in whole.items():
        assert gap_or_overlap(boxes[name], piece.whole) is None, name
    up = [name for name in whole if name.startswith("layers") and "ffn.up_proj.weight" in name]
    shares = {sum(piece.box.values for piece in held if piece.name in up) for _, held in ranks}
    assert shares == {sum(whole[name].box.values for name in up) // Layout.of(layout).fsdp}


def test_rows_arrive_however_uneven_they_are() -> None:
    """Every rank computes 3 x + rank of what it gets, and the gradient of each row is 3; in bf16 too, and where a rank
    sends nothing, gets nothing, or both."""
    sends = {0: [0, 0, 0, 3], 1: [1] * 5 + [3], 2: []}

    def work(groups: ProcessGroups) -> None:
        trade = experts.Trade(experts.Group(dist.group.WORLD), 6)
        for dtype in (torch.float64, torch.bfloat16):
            by_expert = torch.tensor(sends[groups.rank], dtype=torch.int64)
            rows = torch.arange(2.0 * len(by_expert)).view(-1, 2).to(dtype).requires_grad_()
            trip = trade(by_expert)
            got, grouped = trip.there(rows)
            assert got.dtype == dtype and len(got) == [8, 2, 0][groups.rank]
            assert grouped.ends.tolist() == [[3, 8], [0, 2], [0, 0]][groups.rank]  # rows by the rank's own two experts
            back = trip.back(got * 3 + groups.rank)
            assert torch.equal(back, rows * 3 + by_expert[:, None] // 2)
            back.sum().backward()
            assert rows.grad is not None and bool((rows.grad == 3).all())

    as_threads("fsdp=3", work)


def test_rows_filled_up_to_blocks_give_the_gradients_of_one_process() -> None:
    """In bf16 a product of many rows is of whole blocks: those of all that came, not of all that were sent."""
    config = preset(f"llama@1m+layers=2+d_model=64+heads=4+vocab_size={VOCAB}+context=128+moe:4:2")

    def gradients(groups: ProcessGroups) -> dict[str, Tensor]:
        model = config.build(seed=0).train()
        if groups.world > 1:
            experts.divide(model, groups.group("ep"))
        for atom in groups.mine(2):
            tokens = torch.randint(VOCAB, (2, 129), generator=torch.Generator().manual_seed(atom))
            with torch.autocast("cpu", torch.bfloat16):
                loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        return {name: division_of(model).join(name, one) if groups.world > 1 else one for name, one in grads.items()}

    (whole,), each = as_threads("dp=1", gradients), as_threads("fsdp=2,ep=2", gradients)
    for name, right in whole.items():
        found = each[0][name] if "_proj" in name else each[0][name] + each[1][name]
        assert (found - right).norm() < 0.03 * right.norm(), name


def test_captured_expert_values_belong_to_this_ranks_tokens() -> None:
    """Values inside experts come back to the tokens they are of, and an edit goes there again."""
    expression = f"{TINY}+moe:4:2"
    site = "layers.1.ffn.hidden"

    def halved(value: Tensor) -> Tensor:
        return value * torch.linspace(0, 1, value.shape[-1], dtype=value.dtype)

    def seen(model: Model, rank: int) -> tuple[Tensor, Tensor]:
        tokens = draw(0, rank)[0]
        held = capture(model, tokens, site)
        with torch.no_grad(), edit(model, {site: halved}):
            return held[site], model(tokens)

    def work(groups: ProcessGroups) -> tuple[Tensor, Tensor]:
        return seen(experts.divide(built(expression), groups.group("ep")), groups.rank)

    model = built(expression)
    for rank, found in enumerate(as_threads("fsdp=2,ep=2", work)):
        for one, other in zip(found, seen(model, rank), strict=True):
            assert torch.allclose(one, other, rtol=0, atol=CLOSE)


@pytest.mark.parametrize(
    ("expression", "layout", "expected"),
    [
        (f"{TINY}+moe:6:2", "fsdp=4,ep=4", "1, 2, 3 or 6"),
        (TINY, "fsdp=2,ep=2", "1"),
        (f"{TINY}+moe:4:2", "fsdp=2,replicate=2,ep=4", "1 or 2"),
        (f"{TINY}+moe:4:2", "fsdp=2,ep=2,tp=2", "tp=1"),
        (f"{TINY}+moe:4:2", "fsdp=2,ep=2,cp=2", "cp=1"),
    ],
)
def test_wrong_requests(expression: str, layout: str, expected: str) -> None:
    with refused(code="conflict", field="ep") as caught:
        experts.check(preset(expression), Layout.of(layout))
    assert caught.value.expected == expected
