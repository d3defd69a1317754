"""The page of an inspection, opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glassformer.lens.inspection import inspect
from glassformer.text import ByteTokenizer
from tests.lens.test_inspection import loud

View = Callable[..., Any]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = "The cat sat\u00a0on the mat.\n\tIt purred."
    tokens = ByteTokenizer().encode(text)
    seen = inspect(loud("llama@1m+gqa:2+vocab_size=257"), tokens, ByteTokenizer(), name="llama")
    return seen.save(tmp_path_factory.mktemp("pages") / "inspect.html")


def test_it_opens_without_a_complaint(page: Path, view: View):
    opened = view(page)
    assert opened.locator("h1").inner_text() == "llama"
    assert opened.locator("#predictions tbody tr").count() == 4
    assert opened.locator(".notice:visible").count() == 0
