"""Training and comparing from weights that were trained before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.cli import main
from glassformer.comparison import compare
from glassformer.runs.request import REQUEST
from glassformer.text import TextData
from glassformer.training import Pretrained, train
from tests.refused import refused
from tests.runs.stand_in import AT_ONCE

TINY = "llama+layers=1+d_model=16+heads=4+head_dim=4+hidden=16"
PLAN = {"tokens": 2 * 2 * 16, "batch_size": 2, "context": 16, "threads": 1, "dtype": "float32"}
OPTIONS = ["--tokens", "64", "--batch-size", "2", "--context", "16", "--threads", "1", "--dtype", "float32"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("\n".join(f"line {n} of a small text about cats and trees" for n in range(400)))
    return path


@pytest.fixture(scope="module")
def base(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run."""
    folder = tmp_path_factory.mktemp("runs") / "base"
    train(gf.preset(TINY), source, PLAN, folder)
    return folder


def test_run_starts_from_the_given_weights(text: TextData, tmp_path: Path) -> None:
    """With a tiny learning rate the run also ends with the given weights; it resumes only with those."""
    config = gf.preset(f"{TINY}+vocab_size={text.tokenizer.vocab_size}+context=16")
    model = config.build(seed=7)
    plan = {**PLAN, "learning_rate": 1e-12}
    done = train(config, text, plan, tmp_path / "run", pretrained=Pretrained.of(model))
    for name, value in done.model.state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], atol=1e-9), name
    with refused(code="conflict", field="pretrained"):
        train(config, text, plan, tmp_path / "run", resume=True)
    other = Pretrained.of(gf.preset(f"{TINY}+mqa+vocab_size={text.tokenizer.vocab_size}").build(seed=0), "other")
    with refused(code="conflict", field="pretrained"):
        train(config, text, plan, tmp_path / "another", pretrained=other)
    assert not (tmp_path / "another").exists()


def test_its_file_is_held_against_its_fingerprint(tmp_path: Path) -> None:
    weights = Pretrained.of(gf.preset(f"{TINY}+vocab_size=9").build(seed=0), "here")
    weights.save(tmp_path / "weights.safetensors")
    assert Pretrained.read(tmp_path / "weights.safetensors", weights.fingerprint).name == "here"
    with refused(code="changed", field="weights.safetensors"):
        Pretrained.read(tmp_path / "weights.safetensors", "0" * 64)


def test_train_command_continues_from_pooled_heads(base: Path, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "pooled"
    begun = ["train", f"{base}+gqa:2", "--data", str(source), "--out", str(out), "--pretrained", *OPTIONS]
    assert main([*begun, "--lr", "1e-12"]) == 0
    pooled, done = gf.load(f"{base}+gqa:2").model, gf.load(out).model
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(pooled.parameters(), done.parameters(), strict=True))


def test_pretrained_arms_keep_their_weights_and_tokenizer(base: Path, source: Path, tmp_path: Path) -> None:
    names = [f"{base}", f"{base}+gqa:2", f"{base}+mqa"]
    found = compare(
        names, source, out=tmp_path / "out", pretrained=True, executor=AT_ONCE, allow_unmatched=True, **PLAN
    ).to_dict()
    assert found["command"] == f"glassformer run {tmp_path / 'out' / 'design.yaml'}"
    assert gf.Design.from_file(tmp_path / "out" / "design.yaml").pretrained
    assert len({run["pretrained"] for run in found["runs"]}) == 3
    assert any("made of other numbers of heads" in note for note in found["budget"]["notes"])
    tokenizer = gf.load(base).tokenizer
    assert tokenizer is not None and found["data"]["tokenizer_fingerprint"] == tokenizer.fingerprint()
    for request in (tmp_path / "out").glob(f"runs/*/{REQUEST}"):
        held = json.loads(request.read_text())
        Pretrained.read(held["pretrained_file"], held["pretrained"])
    again = {"executor": AT_ONCE, "allow_unmatched": True, **PLAN}
    with refused(code="conflict", field="pretrained"):
        compare(names, source, out=tmp_path / "out", **again)
    with refused(code="missing", field="name"):
        compare([names[0], "llama@1m"], source, out=tmp_path / "other", pretrained=True, **again)
    with refused(code="conflict", field="tokenizer"):
        compare(names, source, out=tmp_path / "other", pretrained=True, tokenizer="byte", **again)
