"""The precision of weights that is chosen for a machine: the fastest, where its cost is known; what is asked for is
obeyed."""

from __future__ import annotations

import inspect
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer.cli.verbs import serving
from glassformer.conversion import gguf
from glassformer.naming import chatting, fastest
from glassformer.naming.fastest import COST, LARGE, decided, measured, seconds, unpaid
from glassformer.options import ModelOptions
from glassformer.serving import server
from tests.refused import refused

AVX2 = {"float32": 9.0, "bf16": 5.0, "int8": 3.0, "int4": 2.0}
FAST_BF16 = {"float32": 9.0, "bf16": 3.0, "int8": 2.9, "int4": 2.8}
PLAIN = {"float32": 3.0, "bf16": 9.0, "int8": 9.0, "int4": 3.1}


def play(monkeypatch: pytest.MonkeyPatch, taken: dict[str, float], bf16: bool = False) -> None:
    monkeypatch.setattr(fastest, "seconds", lambda: taken)
    monkeypatch.setattr(fastest, "packs_bf16", lambda device="cpu": bf16)


@pytest.mark.parametrize(
    ("taken", "bf16", "chosen"),
    [
        (AVX2, False, ("int8", None)),
        (FAST_BF16, False, (None, "bfloat16")),
        (FAST_BF16, True, ("bf16", None)),
        (PLAIN, False, (None, None)),
    ],
)
def test_chosen_precision_is_the_fastest_measured(
    taken: dict[str, float], bf16: bool, chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, taken, bf16)
    found, words = decided("gpt2", ModelOptions(), "cpu")
    assert (found.quantize, found.dtype) == chosen
    if found == ModelOptions(quantize=None):
        assert not words
    else:
        assert str(found.quantize or found.dtype) in words and "--quantize none" in words


@pytest.mark.parametrize(
    ("expression", "asked", "device"),
    [
        ("gpt2", {"dtype": "float32"}, "cpu"),
        ("gpt2", {"compile": True}, "cpu"),
        ("gpt2", {"quantize": None}, "cpu"),
        ("gpt2", {}, "cuda"),
        ("llama@10m", {}, "cpu"),
        ("no such model", {}, "cpu"),
    ],
)
def test_stored_weights_are_kept_for_a_dtype_a_gpu_or_a_small_model(
    expression: str, asked: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, AVX2)
    assert decided(expression, ModelOptions(**asked), device) == (ModelOptions(**{**asked, "quantize": None}), "")


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4", "keep"])
def test_named_precision_is_obeyed(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, PLAIN)
    assert decided("gpt2", ModelOptions(quantize=kind), "cpu") == (ModelOptions(quantize=kind), "")


def test_fastest_is_no_more_exact_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a server whose memory has no room for more."""
    config = gf.preset("gpt2")
    play(monkeypatch, PLAIN)
    assert fastest.fastest(config, "int8", True) == "int4" and fastest.fastest(config, "bf16", True) == "int4"
    assert fastest.fastest(config, "int8") == "int8" and fastest.fastest(config, "int4") == "int4"
    play(monkeypatch, FAST_BF16)
    assert fastest.fastest(config, "int8") == "int8" and fastest.fastest(config, None) == "bf16"
    assert fastest.fastest(gf.preset("llama@10m"), "int8") == "int8"


@pytest.mark.parametrize(("kinds", "same"), [({"Q4_1"}, True), ({"Q4_0", "Q4_1"}, True), ({"Q8_0", "Q4_1"}, False)])
def test_four_bits_are_chosen_only_for_files_of_four_bits(
    kinds: set[str], same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured cost of int4 is that of weights with the values of 4 bits already."""
    play(monkeypatch, AVX2)
    file, config = tmp_path / "a.gguf", gf.preset("gpt2")
    monkeypatch.setattr(fastest, "preset", lambda _: config)
    entries = {f"blk.{i}.w.weight": SimpleNamespace(dtype=kind, shape=(2, 2)) for i, kind in enumerate(kinds)}
    entries["token_embd.weight"] = SimpleNamespace(dtype="Q8_0", shape=(2, 2))
    entries["blk.0.norm.weight"] = SimpleNamespace(dtype="F32", shape=(2,))
    monkeypatch.setattr(gguf, "open_tensors", lambda _: nullcontext(SimpleNamespace(entries=entries)))
    monkeypatch.setattr(fastest.checkpoints, "locate", lambda _: file)
    assert decided(file, ModelOptions(), "cpu")[0].quantize == ("int4" if same else "int8")
    assert decided(f"{file}+window:9", ModelOptions(), "cpu")[0].quantize == "int8"


