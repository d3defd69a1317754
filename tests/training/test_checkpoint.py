from __future__ import annotations

import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parallel import stored
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.training import checkpoint
from glassformer.training.optimizers import AdamWConfig
from tests.refused import failed, refused

TINY = "llama@1m+layers=1+d_model=8+heads=1+vocab_size=11+context=8"


def built(seed: int = 0) -> tuple[Model, torch.optim.Optimizer]:
    model = preset(TINY).build(seed=seed)
    optimizer = AdamWConfig().create(model, 1e-3, 0.1)
    model.loss(torch.arange(8)[None], torch.arange(8)[None]).backward()
    optimizer.step()
    return model, optimizer


def same(model: Model, path: Path) -> bool:
    fresh = preset(TINY).build(seed=99)
    checkpoint.load_model(path, fresh)
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def test_saving_and_loading_is_identity(tmp_path: Path) -> None:
    model, optimizer = built()
    path = checkpoint.save(tmp_path, 7, model, optimizer, {"seconds": 1.5})
    assert checkpoint.latest(tmp_path) == path
    assert checkpoint.read_state(path)["step"] == 7
    assert same(model, path)
    fresh, other = built(seed=5)
    checkpoint.load_optimizer(path, fresh, other)
    for name, parameter in fresh.named_parameters():
        for part, value in other.state[parameter].items():
            assert torch.equal(value, optimizer.state[dict(model.named_parameters())[name]][part]), (
                name,
                part,
            )


def test_only_the_last_two_are_kept(tmp_path: Path) -> None:
    model, optimizer = built()
    for step in (1, 2, 3, 10):
        checkpoint.save(tmp_path, step, model, optimizer, {})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step_00000003",
        "step_00000010",
    ]


class Crash(BaseException):
    pass


