"""A run leaves as a folder that others load, card and ends included; what is changed keeps what fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import glassformer as gf
from glassformer.cli import main
from glassformer.errors import RequestError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run")
    text = place / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 200)
    gf.train(gf.preset("llama@1m"), str(text), {"tokens": 2000, "context": 32, "batch_size": 4}, out=place / "run")
    return place / "run"


def test_a_run_becomes_a_folder(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(run), str(tmp_path / "out"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["class"] == "LlamaForCausalLM" and said["new_parameters"] == []
    mine = gf.load(run)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "to be or not"
    ids = mine.tokenizer.encode(text).tolist()  # type: ignore[union-attr]
    assert tokenizer(text)["input_ids"] == ids
    tokens = torch.tensor([ids])
    with torch.no_grad():
        torch.testing.assert_close(other(tokens).logits, mine.model(tokens))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "tokens: 2000" in card and "LlamaForCausalLM" in card


def test_a_change_keeps_what_fits(run: Path) -> None:
    loaded = gf.load(f"{run}+window:8")
    assert loaded.fresh == ()
    old = gf.load(run)
    pairs = zip(loaded.model.parameters(), old.model.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    fewer = gf.load(f"{run}+mqa")
    assert fewer.fresh == tuple(f"layers.{i}.mixer.qkv.weight" for i in range(4))


def test_names_without_weights(run: Path) -> None:
    with pytest.raises(RequestError, match="config without weights"):
        gf.load("gpt2")
    with pytest.raises(RequestError, match="keeps its size"):
        gf.load(f"{run}@10m")
    with pytest.raises(RequestError, match="keep for the packed"):
        gf.load(run, quantize="int3")
    with pytest.raises(RequestError, match="dtype=q8_0 is for gguf"):
        from glassformer.cli.checkpoints import convert_checkpoint

        convert_checkpoint(str(run), "x", "hf", "q8_0", False)


def test_check_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "gpt2@1m+vocab_size=64+layers=1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and {"decoding", "round trip", "reference"} == {row["check"] for row in found["rows"]}


def test_doors_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "llama@1m+alibi", "--doors"]) == 0
    said = capsys.readouterr().out
    assert "LlamaForCausalLM is closed by mixer.position=alibi (rotary would open it)" in said
    assert main(["inspect", "llama-3-8b", "--doors"]) == 0
    assert "exports as LlamaForCausalLM; runs in transformers, vLLM, llama.cpp: yes" in capsys.readouterr().out
