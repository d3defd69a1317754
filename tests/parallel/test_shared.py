"""Runs that several processes share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from glassformer.naming import preset
from glassformer.parallel import launch
from glassformer.parallel.apply import Ranks, travels_in_half
from glassformer.parallel.launch import joined
from glassformer.parallel.layout import Layout
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.parallel.sharing import Sharing
from glassformer.parallel.sums import Tree, add_to, norm_of_rows
from glassformer.training import Recipe
from glassformer.training.folder import check_folder
from glassformer.training.shared import check_shared, layout_of
from tests.parallel.threads import as_threads
from tests.refused import refused

CONFIG = preset("llama@1m+layers=2+d_model=16+heads=2").replace(vocab_size=32, context=8)
RECIPE = Recipe(steps=2, batch_size=8, micro_batch=2, context=8)


def step(groups: ProcessGroups) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients of four atoms, and their norm, by what the process groups answer."""
    sharing = Sharing() if groups.world == 1 else Ranks(groups)
    model = sharing.build(CONFIG, 0, "cpu").train()
    tokens = torch.arange(8 * 9).view(8, 9).mul(7).remainder(32)
    sums = Tree[list[torch.Tensor | None]](add_to)
    for atom in groups.mine(4):
        rows = tokens[2 * atom : 2 * atom + 2]
        (model.loss(rows[:, :-1], rows[:, 1:]) / 4).backward()
        sums.push([one.grad for one in model.parameters()])
        model.zero_grad(set_to_none=True)
    for one, gradient in zip(model.parameters(), sums.total(), strict=True):
        one.grad = gradient
    sharing.add_up(model)
    norm = norm_of_rows(sharing.squares(model))
    whole = {name: one.grad for name, one in model.named_parameters()}
    return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in whole.items()}, norm


@pytest.mark.parametrize("layout", ["fsdp=2", "fsdp=4", "replicate=4", "fsdp=2,replicate=2"])
def test_ranks_have_the_gradients_of_one_process_to_the_bit(layout: str):
    expected, norm = step(ProcessGroups.alone())
    for found, of_rank in as_threads(layout, step):
        assert of_rank == norm
        assert all(torch.equal(found[name], one) for name, one in expected.items())


@pytest.mark.parametrize("variant", ["mamba", "mamba2", "gated_deltanet", "moe:4:2", "gqa:1+qknorm"])
def test_matrices_that_travel_in_half_give_the_bits_of_those_that_autocast_rounds(variant: str):
    model = preset(f"llama@1m+layers=1+d_model=32+heads=2+vocab_size=32+{variant}").build(seed=0)
    other = deepcopy(model)
    for module in other.layers.modules():
        if travels_in_half(module):
            module.to(torch.bfloat16)
    tokens = torch.arange(34).view(2, 17) * 7 % 32
    for one in (model, other):
        with torch.autocast("cpu", torch.bfloat16):
            loss = one.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
    for (name, one), rounded in zip(model.named_parameters(), other.parameters(), strict=True):
        if one.grad is not None and rounded.grad is not None:
            assert torch.equal(one.grad, rounded.grad.float()), name


@pytest.mark.parametrize(
    ("layout", "recipe", "field"),
    [
        (
            "fsdp=2",
            {"micro_batch": None},
            "micro_batch",
        ),
        ("fsdp=8", {}, "micro_batch"),
        ("fsdp=3", {}, "batch_size"),
        ("fsdp=2", {"optimizer": "muon"}, "optimizer"),
        ("cp=2", {"watch": 10}, "watch"),
        ("fsdp=2", {"qk_clip": 10.0}, "qk_clip"),
        ("dp=2,zero=1", {}, "zero"),
        ("fsdp=2,recompute=full", {}, "recompute"),
        ("fsdp=2", {"device": "mps"}, "device"),
    ],
)
def test_recipes_that_ranks_cannot_share_are_refused(layout: str, recipe: dict[str, object], field: str):
    with refused(code="conflict", field=field):
        check_shared(CONFIG, Recipe.of(**{**RECIPE.model_dump(), **recipe}), Layout.of(layout), "run")


