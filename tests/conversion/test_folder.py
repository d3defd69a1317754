"""A run leaves as a folder that others load, card and ends included; what is changed keeps what fits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import glassformer as gf
from glassformer.cli import main
from glassformer.conversion import folder, is_checkpoint
from glassformer.conversion.checkpoints import VLLM, runs_in
from glassformer.conversion.families import FAMILIES
from glassformer.conversion.storage.base import SingleFile
from glassformer.errors import RequestError, WorkError
from glassformer.loaded import Loaded
from glassformer.text import ByteTokenizer
from tests.refused import refused


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


@pytest.mark.parametrize("expression", ["llama@1m", "llama@1m+alibi"])
def test_the_card_shows_code_that_runs(expression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gf.save(gf.preset(f"{expression}+vocab_size=64+layers=1").build(), None, tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {})


@pytest.mark.parametrize("shard", [5e9, 100_000], ids=["one file", "shards"])
def test_stacked_matrices_are_saved_together_and_mapped_as_one(
    shard: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By us; `transformers` has other tensors between q, k and v, which are then copied."""
    copied: list[str] = []
    read_into = SingleFile.read_into

    def counted(file: SingleFile, name: str, out: Tensor, rows: slice | None = None) -> None:
        copied.append(name)
        read_into(file, name, out, rows)

    monkeypatch.setattr(SingleFile, "read_into", counted)
    monkeypatch.setattr(folder, "SHARD_BYTES", shard)
    model = gf.preset("llama@1m+gqa:2+stack.0.blocks.0.mixer.bias=true+vocab_size=64").build()
    gf.save(model, None, tmp_path / "ours")
    mine, apart = gf.load(tmp_path / "ours").model, len(copied)
    assert apart == 0 if shard > 1e9 else 0 < apart < 6 * len(model.layers)  # a shard ends between q and v
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    theirs = gf.load(tmp_path / "theirs").model
    assert len(copied) - apart == 6 * len(model.layers)  # weights and biases
    for name, weight in model.state_dict().items():
        assert torch.equal(mine.state_dict()[name], weight) and torch.equal(theirs.state_dict()[name], weight), name


def test_a_folder_with_a_config_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that gives out at any file, while another model is written over one."""
    names, write = [], folder.atomic_file

    def kept(path: Path) -> object:
        names.append(path.name)
        return write(path)

    model = gf.preset("gpt2@1m+vocab_size=64+layers=1").build()
    with monkeypatch.context() as patch:
        patch.setattr(folder, "atomic_file", kept)
        gf.save(model, None, tmp_path)
    assert sorted(names) == ["README.md", "config.json", "generation_config.json"]
    for last in range(len(names)):

        def full(path: Path, last: int = last) -> object:
            if path.name == names[last]:
                raise WorkError("the disk is full", code="disk")
            return write(path)

        gf.save(model, None, tmp_path)
        with monkeypatch.context() as patch, pytest.raises(WorkError):
            patch.setattr(folder, "atomic_file", full)
            gf.save(gf.preset("llama@1m+vocab_size=64+layers=1").build(), None, tmp_path)
        assert not is_checkpoint(str(tmp_path))
    with pytest.raises(RequestError):
        gf.save(model, None, tmp_path, family="llama")


def test_converted_format_lists_programs_that_run_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(tmp_path / "source")
    gf.save(gf.preset("llama@1m+vocab_size=257+layers=1").build(), ByteTokenizer(), source)
    for arguments, programs in (
        ([str(tmp_path / "out")], "transformers, vLLM"),
        ([str(tmp_path / "out.gguf")], "llama.cpp"),
        ([str(tmp_path / "eight.gguf"), "--dtype", "q8_0"], "llama.cpp"),
    ):
        assert main(["convert", source, *arguments]) == 0
        assert capsys.readouterr().out.rstrip().endswith(f"; runs in {programs}")
    assert {family.architecture for family in FAMILIES.values()} >= VLLM
    config, unheard = gf.preset("llama@1m"), replace(FAMILIES["llama"], architecture="NewForCausalLM")
    assert runs_in(config, FAMILIES["llama"]) == ["transformers", "vLLM", "llama.cpp"]
    assert runs_in(config, unheard) == ["transformers", "llama.cpp"]


def test_change_keeps_fitting_weights(run: Path) -> None:
    loaded = gf.load(f"{run}+window:8")
    assert loaded.fresh == ()
    old = gf.load(run)
    pairs = zip(loaded.model.parameters(), old.model.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    fewer = gf.load(f"{run}+mqa")
    assert fewer.fresh == ()
    assert fewer.regrouped == tuple(f"layers.{i}.mixer.qkv.weight" for i in range(4))


def test_names_without_weights(run: Path) -> None:
    with refused(code="missing", field="name"):
        gf.load("gpt2")
    with refused(code="conflict", field="size"):
        gf.load(f"{run}@10m")
    with refused(code="unknown", field="quantize"):
        gf.load(run, quantize="int3")
    with refused(code="conflict", field="dtype"):
        gf.convert(run, "x", dtype="q8_0")


def test_check_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "gpt2@1m+vocab_size=64+layers=1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and {"decoding", "round trip", "reference"} == {row["check"] for row in found["rows"]}


def test_check_is_as_wide_as_its_output(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow terminal for progress, and a file for the table."""
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(["check", "gpt2@1m+vocab_size=64+layers=1", "--largest", "1k"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) > 100
    assert "are more than largest=1,000" in " ".join(said.split())


@pytest.mark.slow
def test_exports_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "llama@1m+alibi", "--exports"]) == 0
    said = capsys.readouterr().out
    assert "LlamaForCausalLM is blocked by mixer.position=alibi (rotary would be supported)" in said
    assert main(["inspect", "llama-3-8b", "--exports"]) == 0
    assert "exports as LlamaForCausalLM; runs in transformers, vLLM, llama.cpp: yes" in capsys.readouterr().out


