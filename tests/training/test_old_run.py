"""A run that an earlier version began, weights drawn by rule 1, goes on as that version would have gone on."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

import glassformer as gf
from glassformer.naming import preset
from glassformer.text import prepare
from glassformer.training import checkpoint

DATA = Path(__file__).parent / "data"
"""run_of_rule_1: commit 215f49b stopped at step 5 of 10; run_of_rule_1.safetensors: its weights after all ten."""
CONFIG = "llama@1m+layers=1+d_model=8+heads=2+hidden=8+tied"
RECIPE = {
    "tokens": 10 * 4 * 8, "batch_size": 4, "context": 8, "learning_rate": 1e-2, "dtype": "float32", "seed": 1,
    "compile": False, "threads": 1,
}  # fmt: skip


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path):
    """The weights end where the earlier version's own end."""
    run = tmp_path / "run"
    shutil.copytree(DATA / "run_of_rule_1", run)
    text = prepare(DATA / "run_of_rule_1.txt", "char", cache_dir=tmp_path / "cache")
    resumed = gf.train(preset(CONFIG), text, RECIPE, run, resume=True)
    assert resumed.steps == 10
    expected = load_file(DATA / "run_of_rule_1.safetensors")
    found = load_file(checkpoint.latest(run) / "model.safetensors")  # type: ignore[operator]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
