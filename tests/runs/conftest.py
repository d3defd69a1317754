"""A small text, and runs on it."""

from __future__ import annotations

import pytest

from glassformer.runs.request import RunRequest, TextPlaces
from glassformer.text import prepare
from tests.runs.stand_in import CONTEXT, ask


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> TextPlaces:
    folder = tmp_path_factory.mktemp("text")
    source = folder / "text.txt"
    source.write_text("\n".join(f"line {n} of a small text about cats and trees" for n in range(400)))
    text = prepare(source, "char", CONTEXT, cache_dir=folder / "cache")
    text.tokenizer.save(folder / "tokenizer")
    return TextPlaces.of(text, folder / "tokenizer")


@pytest.fixture
def asked(places: TextPlaces) -> list[RunRequest]:
    """Two sizes, two budgets, two seeds, two rates: what no comparison would take together."""
    tiny = "+layers=1+d_model=16+heads=2"
    return [
        ask(places, f"gpt2@1m{tiny}", learning_rate=1e-3),
        ask(places, f"llama@1m{tiny}+layers=2", tokens=256, learning_rate=1e-2, seed=4),
    ]
