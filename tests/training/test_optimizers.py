"""Each optimizer is the formula of its paper, trains, and resumes bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.text import TextData
from glassformer.training import (
    AdafactorConfig,
    AdamWConfig,
    Interrupted,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    Recipe,
    SGDConfig,
    checkpoint,
    default_learning_rate,
    train,
)
from glassformer.training.optimizers import muon
from glassformer.training.optimizers.adamw import AdamW
from glassformer.training.overrides import with_recipe
from tests.refused import refused
from tests.training.test_loop import TEN, interrupt_at, told

TINY = "llama@1m+layers=2+d_model=32+heads=2"
KINDS = ["adamw", "muon", "sgd", "adafactor", "lion"]


def model(changes: str = "") -> ModelConfig:
    return preset(TINY + changes)


def stepped(config: OptimizerConfig, steps: int = 3, rate: float = 1e-2, decay: float = 0.1) -> tuple[Model, Model]:
    """Returns a model after some steps on given gradients, and the initial model."""
    built, begun = (model("+vocab_size=11").build(seed=0) for _ in range(2))
    optimizer = config.create(built, rate, decay)
    for step in range(steps):
        for parameter, grad in zip(built.parameters(), gradients(built, step), strict=True):
            parameter.grad = grad
        optimizer.step()
    return built, begun


def gradients(built: Model, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in built.parameters()]


def is_matrix(name: str) -> bool:
    return name.endswith("weight") and name.startswith("layers.") and "norm" not in name


def decays(name: str) -> bool:
    return is_matrix(name) or name == "head.weight"


def test_lion_is_algorithm_2_of_its_paper() -> None:
    """In float64 by hand: c = b1 m + (1 - b1) g; w -= lr (sign(c) + decay w); m = b2 m + (1 - b2) g."""
    config = LionConfig(betas=(0.8, 0.95))
    built, begun = stepped(config)
    for i, ((name, now), before) in enumerate(zip(built.named_parameters(), begun.parameters(), strict=True)):
        w, m = before.detach().double(), torch.zeros_like(before).double()
        for step in range(3):
            g = gradients(begun, step)[i].double()
            c = 0.8 * m + 0.2 * g
            w = w - 1e-2 * (torch.where(c > 0, 1.0, -1.0) + (0.3 if decays(name) else 0.0) * w)
            m = 0.95 * m + 0.05 * g
        torch.testing.assert_close(now.double(), w, rtol=1e-5, atol=1e-6, msg=name)


def test_muon_moves_matrices_along_their_momentums_polar_factor() -> None:
    """One step: of each map of the layers -lr 0.2 sqrt(max(n, m)) U V^T, with singular values of Newton-Schulz between
    0.5 and 1.5; of all else AdamW's first step, -lr sign(g). The maps of q, k and v are apart, though one weight."""
    built, begun = stepped(MuonConfig(), steps=1, decay=0.0)
    seen = 0
    named = zip(built.named_parameters(), begun.parameters(), gradients(begun, 0), strict=True)
    for (name, now), before, g in named:
        moved = (now - before).detach()
        if not is_matrix(name):
            torch.testing.assert_close(moved, -1e-2 * g.sign(), rtol=1e-3, atol=1e-6, msg=name)
            continue
        maps = built.get_submodule(name.removesuffix(".weight")).outs
        for grad, step in zip(g.split(maps), moved.split(maps), strict=True):  # type: ignore[no-untyped-call, arg-type]
            seen += 1
            u, size, vt = torch.linalg.svd(grad, full_matrices=False)
            scale = 1e-2 * 0.2 * max(grad.shape) ** 0.5
            along = u.T @ step @ vt.T / -scale  # diagonal: the same singular vectors
            reached = along.diagonal()[size > 0.01 * size.norm()]  # five iterations lift a value 480 times, at most
            assert reached.min() > 0.5 and along.diagonal().max() < 1.5, name
            assert (along - along.diagonal().diag()).abs().max() < 0.1, name
    assert seen == 2 * 7  # q, k, v, output, gate, up, down


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_of_each_matrix(nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim.Muon iterates in bf16: so does ours here, one matrix or several at once."""
    monkeypatch.setattr(muon, "iterated_in", lambda device: torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    shapes = [(8, 12), (12, 8), (8, 12), (5, 5)]
    ours = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]
    theirs = [torch.nn.Parameter(one.detach().clone()) for one in ours]
    how: dict[str, Any] = {"momentum": 0.9, "nesterov": nesterov}
    groups = [{"params": ours, "lr": 0.02, "weight_decay": 0.1}]
    both = (
        muon.Muon(groups, {one: (len(one),) for one in ours}, **how),
        torch.optim.Muon(theirs, 0.02, 0.1, adjust_lr_fn="match_rms_adamw", **how),
    )
    for _ in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=draw)
            other.grad = mine.grad.clone()
        for optimizer in both:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0.02 * 0.2 * 12**0.5 * 4 * 2**-6)


def test_muon_in_fp32_and_in_bf16_are_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(muon, "iterated_in", lambda device, dtype=dtype: dtype)
        made.append(stepped(MuonConfig())[0])
    for one, other in zip(made[0].parameters(), made[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-2 * 0.2 * 10 * 3 * 2**-6)


@pytest.mark.parametrize(
    ("config", "theirs"),
    [
        (AdamWConfig(), lambda p, decay: torch.optim.AdamW(p, 1e-2, (0.9, 0.95), 1e-8, decay)),
        (SGDConfig(), lambda p, decay: torch.optim.SGD(p, 1e-2, 0.9, weight_decay=decay * 0.1 / SGDConfig.rate)),
        (
            SGDConfig(momentum=0.5, nesterov=True),
            lambda p, decay: torch.optim.SGD(p, 1e-2, 0.5, weight_decay=decay * 0.5 / SGDConfig.rate, nesterov=True),
        ),
        (
            AdafactorConfig(),
            lambda p, decay: torch.optim.Adafactor(p, 1e-2, weight_decay=decay / AdafactorConfig.rate, foreach=False),
        ),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_torchs_own_over_groups_by_declared_decay(config: OptimizerConfig, theirs: Any) -> None:
    """The reference has each parameter separately in torch's optimizer."""
    built, begun = stepped(config)
    for i, ((name, now), before) in enumerate(zip(built.named_parameters(), begun.parameters(), strict=True)):
        optimizer = theirs([before], 0.1 if decays(name) else 0.0)
        for step in range(3):
            before.grad = gradients(begun, step)[i]
            optimizer.step()
        torch.testing.assert_close(now, before, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_is_torchs_bit_for_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over steps in which a parameter has no gradient or gets its first one; only those in fp32 pass torch's `step`."""
    whole, calls = torch.optim.AdamW._init_group, list[str]()
    monkeypatch.setattr(torch.optim.AdamW, "_init_group", lambda *a: calls.append(type(a[0]).__name__) or whole(*a))
    draw = torch.Generator().manual_seed(0)
    first = [torch.randn(5, 3, generator=draw, dtype=torch.float32).to(dtype) for _ in range(3)]
    ours, theirs = ([nn.Parameter(one.clone()) for one in first] for _ in range(2))
    stepped = []
    for params, made in ((ours, AdamW), (theirs, torch.optim.AdamW)):
        groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]
        stepped.append(made(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8, fused=True))
    assert not stepped[0].state[ours[0]], "reading a state makes it"
    for step in range(6):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            a.grad = None if (i, step % 3) in ((1, 0), (2, 2)) else torch.randn(5, 3, generator=draw).to(dtype)
            b.grad = None if a.grad is None else a.grad.clone()
        for one in stepped:
            one.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    own, other = (one.state_dict()["state"] for one in stepped)
    assert all(torch.equal(own[i][name], other[i][name]) for i in other for name in other[i])
    times = 2 if dtype == torch.float32 else 6  # the first step, and that with the first gradient of another parameter
    assert calls.count("AdamW") == 2 * 6 + 2 * times


def test_a_run_imports_no_compiler() -> None:
    """The import takes a second, and 60 MB. A new process, because other tests compile."""
    code = f"""
import sys
import torch
from glassformer.generation import generate
from glassformer.naming import preset
from glassformer.training.overrides import with_recipe
from glassformer.training import Recipe
for kind in {KINDS}:
    built = preset("{TINY}+vocab_size=11").build(seed=0)
    recipe = with_recipe(Recipe(tokens=100), {{"optimizer": kind}})
    optimizer = recipe.optimizer.create(built, 1e-2, 0.1)
    tokens = torch.arange(8)[None]
    built.loss(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    generate(built.eval(), tokens, 4)
sys.exit("torch._dynamo" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", ["adamw", "muon", "lion"])
def test_groups_keep_the_rates_of_mup(kind: str) -> None:
    """Matrices of the layers at base_width / d_model of the rate, whatever the optimizer."""
    built = preset(f"{TINY}+mup:16+vocab_size=11").build(seed=0)
    optimizer = Recipe.of(tokens=1, optimizer=kind).optimizer.create(built, 1e-3, 0.1)
    of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert len(of) == len(list(built.parameters()))
    for name, parameter in built.named_parameters():
        scale = 0.5 if is_matrix(name) else 1.0
        assert of[id(parameter)]["scale"] == scale, name
        assert of[id(parameter)]["lr"] == pytest.approx(1e-3 * scale)


@pytest.mark.parametrize("kind", ["sgd", "adafactor"])
def test_mup_is_refused_where_its_rates_do_not_hold(text: TextData, kind: str) -> None:
    with pytest.raises(RequestError) as caught:
        train(model("+mup:16"), text, {**TEN, "optimizer": kind})
    assert (caught.value.code, caught.value.field, caught.value.value) == ("conflict", "optimizer", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_are_five_and_five(text: TextData, tmp_path: Path, kind: str) -> None:
    recipe = {**TEN, "optimizer": kind}
    straight = train(model(), text, recipe, tmp_path / "straight")
    with pytest.raises(Interrupted):
        train(model(), text, recipe, tmp_path / "broken", callbacks=[interrupt_at(5)])
    resumed = train(model(), text, recipe, tmp_path / "broken", resume=True)
    assert told(resumed.folder) == told(straight.folder) and len(told(straight.folder)) == 10
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, other = ((checkpoint.latest(tmp_path / run) or run) / name for run in ("straight", "broken"))  # type: ignore[operator]
        assert one.read_bytes() == other.read_bytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["muon", "sgd", "adafactor", "lion"])
def test_its_default_learning_rate_trains(text: TextData, kind: str) -> None:
    run = train(model(), text, {**TEN, "tokens": 60 * TEN["batch_size"] * TEN["context"], "optimizer": kind})
    losses = [row["loss"] for row in run.metrics if "loss" in row]
    assert run.status == "ok"
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.3


class Counting(torch.optim.Optimizer):
    """Holds plain numbers, as some optimizers do."""

    def __init__(self, params: Any):
        super().__init__(params, {})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"k": 3, "weight": 0.1 + 0.2, "warm": True, "mean": torch.ones(2, dtype=torch.float64)}

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        pass


def test_numbers_of_any_optimizer_come_back_as_they_were(tmp_path: Path) -> None:
    built = model("+vocab_size=11").build(seed=0)
    path = checkpoint.save(tmp_path, 1, built, Counting(built.parameters()), {})
    fresh = model("+vocab_size=11").build(seed=1)
    empty = torch.optim.SGD(fresh.parameters(), 1.0)
    checkpoint.load_optimizer(path, fresh, empty)
    for parameter in fresh.parameters():
        found = dict(empty.state[parameter])
        assert torch.equal(found.pop("mean"), torch.ones(2, dtype=torch.float64))
        assert found == {"k": 3, "weight": 0.1 + 0.2, "warm": True} and type(found["k"]) is int


def test_state_that_no_checkpoint_holds_is_refused(tmp_path: Path) -> None:
    built = model("+vocab_size=11").build(seed=0)
    optimizer = Counting(built.parameters())
    optimizer.state[next(built.parameters())]["history"] = [torch.ones(1)]
    with pytest.raises(TypeError, match="history"):
        checkpoint.save(tmp_path, 1, built, optimizer, {})


def test_files_of_adamw_keep_their_tensors(tmp_path: Path) -> None:
    """PART.PARAMETER for step and both moments, and nothing else: older versions read them, and theirs are read."""
    built, _ = stepped(AdamWConfig())
    optimizer = AdamWConfig().create(built, 1e-2, 0.1)
    optimizer.step()
    path = checkpoint.save(tmp_path, 1, built, optimizer, {})
    names = {name for name, _ in built.named_parameters()}
    with safe_open(path / "optimizer.safetensors", "pt") as file:
        assert set(file.keys()) == {f"{part}.{n}" for part in ("step", "exp_avg", "exp_avg_sq") for n in names}
        assert file.metadata() == {"format": "pt"}


def test_an_expression_names_the_optimizer_and_its_fields() -> None:
    found = with_recipe(Recipe.of(tokens=1), {"optimizer": "muon", "optimizer.momentum": "0.9", "adam_eps": "1e-6"})
    assert found.optimizer == MuonConfig(momentum=0.9, eps=1e-6)
    assert with_recipe(Recipe.of(tokens=1), {"optimizer.momentum": "0.5", "optimizer.kind": "sgd"}).optimizer == (
        SGDConfig(momentum=0.5)
    )
    with refused(code="unknown", field="optimizer"):
        with_recipe(Recipe.of(tokens=1), {"optimizer": "adamm"})


def test_default_rates_follow_adamws() -> None:
    config = model("+vocab_size=11")
    for kind, times in (("adamw", 1.0), ("muon", 1.0), ("lion", 1 / 3)):
        recipe = Recipe.of(tokens=1, optimizer=kind)
        assert recipe.peak_learning_rate(config) == pytest.approx(times * default_learning_rate(config))
        assert recipe.replace(learning_rate=0.5).peak_learning_rate(config) == 0.5


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(RequestError) as caught:
        Recipe.of(tokens=1, optimizer={"kind": "sgd", "momentum": 0.0, "nesterov": True})
    assert caught.value.field == "optimizer"


def test_steps_bound_a_run(text: TextData) -> None:
    recipe = {name: value for name, value in TEN.items() if name != "tokens"}
    assert train(model(), text, {**recipe, "steps": 3}).steps == 3
    with refused(code="conflict", field="budget"):
        Recipe.of(tokens=1, steps=1)


def test_fields_of_one_optimizer_are_not_dropped_for_another() -> None:
    given = Recipe.of(tokens=1, optimizer={"kind": "adamw", "betas": (0.8, 0.9)})
    with refused(code="conflict", field="recipe.optimizer") as caught:
        with_recipe(given, {"optimizer": "lion"})
    assert (caught.value.code, caught.value.value) == ("conflict", "lion")
    assert with_recipe(given, {"optimizer": "adamw"}).optimizer == given.optimizer
    assert with_recipe(given, {"adam_eps": "1e-6"}).optimizer.betas == (0.8, 0.9)


def test_a_near_name_is_offered_and_no_other_hint() -> None:
    with pytest.raises(RequestError, match="did you mean 'adamw'") as caught:
        Recipe.of(tokens=1, optimizer="adamwx")
    assert "entry point" not in str(caught.value)
    with pytest.raises(RequestError, match="entry point"):
        Recipe.of(tokens=1, optimizer="zzz")
