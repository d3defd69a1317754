"""Checkpoints of several ranks: any layout loads what any other saved; damage is one sentence on all of them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn

from glassformer.errors import RequestError, WorkError
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parallel import stored
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.parts.core.shard import piece_of, regions, shards_of
from glassformer.training import checkpoint
from tests.parallel.threads import as_threads

MODEL = "llama@1m+layers=1+d_model=24+heads=4+gqa:2+moe:4:2+sigmareparam+vocab_size=22+context=8"
FEW = ["", "fsdp=4", "fsdp=2,tp=2", "fsdp=2,ep=2"]
LAYOUTS = [*FEW, "replicate=2,fsdp=2", "tp=2", "fsdp=3", "fsdp=4,ep=2", "replicate=2,tp=2", "fsdp=2,cp=2"]


AXIS = {"column": "tp", "row": "tp", "vocab": "tp", "expert": "ep"}


def cut(model: Model, groups: ProcessGroups) -> Model:
    """Leaves each rank its part of every matrix, as the modules declare it, and of that its rows by FSDP2."""
    experts, shapes, places, parameters = set(), {}, {}, dict(model.named_parameters())
    for name, cuts in shards_of(model).items():
        if (kind := cuts[0].cut) != "replicated":
            owner = groups.at[AXIS[kind]], groups.sizes[AXIS[kind]]
            shapes[name] = parameters[name].shape
            places[name] = regions(tuple(shapes[name]), cuts, *owner)
            path, _, leaf = name.rpartition(".")
            part = nn.Parameter(piece_of(parameters[name].data, cuts, *owner).clone())
            setattr(model.get_submodule(path), leaf, part)
            experts |= {part} if kind == "expert" and owner[1] > 1 else set()
    model.division = SimpleNamespace(cuts=places, shapes=shapes, regions=places.__getitem__)  # type: ignore[assignment]
    if groups.mesh is not None:
        from torch.distributed.fsdp import fully_shard

        for unit in (*model.layers, model):
            fully_shard(unit, mesh=groups.mesh, ignored_params=experts)
    return model


def filled(groups: ProcessGroups, seed: int) -> Model:
    """A model of random weights, of each the part of this rank."""
    model = preset(MODEL).build(seed=0)
    values = torch.Generator().manual_seed(seed)
    for value in model.state_dict().values():
        value.copy_(torch.randn(value.shape, generator=values))
    return cut(model, groups)


def trained(groups: ProcessGroups, seed: int) -> tuple[Model, torch.optim.Optimizer]:
    """And an optimizer whose moments are of other seeds."""
    model, *moments = (filled(groups, seed + i) for i in range(3))
    optimizer = torch.optim.AdamW(model.parameters())
    for own, one, two in zip(*(each.parameters() for each in (model, *moments)), strict=True):
        optimizer.state[own] = {"step": torch.tensor(3.0), "exp_avg": one.detach(), "exp_avg_sq": two.detach()}
    return model, optimizer


def kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns the weights and moments that this rank holds."""
    values = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        values |= {f"{part}.{name}": value for part, value in optimizer.state[parameter].items()}
    return {name: value.to_local() if hasattr(value, "to_local") else value for name, value in values.items()}


def saved(layout: str, run: Path) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    return as_threads(
        layout, lambda groups: checkpoint.save(run, 3, *trained(groups, 0), {"seconds": 1.0}, {}, groups)
    )[0]


def loaded(layout: str, path: Path) -> list[dict[str, Tensor]]:
    def load(groups: ProcessGroups) -> dict[str, Tensor]:
        model = filled(groups, 50)
        optimizer = torch.optim.AdamW(model.parameters())
        checkpoint.load_model(path, model, groups)
        checkpoint.load_optimizer(path, model, optimizer, groups)
        return kept(model, optimizer)

    return as_threads(layout, load)