def test_ranks_not_a_power_of_two_warn():
    with pytest.warns(UserWarning, match="within rounding, not bit for bit"):
        check_shared(CONFIG, RECIPE.replace(batch_size=6, micro_batch=1), Layout.of("fsdp=3"), "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_shared(CONFIG, RECIPE, Layout.of("fsdp=2,replicate=2"), "run")


def test_a_layout_is_of_the_processes_that_there_are():
    assert layout_of(None, 4) == Layout.of("fsdp=4") and layout_of(None, 1) == Layout()
    with refused(code="conflict", field="layout"):
        layout_of("fsdp=4", 2)


def test_the_variables_of_torchrun_and_slurm_are_read():
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    srun = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
    batch = {**srun, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}
    assert joined({}) is None and joined(batch) is None
    for given in (torchrun, srun):
        place = joined(given)
        assert place is not None and (place.rank, place.world, place.local) == (3, 8, 1)
    with refused(code="type", field="WORLD_SIZE"):
        joined({"RANK": "0"})


def train(place: Path, out: str, *more: str) -> subprocess.Popen[str]:
    words = [
        sys.executable, "-m", "glassformer", "train", "gpt2@1m+dropout:0.1+layers=1+d_model=16+heads=2", "--data",
        str(place / "text"), "--tokenizer", "char", "--steps", "6", "--batch-size", "4", "--micro-batch", "1",
        "--context", "16", "--threads", "1", "--dtype", "float32", "--out", str(place / out), *more,
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_killed_rank_is_named_and_one_process_resumes_bit_for_bit(tmp_path: Path):
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    alone = train(tmp_path, "alone")
    assert alone.wait(120) == 0, alone.stderr and alone.stderr.read()
    shared = train(tmp_path, "shared", "--processes", "2", "--checkpoint-seconds", "1e-6")
    while shared.poll() is None and not (tmp_path / "shared" / "latest").exists():
        pass
    for child in Path(f"/proc/{shared.pid}/task/{shared.pid}/children").read_text().split():
        if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes():
            os.kill(int(child), signal.SIGKILL)
    _, said = shared.communicate(timeout=60)
    assert shared.returncode == 1
    assert "rank 1 on " in said and "was killed by SIGKILL" in said and "--resume" in said
    again = train(tmp_path, "shared", "--resume")
    assert again.wait(120) == 0, again.stderr and again.stderr.read()
    one, other = (
        [
            (row["step"], row["loss"], row["grad_norm"])
            for row in map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
            if "loss" in row
        ]
        for name in ("alone", "shared")
    )
    assert one == other and len(one) == 6
    files = [next((tmp_path / name / "checkpoints" / "step_00000006").glob("model*")) for name in ("alone", "shared")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_rank_that_failed_is_named_though_others_are_at_work():
    """Whichever it is; what is still there has no status, and is not taken for killed."""
    for failing in (0, 1):
        codes = ["import sys; sys.exit(3)" if rank == failing else "import time; time.sleep(60)" for rank in (0, 1)]
        ranks = [subprocess.Popen([sys.executable, "-S", "-c", code]) for code in codes]
        try:
            statuses = launch._watch_over(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        assert statuses == [3 if rank == failing else None for rank in (0, 1)]
        assert launch._first_to_die(statuses) == failing


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        ("recompute=full", "recompute"),
        ("interleave=2", "interleave"),
        ("sp=1", "sp"),
    ],
)
def test_words_that_would_do_nothing_are_refused(layout: str, field: str):
    with refused(code="conflict", field=field):
        check_shared(CONFIG, RECIPE, Layout.of(layout), "run")


def test_tasks_of_a_machine_by_slurm():
    step = {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
    place = launch.joined({**step, "SLURM_STEP_TASKS_PER_NODE": "8(x2)"})
    assert place is not None and (place.machine, place.world) == (8, 16)


def test_one_of_several_processes_tries_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Others would find it there, or gone, between two looks of the first."""
    made: list[Path] = []
    make = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", lambda path, *given, **named: (made.append(path), make(path, *given, **named)))
    out = tmp_path / "run"
    assert check_folder(out, False, try_to_write=False) == out and not made
    assert check_folder(out, False) == out and made == [out] and not out.exists()


def test_failure_of_the_first_rank_reaches_the_others(monkeypatch: pytest.MonkeyPatch):
    store = dict[str, str]()
    monkeypatch.setattr(launch, "_met", lambda place: SimpleNamespace(set=store.__setitem__))
    with pytest.raises(OSError, match="disk"), launch.leader_first(launch.ProcessPlace(0, 2, 0, 2)):
        raise OSError("the disk is full")
    assert [json.loads(told) for told in store.values()] == [["the disk is full", "failed"]]
