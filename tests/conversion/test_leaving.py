"""A folder comes in and leaves with all that it said: its own head, where an answer ends, how it is drawn."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import glassformer as gf
from glassformer import files
from glassformer.cli import main
from glassformer.conversion import folder
from glassformer.conversion.storage import safetensors
from glassformer.figures.terminal import size
from glassformer.text import BPETokenizer, ByteTokenizer, CharTokenizer, FileTokenizer
from tests.conversion.cases import CASES
from tests.generation.test_source import SIZES as TOWERS
from tests.refused import refused

SHAPE = "layers=2+d_model=32+heads=2+vocab_size=64+context=32"
FAMILIES = {"llama": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}
"""Preset -> the family's name of its embedding."""


def tied(family: str, place: Path, head: str, bare: bool = False) -> Path:
    """Writes a folder whose config ties the head, but whose file has a head in addition to the embedding."""
    gf.save(gf.preset(f"{family}@1m+{SHAPE}+tied").build(seed=1), None, place)
    weights = load_file(place / "model.safetensors")
    weights["lm_head.weight"] = weights[FAMILIES[family]].clone()
    if head == "another":
        weights["lm_head.weight"][-1, -1] += 0.5
    if bare:
        weights = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    return place


def untied() -> pytest.WarningsRecorder:
    """Expects the warning that a head, which the config ties, is another matrix and is kept."""
    return pytest.warns(UserWarning, match="untied")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_kept(family: str, tmp_path: Path) -> None:
    place = tied(family, tmp_path, "another")
    with untied() as said:
        mine = gf.load(place)
    assert len(said) == 1 and "lm_head.weight" in str(said[0].message)
    assert not mine.config.head.tied and mine.model.config == mine.config
    assert mine.model.head.weight is not None and not torch.equal(mine.model.head.weight, mine.model.embedding.weight)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(mine.model(tokens), theirs(tokens).logits)


