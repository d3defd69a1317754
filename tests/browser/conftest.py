"""A browser for the tests of this folder, and what they ask of a page. Without one they are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.browser import look, missing, opened


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if why := missing():
        pytest.skip(why)
    with opened() as found:
        yield found


@pytest.fixture
def view(browser: Any) -> Iterator[Callable[..., Any]]:
    """`view(path, width=390, scheme="dark", forced=True)`: the page of a file, drawn. A script that fails, or anything
    that is fetched, fails the test."""
    pages: list[Any] = []
    complaints: list[str] = []

    def open_page(path: str | Path, **how: Any) -> Any:
        pages.append(look(browser, path, complaints=complaints, **how))
        return pages[-1]

    yield open_page
    for page in pages:
        page.context.close()
    assert complaints == []


@pytest.fixture(scope="session")
def axe() -> Callable[[Any], list[str]]:
    """`axe(page)`: what axe finds wrong, a line for each rule and element; [] is what a page should give."""
    axe_of = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is missing")
    engine = axe_of.Axe()

    def found(page: Any) -> list[str]:
        rules = engine.run(page).response["violations"]
        return [
            f"{rule['id']}: {one['html'][:160]}: {one['failureSummary']}" for rule in rules for one in rule["nodes"]
        ]

    return found
