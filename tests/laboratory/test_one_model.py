"""convert, check, inspect and why as functions: every way to name a model, what they return, write and tell."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer.config import ModelConfig
from glassformer.dynamics.coord_check import CoordinateCheck
from glassformer.laboratory import inspection
from glassformer.laboratory.quality import Quality
from glassformer.loaded import Loaded
from glassformer.runs.events import Event, ReadingEvent, StageEvent
from glassformer.text import ByteTokenizer
from glassformer.training import Recipe, Run
from tests.refused import refused

NAME = "llama@0.1m+layers=1+d_model=16+heads=2+vocab_size=257+context=32"
TEXT = "the cat sat on the mat"


@pytest.fixture
def config() -> ModelConfig:
    return gf.preset(NAME)


@pytest.fixture
def folder(config: ModelConfig, tmp_path: Path) -> Path:
    gf.save(config.build(seed=1), ByteTokenizer(), tmp_path / "model")
    return tmp_path / "model"


def ways(config: ModelConfig, folder: Path) -> dict[str, Any]:
    model = config.build(seed=1)
    return {
        "expression": NAME, "config": config, "path": folder, "changed": f"{folder}+window:8", "model": model,
        "loaded": Loaded(model, config, ByteTokenizer()),
    }  # fmt: skip


def test_check_takes_a_model_in_every_way(config: ModelConfig, folder: Path) -> None:
    for way, model in ways(config, folder).items():
        proof = gf.check(model, largest=0, progress=False)
        assert proof.passed and proof.to_dict()["ok"] is True, way
        assert {row.site for row in proof.rows} >= {"cached", "padded", "padded and cached"}, way
    with refused(code="type", field="model"):
        gf.check(3)  # type: ignore[arg-type]


def test_check_of_a_changed_checkpoint_has_its_weights(folder: Path) -> None:
    """Saved with the change and loaded by transformers, the model is equal; the unchanged reference is not."""
    assert gf.check(f"{folder}+window:8", progress=False).passed
    proof = gf.check(f"{folder}+norm.eps=0.5", reference=folder, progress=False)
    assert not proof.passed and "wrong at" in proof.finding
    assert all(row.verdict in ("ok", "inherited") for row in proof.rows if row.site == "layers.0.mixer.qkv (input)")


def test_check_does_not_change_dtype_and_weights(config: ModelConfig) -> None:
    model = config.build(seed=1).bfloat16()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    assert gf.check(model, largest=0, progress=False).passed
    assert all(
        weight.dtype == torch.bfloat16 and torch.equal(weight, before[n]) for n, weight in model.named_parameters()
    )


@pytest.mark.parametrize("way", ["path", "changed", "model", "loaded"])
def test_convert_accepts_every_source_with_weights(way: str, config: ModelConfig, folder: Path, tmp_path: Path) -> None:
    source = ways(config, folder)[way]
    found = gf.convert(source, tmp_path / "out", dtype=torch.bfloat16, progress=False)
    back = gf.load(tmp_path / "out")
    assert back.model.dtype == torch.bfloat16 and found.format == "hf"
    assert found.bytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert found.to_dict()["class"] == found.architecture in str(found)


def test_convert_reports_new_parameters(folder: Path, tmp_path: Path) -> None:
    found = gf.convert(f"{folder}+qknorm", tmp_path / "out", progress=False)
    assert found.new_parameters and found.warnings and found.warnings[0] in str(found)


def test_convert_refuses_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    with refused(code="conflict", field="dtype"):
        gf.convert(folder, tmp_path / "out", dtype="q8_0")
    with refused(code="unknown", field="dtype"):
        gf.convert(folder, tmp_path / "out.gguf", dtype="int3")
    with refused(code="missing", field="model"):
        gf.convert(gf.preset(NAME), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_progress_is_a_stream_of_events(folder: Path, tmp_path: Path) -> None:
    heard: list[Event] = []
    gf.convert(folder, tmp_path / "out", progress=heard.append)
    assert list(dict.fromkeys(one.stage for one in heard if isinstance(one, ReadingEvent))) == [
        "loading model.safetensors", "writing model.safetensors",
    ]  # fmt: skip
    heard.clear()
    rows = gf.check(NAME, largest=0, progress=heard.append).rows
    told = [(one.stage, one.done) for one in heard if isinstance(one, ReadingEvent)]
    assert told == [(f"checks of {NAME} done", done) for done in range(len(rows) + 1)]
    heard.clear()
    gf.inspect(NAME, TEXT * 9, progress=heard.append)
    told = [one.words for one in heard if isinstance(one, StageEvent)]
    assert any("its weights are random" in words for words in told) and any("context of 32" in words for words in told)


@pytest.mark.parametrize("way", ["expression", "config", "path", "changed", "loaded"])
def test_inspect_reads_a_text_with_a_model_in_every_way(way: str, config: ModelConfig, folder: Path) -> None:
    seen = gf.inspect(ways(config, folder)[way], TEXT, reading="attention_sinks", progress=False)
    assert "".join(seen.words) == TEXT and list(seen.readings) == ["attention_sinks"]
    assert seen.trained is (way not in ("expression", "config")) and seen.saved is None


def test_inspect_without_a_folder_writes_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = gf.inspect(folder, TEXT, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert seen.to_dict()["page"] is None and "page:" not in str(seen)
    assert seen.report("page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_inspect_refuses_a_model_without_a_tokenizer(config: ModelConfig) -> None:
    with refused(code="missing", field="tokenizer"):
        gf.inspect(config.build(seed=1), TEXT)


def test_anatomy_counts_equal_those_of_the_config(config: ModelConfig, folder: Path, tmp_path: Path) -> None:
    for way, model in ways(config, folder).items():
        found = gf.inspect(model)
        assert found.to_dict()["parameters"] == found.config.num_params() == config.num_params(), way
    found = gf.inspect(config, diff=f"{NAME}+window:8")
    assert found.difference == config.diff(gf.preset(f"{NAME}+window:8")) and found.to_dict()["diff"]
    assert "sliding_window" in str(found) and "sliding_window" in found.report(tmp_path / "a.html").read_text()
    assert "are equal" in str(gf.inspect(config, diff=config))


@pytest.mark.parametrize(
    ("base", "other", "named", "whole"),
    [
        ("gpt2@1m", "gpt2@1m+alibi+window:64+relu2+deepnorm", ("+alibi", "+window:64", "+deepnorm"), True),
        ("llama@1m", "llama@3m", ("+d_model=256",), True),
        ("gpt2@1m", "llama@1m", ("+rope", "+rmsnorm", "+swiglu", "+head.tied=false"), False),
        ("llama@1m", "qwen3@1m", ("+qknorm", "+mixer.n_kv_heads=1"), False),
        ("gpt2@1m", "mamba@1m", ("+mamba", "+rmsnorm"), False),
    ],
)
def test_difference_is_described_by_changes_that_make_it(
    base: str, other: str, named: tuple[str, ...], whole: bool
) -> None:
    """An oracle is the grammar: the base with the changes has the parts of the other, and if `whole` is the other."""
    found = gf.inspect(base, diff=other)
    changes = list(dict.fromkeys(row[3] for row in found.ideas if row[3]))
    assert set(named) <= set(changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of choices that a later change undoes
        left = gf.preset(base + "".join(changes)).diff(gf.preset(other))
    assert not (whole and left)
    assert not any(path.endswith(".kind") and "ffn" not in path for path in left)  # mamba has no network
    assert str(found).index(changes[0]) < str(found).index("by field")


def test_exports_name_the_published_class(config: ModelConfig) -> None:
    found = gf.inspect(config, exports=True)
    assert found.targets[0].supported and "exports as LlamaForCausalLM" in str(found)
    assert found.to_pandas()["class"].tolist()[:1] == ["LlamaForCausalLM"]
    blocked = gf.inspect(f"{NAME}+alibi", exports=True)
    assert not blocked.targets[0].supported and "mixer.position=alibi" in str(blocked)


def test_quality_packs_copies_of_a_loaded_model(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(load: Any, data: str, tokens: int, progress: Any) -> Any:
        for loaded in (load(), load()):
            loaded.model.zero_grad()
            with torch.no_grad():
                loaded.model.embedding.weight.zero_()
            yield Quality("float32", "float32", 8, tokens, 1, 1, 1.0, 2.0, None, 0.0)

    loaded = Loaded(config.build(seed=1), config, ByteTokenizer())
    monkeypatch.setattr(inspection, "qualities", packed)
    found = gf.inspect(loaded, quality=True, tokens="3k", progress=False)
    assert [row.tokens for row in found.rows] == [3000, 3000] and "python-docs" in str(found)
    assert loaded.model.embedding.weight.count_nonzero() > 0


def test_coordinate_check_draws_into_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    rows = {"resid_post": [[0.0, 0.0], [1.0, 4.0]]}
    made = CoordinateCheck((32, 64), 1, 0.01, rows, rows)
    monkeypatch.setattr(inspection, "coordinate_check", lambda config: made)
    found = gf.inspect(NAME, coord_check=True, out=tmp_path / "here", progress=False)
    assert found.picture == tmp_path / "here" / "coord-check.png" and found.picture.is_file()
    assert found.to_dict()["figure"] == str(found.picture) and "resid_post grow with the width" in str(found)
    assert gf.inspect(NAME, coord_check=True, progress=False).to_dict()["figure"] is None


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        ({"text": TEXT, "exports": True}, "conflict", "text"),
        ({"exports": True, "diff": NAME}, "conflict", "exports"),
        ({"reading": "all"}, "missing", "text"),
        ({"against": "a"}, "missing", "text"),
        ({"tokens": 9}, "conflict", "quality"),
        ({"out": "x"}, "conflict", "out"),
        ({"text": TEXT, "out": ""}, "missing", "out"),
        ({"text": ""}, "missing", "text"),
        ({"text": TEXT, "reading": "head_score"}, "unknown", "reading"),
        ({"text": TEXT, "ablate": "heads.1"}, "syntax", "ablate"),
        ({"quality": True, "tokens": "many"}, "type", "tokens"),
    ],
)
def test_inspect_refuses_options_that_exclude_each_other(options: dict[str, Any], code: str, field: str) -> None:
    with refused(code=code, field=field):
        gf.inspect(NAME, **options)


def test_why_takes_a_run_and_its_folder(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 99)
    recipe = Recipe.of(tokens=8 * 64, batch_size=4, context=16)
    name = "llama@0.1m+layers=1+d_model=16+heads=2"
    run = gf.train(name, str(tmp_path / "text.txt"), recipe, out=tmp_path / "run", progress=False)
    assert isinstance(run, Run)
    by_value, by_folder = gf.why(run), gf.why(tmp_path / "run")
    assert by_value == by_folder and by_value.verdict == "nothing wrong"
    unsaved = gf.train(name, str(tmp_path / "text.txt"), recipe, progress=False)
    assert gf.why(unsaved).losses == by_value.losses