def test_untied_head_stays_untied_in_other_changes(tmp_path: Path) -> None:
    place = tied("llama", tmp_path, "another")
    with untied():
        plain, changed = gf.load(place), gf.load(f"{place}+window:64")
    assert not changed.config.head.tied and not changed.fresh
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(changed.model(tokens), plain.model(tokens))
    with untied():
        assert gf.load(f"{place}+tied").config.head.tied


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_repeats_the_embedding_is_dropped(family: str, tmp_path: Path) -> None:
    place = tied(family, tmp_path, "same", bare=family == "gpt2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = gf.load(place)
    assert mine.config.head.tied and mine.model.head.weight is None


def test_head_that_differs_below_the_dtype_counts_as_tied(tmp_path: Path) -> None:
    """`transformers` compares what it has read, in the dtype it was asked for."""
    place = tied("llama", tmp_path, "same")
    weights = load_file(place / "model.safetensors")
    weights["lm_head.weight"] *= 1 + 1e-6
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    assert gf.load(place, dtype=torch.bfloat16).config.head.tied
    with untied():
        assert not gf.load(place).config.head.tied


class Converted(TorchDispatchMode):
    """The sizes of what is converted to another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "_to_copy" in str(func):
            self.sizes.append(made.numel())
        return made


def test_comparing_copies_no_whole_tensor(tmp_path: Path) -> None:
    """bf16 weights asked for in fp32: the pieces that are compared are converted, never a matrix."""
    v, d = 1 << 16, 128
    gf.save(gf.preset(f"llama@1m+vocab_size={v}+layers=1+tied").build(), None, tmp_path, dtype=torch.bfloat16)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with Converted() as converted:
        assert gf.load(tmp_path, dtype=torch.float32).config.head.tied
    assert sum(converted.sizes) >= 2 * v * d and max(converted.sizes) <= v * d // 4


SAID = {
    "bos_token_id": 5, "pad_token_id": 6, "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40,
    "repetition_penalty": 1.1, "max_new_tokens": 20,
}  # fmt: skip


def talking(place: Path, **said: Any) -> Path:
    """Writes a folder with a tokenizer and a generation_config.json of these settings; returns its path."""
    gf.save(gf.preset(f"llama@1m+{SHAPE}+vocab_size=257").build(), ByteTokenizer(), place)
    (place / "generation_config.json").write_text(json.dumps(said))
    return place


@pytest.mark.parametrize("ends", [[1, 2, 3], [7], 7])
def test_end_tokens_and_sampling_defaults_are_saved(ends: Any, tmp_path: Path) -> None:
    source = talking(tmp_path / "source", eos_token_id=ends, **SAID)
    loaded = gf.load(source)
    assert loaded.ends == tuple(ends if isinstance(ends, list) else [ends]) and loaded.generation == SAID
    settings = {"ends": loaded.ends, "generation": loaded.generation}
    gf.save(loaded.model, loaded.tokenizer, tmp_path / "saved", **settings)
    assert main(["convert", str(source), str(tmp_path / "converted")]) == 0
    for place in (tmp_path / "saved", tmp_path / "converted"):
        theirs = transformers.GenerationConfig.from_pretrained(place)
        assert theirs.eos_token_id == (loaded.ends[0] if len(loaded.ends) == 1 else ends)
        assert {name: getattr(theirs, name) for name in SAID} == SAID
        assert gf.load(place).ends == loaded.ends and gf.load(place).generation == SAID
        made = transformers.AutoModelForCausalLM.from_pretrained(place).generation_config
        assert (made.eos_token_id, made.temperature) == (theirs.eos_token_id, 0.6)


def test_only_known_plain_settings_travel(tmp_path: Path) -> None:
    """From an untrusted file, values of wrong types and unknown settings are dropped."""
    wrong = {"temperature": "hot", "do_sample": 1, "top_k": -1, "top_p": float("nan"), "num_beams": True, "x\ny": 1}
    source = talking(tmp_path / "source", eos_token_id=[1, -2, True, 10**30, "x"], min_p=0.1, **wrong)
    loaded = gf.load(source)
    assert loaded.ends == (1,) and loaded.generation == {"min_p": 0.1}


def test_end_token_of_the_tokenizer_is_the_default(tmp_path: Path) -> None:
    gf.save(gf.preset(f"llama@1m+{SHAPE}+vocab_size=257").build(), ByteTokenizer(), tmp_path)
    assert transformers.GenerationConfig.from_pretrained(tmp_path).eos_token_id == 256
    assert gf.load(tmp_path).ends == (256,) and gf.load(tmp_path).generation == {}


def test_a_gguf_names_the_ends_that_it_has_room_for(tmp_path: Path) -> None:
    """llama.cpp ends an answer at eos, eot and eom."""
    source = talking(tmp_path / "source", eos_token_id=[9, 256, 8])
    assert main(["convert", str(source), str(tmp_path / "model.gguf")]) == 0
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    said = [int(fields[f"tokenizer.ggml.{name}_token_id"].parts[-1][0]) for name in ("eos", "eot", "eom")]
    assert said == [256, 9, 8]
    assert gf.load(tmp_path / "model.gguf").ends == (256, 9, 8)
    assert main(["convert", str(tmp_path / "model.gguf"), str(tmp_path / "back")]) == 0
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "back").eos_token_id == [256, 9, 8]


def test_a_folder_has_the_tokenizer_that_was_saved_last(tmp_path: Path) -> None:
    model = gf.preset(f"llama@1m+{SHAPE}+vocab_size=300").build()
    ours, theirs = CharTokenizer("abc", separator=True), BPETokenizer.train(["to be or not to be"], 258)
    templated = FileTokenizer.read(saved(theirs, tmp_path / "templated", chat_template="{{ messages }}"))
    for tokenizer in (ByteTokenizer(), theirs, ours, templated, theirs, ByteTokenizer()):
        gf.save(model, tokenizer, tmp_path / "model")
        again = gf.load(tmp_path / "model").tokenizer
        assert again is not None and again.fingerprint() == tokenizer.fingerprint()
        assert (tmp_path / "model" / "chat_template.jinja").is_file() == (tokenizer is templated)
        other = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
        assert other("abc")["input_ids"] == tokenizer.encode("abc").tolist()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    gf.save(model, None, tmp_path / "model")
    assert gf.load(tmp_path / "model").tokenizer is None
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors", "notes.txt"}
    assert {path.name for path in (tmp_path / "model").iterdir()} == names


def saved(tokenizer: FileTokenizer, place: Path, **settings: Any) -> Path:
    place.mkdir()
    tokenizer.save(place)
    path = place / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return place / "tokenizer.json"


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    gf.save(gf.preset(f"llama@1m+{SHAPE}+vocab_size=257").build(), ByteTokenizer(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with refused(code="conflict", field="vocab_size"):
        gf.save(gf.preset(f"llama@1m+{SHAPE}+vocab_size=256").build(), ByteTokenizer(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(("name", "prefix"), [("t5", ""), ("bart", "model.")])
@pytest.mark.parametrize("tower", ["encoder", "decoder"])
def test_a_table_of_tokens_that_is_not_the_shared_one_is_refused(name: str, prefix: str, tower: str, tmp_path: Path):
    """transformers keeps such a table; here it would be lost without a word."""
    CASES[name].model({**TOWERS[name], "tie_word_embeddings": True}, seed=1).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    table = weights[f"{prefix}shared.weight"]
    field = f"{prefix}{tower}.embed_tokens.weight"
    for change, fits in ((0.0, True), (0.5, False)):
        save_file({**weights, field: table + change}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        if fits:
            assert torch.equal(gf.load(tmp_path).model.embedding.weight, table)
        else:
            with refused(code="unsupported", field=f"tensor {field}"):
                gf.load(tmp_path)


def test_a_bart_with_separate_tables_is_refused(tmp_path: Path):
    CASES["bart"].model({**TOWERS["bart"], "tie_word_embeddings": False}, seed=1).save_pretrained(tmp_path)
    with refused(code="unsupported", field="tensor model.decoder.embed_tokens.weight"):
        gf.load(tmp_path)


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_t5_in_half_precision_does_not_overflow(dtype: torch.dtype | None, tmp_path: Path):
    """A feed-forward network that passes 65,504, as in published T5s: what transformers computes from the same file."""
    published = CASES["t5"].model({**TOWERS["t5"], "feed_forward_proj": "relu"}, seed=1)
    with torch.no_grad():
        for name, weight in published.named_parameters():
            weight *= 3000 if name.endswith(".wo.weight") else 10 if ".wi." in name else 1
    published.half().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="float16"):
        mine = gf.load(tmp_path, dtype=dtype).model
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float32)
    source, tokens = torch.arange(12)[None], torch.arange(3)[None]
    with torch.no_grad():
        expected = theirs(input_ids=source, decoder_input_ids=tokens).logits
        half = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float16)
        torch.testing.assert_close(mine(tokens, source=source), expected, rtol=1e-4, atol=1e-4)
        assert half(input_ids=source, decoder_input_ids=tokens).logits.isfinite().all()


def test_a_compiled_model_is_saved_like_the_model_inside(tmp_path: Path):
    model = gf.preset(f"llama@1m+{SHAPE}").build(seed=0)
    gf.save(torch.compile(model, backend="eager"), None, tmp_path)
    assert torch.equal(gf.load(tmp_path).model.embedding.weight, model.embedding.weight)


def test_a_folder_keeps_its_model_until_another_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stopped in the middle of the weights, the old model still loads, and nothing else is left."""
    old, new = (gf.preset(f"llama@1m+{SHAPE}").build(seed=seed) for seed in (1, 2))
    gf.save(old, None, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def stopped(path: Path, *_: Any) -> None:
        path.write_bytes(b"half of the wei")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(safetensors, "_write_file", stopped)
        with pytest.raises(KeyboardInterrupt):
            gf.save(new, None, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    gf.save(new, None, tmp_path)
    assert torch.equal(gf.load(tmp_path).model.embedding.weight, new.embedding.weight)


@pytest.fixture
def dead() -> int:
    """The number of a process that has ended."""
    return int(subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("alive", [False, True])
@pytest.mark.parametrize("moment", ["weights", "rest"])
def test_a_folder_that_a_killed_process_left_is_named(
    moment: str, alive: bool, dead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The folder at that moment, as SIGKILL would leave it."""
    module, name = (safetensors, "write_plain") if moment == "weights" else (folder, "replace_tokenizer")
    whole, process = getattr(module, name), os.getpid() if alive else dead

    def caught(*arguments: Any) -> Any:
        if not (tmp_path / "left").exists():
            shutil.copytree(tmp_path / "out", tmp_path / "left")
        return whole(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, caught)
        patch.setattr(files.os, "getpid", lambda: process)
        patch.setattr(files, "_running", lambda process: True)
        gf.save(gf.preset(f"llama@1m+{SHAPE}").build(seed=1), None, tmp_path / "out")
    assert not list((tmp_path / "out").glob(f"{files.TEMPORARY}*"))
    left = tmp_path / "left"
    for read in (gf.load, gf.preset, gf.check, lambda name: gf.convert(name, tmp_path / "new", progress=False)):
        with refused(code="damaged", field="config.json") as problem:
            read(str(left))
        assert (str(os.getpid()) if alive else files.TEMPORARY) in str(problem.value)
    assert main(["check", str(left)]) == main(["generate", str(left), "--prompt", "a"]) == 2
    capsys.readouterr()
    gf.save(gf.preset(f"llama@1m+{SHAPE}").build(seed=1), None, left, force=True)
    assert gf.load(left).config == gf.load(tmp_path / "out").config
    assert alive or not list(left.glob(f"{files.TEMPORARY}*"))


def test_a_gguf_that_a_killed_process_left_is_named(dead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "getpid", lambda: dead)
        left = files._unused(tmp_path, ".gguf")
    left.write_bytes(b"GGUF")
    with refused(code="missing", field="name") as problem:
        gf.load(tmp_path / "out.gguf")
    assert left.name in str(problem.value)


@pytest.mark.parametrize(("out", "dtype", "smaller"), [("out", "float32", "bfloat16"), ("out.gguf", "float16", "q8_0")])
def test_convert_warns_that_packed_weights_grow(
    out: str, dtype: str, smaller: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes of packed tensors: those of gguf-py."""
    config = gf.preset(f"llama@1m+{SHAPE}+d_model=96+vocab_size=257")
    plain = gf.Loaded(config.build(seed=1), config, ByteTokenizer())
    source, place = tmp_path / "packed.gguf", tmp_path / out
    assert not gf.convert(plain, source, dtype="q8_0", progress=False).warnings
    packed = sum(one.n_bytes for one in gguf.GGUFReader(source).tensors if one.tensor_type.name == "Q8_0")
    found = gf.convert(source, place, progress=False)
    (told,) = found.warnings
    assert found.dtype == dtype == found.to_dict()["dtype"] and f"Q8_0 ({size(packed)})" in told and smaller in told
    assert size(found.bytes) in told
    assert not gf.convert(source, place, dtype=smaller, progress=False).warnings
    assert not found.replaced and gf.convert(source, place, progress=False).to_dict()["replaced"]
    assert main(["convert", str(source), str(place)]) == 0
    assert f"Q8_0 ({size(packed)})" in " ".join(capsys.readouterr().out.split())
