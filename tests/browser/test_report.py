"""The report of a comparison, opened: with a mouse, by keyboard, on a phone, on paper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glassformer.report import write_report
from glassformer.runs.results import Results
from tests.report.sample import results
from tests.report.test_claims import jumping
from tests.report.test_dynamics import watched_results

View = Callable[..., Any]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    made = {"one seed": jumping(results(1), 4), "watched": watched_results(2), "short": results(1, diverge=False)}
    return {name: write_report(Results.of(tree), folder / f"{name}.html") for name, tree in made.items()}


@pytest.mark.parametrize("name", ["one seed", "watched"])
@pytest.mark.parametrize("how", [{}, {"scheme": "dark"}, {"width": 390}, {"width": 390, "scheme": "dark"}],
                         ids=["light", "dark", "phone", "dark phone"])  # fmt: skip
def test_axe_finds_nothing(pages: dict[str, Path], view: View, axe: Callable[[Any], list[str]], name: str,
                           how: dict[str, Any]) -> None:  # fmt: skip
    page = view(pages[name], **how)
    assert axe(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_command_is_copied_by_its_button(pages: dict[str, Path], view: View) -> None:
    page = view(pages["one seed"])
    page.evaluate("navigator.clipboard.writeText = async (words) => { window.copied = words }")
    for button in page.locator("button[data-copy]").all():
        button.click()
        assert page.evaluate("window.copied") == button.get_attribute("data-copy")
        assert button.inner_text() == "Copied"
    assert page.locator("button[data-copy]:visible").count() >= 3


def test_the_skip_link_is_the_first_stop_and_leads_to_the_results(pages: dict[str, Path], view: View) -> None:
    page = view(pages["one seed"])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the results"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top >= 0")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"


def test_contents_stay_visible_and_mark_the_current_section(pages: dict[str, Path], view: View) -> None:
    page = view(pages["watched"])
    page.locator("nav a[href='#contexts']").click()
    page.wait_for_function("() => document.querySelector('nav a[aria-current]')?.hash === '#contexts'")
    assert page.evaluate("Math.abs(document.querySelector('nav').getBoundingClientRect().top) < 2")


def test_wide_table_on_a_phone_has_a_scroll_hint(pages: dict[str, Path], view: View) -> None:
    hint = ".gf-more:visible"
    assert "Scroll for more columns" in view(pages["one seed"], width=390).locator(hint).first.inner_text()
    page = view(pages["one seed"], width=390)
    page.evaluate("const box = document.querySelector('.gf-scroll'); box.scrollLeft = box.scrollWidth")
    page.wait_for_function("() => document.querySelector('.gf-more').textContent.includes('back')")


def test_controls_keep_their_borders_where_colours_are_forced(pages: dict[str, Path], view: View) -> None:
    page = view(pages["one seed"], forced=True)
    wide = "getComputedStyle(document.querySelector('{}')).borderTopWidth"
    for place in ("fieldset span", ".gf-legend button", ".gf-copy"):
        assert page.evaluate(wide.format(place)) == "1px"
    on, off = (page.evaluate(f"getComputedStyle(document.querySelector('{place}')).backgroundColor") for place in
               ("fieldset input:checked + span", "fieldset input:not(:checked) + span"))  # fmt: skip
    assert on != off


def test_on_paper_no_page_is_wasted(pages: dict[str, Path], view: View) -> None:
    page = view(pages["short"])
    paper = page.pdf(format="A4", prefer_css_page_size=True)
    assert paper.count(b"/Type /Page\n") <= 5