@pytest.mark.parametrize("operation", ["replace", "fsync", "rmtree", "save_file"])
def test_a_crash_at_any_call_leaves_a_whole_checkpoint(
    tmp_path: Path, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies at the n-th call of each kind, for every n: the latest is the old or the new one, whole."""
    old, old_optimizer = built(0)
    new, new_optimizer = built(1)
    home: Any = {"replace": os, "fsync": os, "rmtree": shutil, "save_file": stored}[operation]
    real = getattr(home, operation)
    for n in range(40):
        run = tmp_path / f"run{n}"
        run.mkdir()
        checkpoint.save(run, 1, old, old_optimizer, {})
        calls = 0

        def dies(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == n + 1:  # noqa: B023
                raise Crash
            return real(*args, **kwargs)

        monkeypatch.setattr(home, operation, dies)
        try:
            checkpoint.save(run, 2, new, new_optimizer, {})
            crashed = False
        except Crash:
            crashed = True
        monkeypatch.setattr(home, operation, real)
        found = checkpoint.latest(run)
        assert found is not None
        assert same(new if checkpoint.read_state(found)["step"] == 2 else old, found)
        if not crashed:
            assert n > 0, f"{operation} is never called"
            return
    pytest.fail("never finished")


def test_every_truncation_and_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    model, optimizer = built()
    path = checkpoint.save(tmp_path, 1, model, optimizer, {})
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    rng = random.Random(0)
    cuts = [whole[:n] for n in range(0, len(whole), max(1, len(whole) // 200))]
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        cuts.append(bytes(damaged))
    for damaged_bytes in cuts:
        weights.write_bytes(damaged_bytes)
        with refused(code="damaged", field="model.safetensors"):
            checkpoint.load_model(path, model)


@pytest.mark.parametrize("pointer", ["../../etc", "step_1/../..", "/etc", "step_99999999", "", "step_00000001\x00"])
def test_latest_cannot_lead_elsewhere(tmp_path: Path, pointer: str) -> None:
    model, optimizer = built()
    checkpoint.save(tmp_path, 1, model, optimizer, {})
    (tmp_path / "latest").write_text(pointer)
    with refused(code="missing", field="latest"):
        checkpoint.latest(tmp_path)


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    model, optimizer = built()
    path = checkpoint.save(tmp_path, 1, model, optimizer, {})
    with refused(code="conflict", field="embedding.weight"):
        checkpoint.load_model(path, preset(TINY + "+vocab_size=12").build())
    with refused(code="missing", field="layers.1.mixer.qkv.weight"):
        checkpoint.load_model(path, preset(TINY + "+layers=2").build())
    with refused(code="unknown", field="head.weight"):
        checkpoint.load_model(path, preset(TINY + "+tied").build())


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"step": "1", "sha256": {}}', "[" * 100_000, "x" * (2 << 20)])
def test_a_foreign_state_is_refused(tmp_path: Path, state: str) -> None:
    model, optimizer = built()
    path = checkpoint.save(tmp_path, 1, model, optimizer, {})
    (path / "state.json").write_text(state)
    with pytest.raises(RequestError):
        checkpoint.read_state(path)


def test_the_vectors_of_a_power_iteration_are_part_of_it(tmp_path: Path) -> None:
    """Four steps are two, saved, loaded into a model of another seed, and two more: weights and vectors bit for bit."""
    tokens = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(0))

    def trained(model: Model, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()

    def begun(seed: int) -> tuple[Model, torch.optim.Optimizer]:
        model = preset(TINY + "+sigmareparam").build(seed=seed)
        return model, AdamWConfig().create(model, 3e-2, 0.1)

    straight, other = begun(0)
    trained(straight, other, 2)
    path = checkpoint.save(tmp_path, 2, straight, other, {})
    trained(straight, other, 2)
    resumed, optimizer = begun(5)
    checkpoint.load_model(path, resumed)
    checkpoint.load_optimizer(path, resumed, optimizer)
    trained(resumed, optimizer, 2)
    assert any(name.endswith("reparam.u") for name in resumed.state_dict())
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    (tmp_path / "plain").mkdir()
    with refused(code="missing", field="layers.0.mixer.qkv.reparam.gamma"):
        checkpoint.load_model(checkpoint.save(tmp_path / "plain", 1, *built(), {}), resumed)


def test_background_checkpoint_holds_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is slow, and training continues: the files hold the weights and moments of the step that was saved."""
    model, optimizer = built()
    held, real = threading.Event(), stored.save_file

    def slow(*args: Any, **kwargs: Any) -> None:
        held.wait()
        real(*args, **kwargs)

    monkeypatch.setattr(stored, "save_file", slow)
    background = checkpoint.Background(ProcessGroups.alone())
    state: dict[str, Any] = {"recent": [1.0]}
    for step in (1, 2):  # the second time in the memory of the first
        held.clear()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        moments = [{part: value.clone() for part, value in optimizer.state[one].items()} for one in model.parameters()]
        background.save(tmp_path, step, model, optimizer, state)
        state["recent"].append(2.0)
        model.loss(torch.arange(8)[None], torch.arange(8)[None]).backward()
        optimizer.step()
        assert checkpoint.latest(tmp_path) == (tmp_path / "checkpoints" / "step_00000001" if step == 2 else None)
        held.set()
        path = background.wait()
        assert path == checkpoint.latest(tmp_path) and background.wait() is None
        assert path is not None and checkpoint.read_state(path)["recent"] == [1.0, 2.0][:step]
        fresh, other = built(seed=5)
        checkpoint.load_model(path, fresh)
        checkpoint.load_optimizer(path, fresh, other)
        assert all(torch.equal(value, weights[name]) for name, value in fresh.state_dict().items())
        for one, right in zip(fresh.parameters(), moments, strict=True):
            assert all(torch.equal(value, right[part]) for part, value in other.state[one].items())


def test_background_failure_is_raised_at_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stored, "save_file", full)
    background = checkpoint.Background(ProcessGroups.alone())
    background.save(tmp_path, 1, *built(), {})
    with failed(code="disk"):
        background.wait()
    assert checkpoint.latest(tmp_path) is None and background.wait() is None