@pytest.mark.parametrize("expression", ["mixtral-8x7b", "mamba-130m", "bart-base", "bert-base"])
def test_models_of_other_parts_than_the_sample_and_encoders_are_left_as_they_are(
    expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, AVX2)
    assert gf.preset(expression).num_params() > LARGE
    assert decided(expression, ModelOptions(), "cpu") == (ModelOptions(quantize=None), "")


def test_a_clock_that_is_too_coarse_chooses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    assert seconds(lambda: dict.fromkeys(COST, 0.0)) == {}
    play(monkeypatch, {})
    assert decided("gpt2", ModelOptions(), "cpu") == (ModelOptions(quantize=None), "") and unpaid("int8") == ""


def test_model_of_the_library_says_which_precision_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, AVX2)
    monkeypatch.setattr(chatting, "load", lambda *_, **how: SimpleNamespace(model=torch.nn.Linear(1, 1), how=how))
    with pytest.warns(UserWarning) as said:
        found: Any = chatting.loaded_as("gpt2", ModelOptions())
    assert "int8" in str(said[0].message)
    assert found.how["quantize"] == "int8"


def test_packing_without_gain_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, PLAIN)
    assert "int8" in unpaid("int8") and "float32" in unpaid("int8")
    play(monkeypatch, AVX2)
    assert not any(map(unpaid, ("bf16", "int8", "int4")))


def test_load_warns_about_packing_without_gain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = gf.preset("llama@0.1m+vocab_size=257+context=32")
    gf.save(config.build(seed=0), None, tmp_path / "small")
    play(monkeypatch, PLAIN)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fastest.Unpaid)
        gf.load(tmp_path / "small", quantize="int8")  # too small for a warning
    monkeypatch.setattr("glassformer.naming.loading.LARGE", 1000)
    with pytest.warns(fastest.Unpaid):
        gf.load(tmp_path / "small", quantize="int8")


def test_seconds_are_measured_once_for_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    calls: list[int] = []

    def measure() -> dict[str, float]:
        calls.append(1)
        return dict(AVX2)

    assert seconds(measure) == AVX2 == seconds(measure) and len(calls) == 1
    for spoilt in ('{"x": 1}', '{"KEY": {"float32": "fast"}}', "{"):
        (tmp_path / fastest.FILE).write_text(spoilt.replace("KEY", _key()))
        assert seconds(measure) == AVX2
    assert len(calls) == 4


def _key() -> str:
    return f"{fastest.thread_cache.here()}, {fastest.few_rows.kernel() or 'torch'}"


def test_measurement_covers_every_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest, "SAMPLE", "llama@0.1m+vocab_size=64+context=16")
    monkeypatch.setattr(fastest, "OTHER_BYTES", 1 << 12)
    before = torch.get_rng_state()
    found = measured()
    assert list(found) == list(COST) and all(0 < one < 60 for one in found.values())
    assert torch.equal(before, torch.get_rng_state())


def test_model_in_memory_is_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, AVX2)
    config = gf.preset("llama@0.1m+vocab_size=257+context=32")
    loaded = gf.Loaded(config.build(seed=0), config, None)
    assert chatting.loaded_as(loaded, ModelOptions()).model is loaded.model
    with refused(code="conflict", field="quantize"):
        chatting.loaded_as(loaded, ModelOptions(quantize="int8"))
    assert config.num_params() < LARGE


class Enough(Exception):
    """End of a test, once it is known how a model is loaded."""