@pytest.mark.parametrize(
    ("layouts", "others"),
    [(FEW, lambda number: {"", FEW[number - 1]}), pytest.param(LAYOUTS, lambda _: LAYOUTS, marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_any_layout_loads_checkpoints_of_any_other(
    tmp_path: Path, layouts: list[str], others: Callable[[int], list[str]]
) -> None:
    right = {layout: as_threads(layout, lambda groups: kept(*trained(groups, 0))) for layout in layouts}
    sizes = []
    for number, layout in enumerate(layouts):
        path = saved(layout, tmp_path / f"run{number}")
        sizes.append(sum(value.nbytes for file in path.glob("*.safetensors") for value in load_file(file).values()))
        assert checkpoint.read_state(path)["seconds"] == 1.0
        for other in others(number):
            for ours, theirs in zip(loaded(other, path), right[other], strict=True):
                assert ours.keys() == theirs.keys()
                for name in ours:
                    assert torch.equal(ours[name], theirs[name]), (layout, other, name)
    assert len(set(sizes)) == 1  # copies are written once


def test_one_process_writes_plain_safetensors(tmp_path: Path) -> None:
    """The files equal those of the format's own library for the tensors by name."""
    model, optimizer = trained(ProcessGroups.alone(), 0)
    path = checkpoint.save(tmp_path, 3, model, optimizer, {})
    assert sorted(one.name for one in path.iterdir()) == ["model.safetensors", "optimizer.safetensors", "state.json"]
    assert (path / "model.safetensors").read_bytes() == save(dict(model.state_dict()), {"format": "pt"})
    moments = {f"{part}.{name}": value for name, parameter in model.named_parameters()
               for part, value in optimizer.state[parameter].items()}  # fmt: skip
    assert (path / "optimizer.safetensors").read_bytes() == save(moments, {"format": "pt"})


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("fsdp=2", tmp_path_factory.mktemp("sharded"))


def refused(path: Path, ranks: str = "") -> str:
    """Returns the message of both loaders, equal on all ranks."""

    def load(groups: ProcessGroups) -> str:
        model, said = filled(groups, 50), ""
        optimizer = torch.optim.AdamW(model.parameters())
        for act in (
            lambda: checkpoint.load_model(path, model, groups),
            lambda: checkpoint.load_optimizer(path, model, optimizer, groups),
        ):
            try:
                act()
            except RequestError as error:
                said += str(error)
        return said

    said = as_threads(ranks, load)
    assert len(set(said)) == 1, said
    return said[0]


def forged(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """state.json, changed."""
    state = json.loads((path / "state.json").read_text())
    change(state["sha256"])
    (path / "state.json").write_text(json.dumps(state))


def moved(path: Path, key: str, to: list[int], field: str = "at") -> None:
    """Changes the recorded place of a piece, and the file's hash accordingly."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        values = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    places = json.loads(metadata["pieces"])
    next(one for one in places.values() if one["of"] == key)[field] = to
    save_file(values, path, {**metadata, "pieces": json.dumps(places)})
    forged(path.parent, lambda hashes: hashes.update({path.name: hashlib.sha256(path.read_bytes()).hexdigest()}))


FILES = [f"{kind}-0000{rank}-of-00002.safetensors" for kind in ("model", "optimizer") for rank in (1, 2)]
ROWS = "final_norm.weight"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    **{f"{name} deleted": (lambda at, name=name: (at / name).unlink(), name) for name in FILES},
    **{f"{name} cut": (lambda at, name=name: os.truncate(at / name, 999), f"{name} is damaged") for name in FILES},
    **{f"{name} flipped": (lambda at, name=name: flip(at / name), f"{name} is damaged") for name in FILES},
    "overlap": (lambda at: moved(at / FILES[1], ROWS, [11]), f"{ROWS} has pieces that overlap"),
    "outside": (lambda at: moved(at / FILES[1], ROWS, [13]), f"{ROWS} has a piece of shape"),
    "gap": (lambda at: moved(at / FILES[1], ROWS, [25], "whole"), f"{ROWS}.* is not a piece of|is not a piece of"),
    "another": (lambda at: moved(at / FILES[1], ROWS, "head.weight", "of"), "is not a piece of|overlap"),
    "negative": (lambda at: moved(at / FILES[1], ROWS, [-1]), "does not locate its pieces"),
    "elsewhere": (lambda at: forged(at, lambda hashes: hashes.update({"../model.safetensors": ""})), "not a file of a"),
    "absolute": (
        lambda at: forged(at, lambda hashes: hashes.update({"/etc/passwd": ""})),
        "not a file of a checkpoint",
    ),
    "unnamed": (lambda at: forged(at, lambda hashes: hashes.pop(FILES[1])), "does not name model"),
    "none": (lambda at: forged(at, lambda hashes: [hashes.pop(name) for name in FILES]), "does not name model"),
    "extra": (lambda at: shutil.copy(at / FILES[0], at / "model-00003-of-00003.safetensors"), "is not named"),
}


def flip(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[-7] ^= 8
    path.write_bytes(whole)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_sentence(sharded: Path, tmp_path: Path, damage: str) -> None:
    path = Path(shutil.copytree(sharded, tmp_path / "run" / "checkpoints" / sharded.name))
    act, why = DAMAGE[damage]
    act(path)
    said = refused(path)
    assert re.search(why, said), said
    assert "\n" not in said and "no other checkpoint of this run is whole" in said and len(said) < 1500


def test_all_ranks_hear_of_damage_that_one_of_them_finds(sharded: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(sharded, tmp_path / "run" / "checkpoints" / sharded.name))
    flip(path / FILES[1])  # rank 1 verifies the second
    assert f"{FILES[1]} is damaged" in refused(path, "fsdp=2")


def test_failed_write_of_one_rank_saves_no_checkpoint(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = stored.save_file

    def full(values: Any, path: Path, metadata: Any) -> None:
        if path.name == FILES[1]:
            raise OSError(28, "No space left on device")
        real(values, path, metadata)

    def save(groups: ProcessGroups) -> str:
        model, optimizer = trained(groups, 0)
        checkpoint.save(tmp_path, 3, model, optimizer, {}, None, groups)
        if groups.leads:
            monkeypatch.setattr(stored, "save_file", full)
        groups.gather(None)
        with pytest.raises(WorkError) as caught:
            checkpoint.save(tmp_path, 4, model, optimizer, {}, None, groups)
        return str(caught.value)

    said = as_threads("fsdp=2", save)
    assert "the disk is full" in said[0] and said[0] == said[1]
    assert [one.name for one in (tmp_path / "checkpoints").iterdir()] == ["step_00000003"]
    latest = checkpoint.latest(tmp_path)
    assert latest is not None and latest.name == "step_00000003"
