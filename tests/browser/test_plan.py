"""The page of a plan, opened: axe finds nothing, nothing runs over the edge, formulas unfold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glassformer.cli import main

View = Callable[..., Any]
NARROW = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plans")
    layout = ["--layout", "dp=4,tp=4,pp=2,sp=1,zero=1,micro=1,recompute=full"]
    asked = {
        "train": ["llama-3-8b", "--train", "--gpu", "h100:8", "--nodes", "4", "--batch", "64", *layout],
        "generate": ["mixtral-8x7b", "llama-3-8b", "--gpu", "h100:2"],
    }
    for name, command in asked.items():
        assert main(["plan", *command, "--out", str(folder / f"{name}.html")]) == 0
    return {name: folder / f"{name}.html" for name in asked}


@pytest.mark.parametrize("how", [{}, {"scheme": "dark"}, NARROW, NARROW | {"scheme": "dark"}, {"forced": True}])
@pytest.mark.parametrize("name", ["train", "generate"])
def test_axe_finds_nothing(name: str, how: dict[str, Any], pages: dict[str, Path], view: View, axe: Any):
    page = view(pages[name], **how)
    page.locator("summary").evaluate_all("(all) => all.forEach((one) => one.click())")
    assert axe(page) == []
    wide, room = page.evaluate("() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= room


def test_a_formula_opens_to_its_numbers(pages: dict[str, Path], view: View):
    page = view(pages["train"])
    numbers = page.get_by_text("= 32 * (3 * 14336 * 4096)")
    assert not numbers.is_visible()
    page.locator("summary", has_text="L * (3 * f * d)").click()
    assert numbers.is_visible()
