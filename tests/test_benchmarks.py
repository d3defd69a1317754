"""The benchmarks compare like with like."""

from __future__ import annotations

import pytest

from benchmarks import train as bench

pytest.importorskip("transformers")


@pytest.mark.parametrize("family", bench.FAMILIES)
def test_both_sides_learn_from_the_same_batch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step trains: the second loss on one batch is below the first, which is near ln(vocabulary)."""
    monkeypatch.setattr(bench, "BATCH", 2)
    monkeypatch.setattr(bench, "CONTEXT", 32)
    inputs, targets = bench.batch()
    for name in ("glassformer bf16 eager", "transformers bf16 eager"):
        step = bench.sides(family)[name]()
        losses = [step(inputs, targets) for _ in range(3)]
        assert 3.5 < losses[0] < 5.0, name
        assert losses[2] < losses[0] - 0.1, name