def loaded_by_a_server(
    monkeypatch: pytest.MonkeyPatch, name: str = "gpt2", **options: Any
) -> tuple[str | None, str | None, str]:
    """Returns quantize and dtype with which a server loads a model, and the sentence about its choice."""
    found: list[Any] = []

    def load(_: str, **how: Any) -> Any:
        found.extend((how["quantize"], how["dtype"]))
        return gf.Loaded(config.build(seed=0), config, None)

    def served(*given: Any) -> None:
        found.append(given[-1])
        raise Enough

    pytest.importorskip("uvicorn", reason="pip install 'glassformer[serve]'")
    pytest.importorskip("starlette", reason="pip install 'glassformer[serve]'")
    config = gf.preset("llama@0.1m+vocab_size=257+context=32")
    monkeypatch.setattr(chatting, "load", load)
    monkeypatch.setattr(server, "Served", served)
    for ability in ("packs_bf16", "onednn_in_bf16"):
        monkeypatch.setattr(chatting, ability, lambda device="cpu": False)
    with pytest.raises(Enough):
        gf.serve(name, dry=True, **options)
    return found[0], found[1], found[2]


@pytest.mark.parametrize(
    ("taken", "bf16", "chosen"),
    [
        (AVX2, False, ("int8", "bfloat16")),
        (FAST_BF16, False, (None, "bfloat16")),
        (FAST_BF16, True, ("bf16", "bfloat16")),
        (PLAIN, False, (None, None)),
    ],
)
def test_server_takes_the_fastest_unless_asked(
    taken: dict[str, float], bf16: bool, chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processors: a plain one, two that are fast in bf16, and one on which packing does not pay."""
    monkeypatch.setattr(server.machine, "free_memory", lambda *_: None)
    play(monkeypatch, taken, bf16)
    *how, words = loaded_by_a_server(monkeypatch)
    assert tuple(how) == chosen and bool(words) == (chosen != (None, None))
    assert loaded_by_a_server(monkeypatch, quantize=None) == (None, None, "")
    assert loaded_by_a_server(monkeypatch, dtype="float32") == (None, "float32", "")
    assert loaded_by_a_server(monkeypatch, quantize="keep") == ("keep", None, "")
    for kind in ("int8", "int4"):
        assert loaded_by_a_server(monkeypatch, quantize=kind) == (kind, "bfloat16", "")
    for name in ("llama@10m", "bert-base", "mamba-130m"):
        assert loaded_by_a_server(monkeypatch, name) == (None, None, "")


@pytest.mark.parametrize("taken", [AVX2, PLAIN, {}])
def test_server_names_a_precision_that_the_memory_forced(
    taken: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory of three bytes for each weight: bf16 fits, and int8 is taken if a token takes less time in it."""
    play(monkeypatch, taken)
    for name in ("gpt2", "llama@10m"):
        memory = 3 * gf.preset(name).num_params()
        monkeypatch.setattr(server.machine, "free_memory", lambda *_, memory=memory: memory)
        kind, dtype, words = loaded_by_a_server(monkeypatch, name, ctx=2, slots=1)
        faster = taken is AVX2 and name == "gpt2"
        assert (kind, dtype) == ("int8" if faster else None, "bfloat16")
        assert "--quantize none" in words and ("free memory" in words) == (not faster)


def test_verb_and_function_of_a_server_have_the_default_of_generate() -> None:
    for function in (gf.serve, serving.serve):
        assert inspect.signature(function).parameters["quantize"].default == ModelOptions().quantize == "auto"


def test_quantisation_of_a_loaded_model_is_refused_by_a_server() -> None:
    config = gf.preset("llama@0.1m+vocab_size=257+context=32")
    with refused(code="conflict", field="quantize"):
        server.served_models(gf.Loaded(config.build(seed=0), config, None), "int8", None, None, None, 1)


@pytest.mark.parametrize(("packs", "asked"), [(True, "bf16"), (False, None)])
def test_bf16_is_plain_where_packed_weights_are_slower(
    packs: bool, asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    config = gf.preset("llama@0.1m+vocab_size=257+context=32")

    def load(_: str, **how: Any) -> Any:
        found.extend((how["quantize"], how["dtype"]))
        return gf.Loaded(config.build(seed=0), config, None)

    monkeypatch.setattr(chatting, "load", load)
    monkeypatch.setattr(chatting, "packs_bf16", lambda device="cpu": packs)
    monkeypatch.setattr(chatting, "onednn_in_bf16", lambda device="cpu": True)
    chatting.loaded_as("gpt2", ModelOptions(quantize="bf16", device="cpu"))
    assert found == [asked, "bfloat16"]