@pytest.mark.parametrize("values, count", [((float("nan"),) * 3, 3), ((float("inf"), float("-inf")), 2)])
def test_weights_that_are_not_finite_are_named_and_counted(
    values: tuple[float, ...], count: int, tmp_path: Path
) -> None:
    """In the file's own name of the tensor, once; `check` fails by it, and `convert` refuses without force."""
    model = gf.preset("llama@0.3m+layers=1+vocab_size=257").build(seed=0)
    gf.save(model, ByteTokenizer(), tmp_path / "F")
    tensors = load_file(tmp_path / "F" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name].view(-1)[: len(values)] = torch.tensor(values)
    save_file(tensors, tmp_path / "F" / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning) as warned:
        gf.load(tmp_path / "F")
    (said,) = [str(one.message) for one in warned]
    assert f"{name} ({count})" in said
    for out in ("G", "x.gguf"):
        with pytest.warns(UserWarning), refused(code="range", field="weights") as caught:
            gf.convert(tmp_path / "F", tmp_path / out, progress=False)
        assert caught.value.value == count and not (tmp_path / out).exists()
        with pytest.warns(UserWarning):
            gf.convert(tmp_path / "F", tmp_path / out, force=True, progress=False)
        assert (tmp_path / out).exists()
    with pytest.warns(UserWarning):
        proof = gf.check(tmp_path / "F", progress=False)
    assert [(row.check, row.verdict) for row in proof.rows] == [("weights", "wrong")]


def test_a_dtype_that_is_too_narrow_for_the_weights_is_refused(tmp_path: Path) -> None:
    """65,504 is the largest value of float16 (IEEE 754 binary16): 70,000 would be written as infinity."""
    model = gf.preset("llama@0.3m+layers=1+vocab_size=257").build(seed=0)
    with torch.no_grad():
        next(model.layers[0].ffn.parameters())[0, 0] = 70_000.0
    for dtype, out in (("float16", "F"), (None, "x.gguf")):
        with refused(code="range", field="weights"):
            gf.convert(Loaded(model, model.config, ByteTokenizer()), tmp_path / out, dtype=dtype, progress=False)
    gf.convert(model, tmp_path / "G", dtype="bfloat16", progress=False)
