"""Training on a GPU: learning, resuming, watching, and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

import glassformer as gf
from glassformer.cli import main
from glassformer.naming import preset
from glassformer.text import TextData
from glassformer.training import checkpoint, train
from tests import gpu as gpu
from tests.refused import failed
from tests.training.conftest import sentences
from tests.training.conftest import text as text  # the fixture
from tests.training.test_loop import interrupt_at

STEPS = {"tokens": 40 * 16 * 64, "batch_size": 16, "context": 64, "device": "cuda", "learning_rate": 3e-3}
COMPILED = {**STEPS, "compile": True}


@pytest.mark.parametrize(
    "name", ["llama@1m+gqa:2", "gpt2@1m+dropout:0.1", "mamba@1m", "llama@1m+moe:4:2", "gemma-2-2b@1m"]
)
def test_it_learns_in_bf16(name: str, text: TextData, tmp_path: Path):
    run = train(preset(name), text, COMPILED, tmp_path / "run")
    assert run.how.dtype == "bfloat16" and run.status == "ok"
    assert run.how.compile or "mamba" in name  # Triton 3.6 does not always compile the steps of its scan
    assert next(run.model.parameters()).is_cuda
    losses = [row["loss"] for row in run.metrics if "loss" in row]
    assert losses[-1] < 0.75 * losses[0]
    assert run.validation is not None and abs(run.validation["loss"] - losses[-1]) < 0.5


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon", "sgd", "adafactor"])
def test_every_optimizer_steps_as_on_the_cpu(optimizer: str, text: TextData):
    """Fused and `foreach` steps in fp32 against steps on the CPU."""
    asked = {**STEPS, "tokens": 5 * 16 * 64, "optimizer": optimizer, "dtype": "float32", "compile": False}
    asked.pop("learning_rate")
    runs = [train(preset("llama@1m"), text, {**asked, "device": device}) for device in ("cpu", "cuda")]
    losses = [[row["loss"] for row in run.metrics if "loss" in row] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_everything_at_once(text: TextData, tmp_path: Path):
    """Pieces of a batch, saving in the background, looks, and clipping of logits."""
    asked = {**STEPS, "micro_batch": 4, "watch": 10, "async_save": True, "checkpoint_seconds": 1.0, "qk_clip": 5.0}
    run = train(preset("llama@1m+gqa:2"), text, asked, tmp_path / "run")
    assert run.status == "ok" and checkpoint.latest(tmp_path / "run") is not None
    assert gf.dynamics.read_records(tmp_path / "run" / "dynamics.jsonl")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "text.txt").write_text(sentences(), encoding="utf-8")
    out = str(tmp_path / "run")
    data = ["--data", str(tmp_path / "text.txt"), "--tokenizer", "char"]
    train_ = ["train", "llama@1m", *data, "--tokens", "40k", "--batch-size", "16", "--context", "64", "--out", out]
    assert main([*train_, "--device", "cuda"]) == 0
    told = capsys.readouterr()
    assert "cuda" in told.out + told.err
    assert main([*train_, "--device", "cuda", "--resume"]) == 0
    for more in ([], ["--quantize", "int8"], ["--compile"]):
        assert main(["generate", out, "--prompt", "the cat", "--max-new-tokens", "8", "--device", "cuda", *more]) == 0
    assert main(["inspect", out, "--text", "the cat sat", "--out", str(tmp_path / "look")]) == 0
    capsys.readouterr()


def test_interrupted_run_resumes_bit_for_bit(text: TextData, tmp_path: Path):
    """Bit for bit, in fp32 with dropout: the checkpoint has the GPU's generator."""
    asked = {**STEPS, "tokens": 10 * 16 * 64, "dtype": "float32", "compile": False}
    train(preset("gpt2@1m+dropout:0.1"), text, asked, tmp_path / "whole")
    with failed(code="stopped"):
        train(preset("gpt2@1m+dropout:0.1"), text, asked, tmp_path / "cut", callbacks=[interrupt_at(5)])
    train(preset("gpt2@1m+dropout:0.1"), text, asked, tmp_path / "cut", resume=True)
    folders = [checkpoint.latest(tmp_path / run) for run in ("whole", "cut")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = ((folder / file).read_bytes() for folder in folders if folder)
        assert one == other, file
