"""The page of an inspection, opened: whole for the eye, the keyboard, a screen reader, a phone, and on paper."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.browser import settle
from glassformer.config import Stage
from glassformer.introspection import capture
from glassformer.lens.inspection import Inspection, inspect
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.text import ByteTokenizer
from tests.lens.test_inspection import loud

View = Callable[..., Any]
Axe = Callable[[Any], list[str]]
TEXT = "The cat sat\u00a0on the mat.\n\tIt purred."
LONG = " ".join(f"{n} cats sat on {n} mats." for n in range(7, 20))
COMMAND = "glassformer inspect llama@1m --text 'The cat sat' --out inspection"
NARROW = {"width": 390, "height": 844}
RATIO = """(element) => {
    const pen = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d");
    const over = [];
    for (let one = element; one; one = one.parentElement) over.unshift(getComputedStyle(one).backgroundColor);
    const seen = (colours) => {
        for (const colour of colours) (pen.fillStyle = colour), pen.fillRect(0, 0, 1, 1);
        return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    };
    const [ground, ink] = [seen(over), seen([...over, getComputedStyle(element).color])];
    return (Math.max(ground, ink) + 0.05) / (Math.min(ground, ink) + 0.05);
}"""
"""The contrast of an element's words with what is painted behind them (WCAG 2)."""


def read(model: Model, text: str, **more: Any) -> Inspection:
    return inspect(model, ByteTokenizer().encode(text)[: 1 << 10], ByteTokenizer(), command=COMMAND, **more)


def hybrid() -> Model:
    """Returns a model with two layers of Mamba, one of grouped attention, one of attention in a window."""
    small = "llama@1m+layers=1+d_model=16+context=64+vocab_size=257"
    kinds = ("mamba", "mamba", "heads=4+gqa:2", "heads=4+gqa:2+window:9")
    blocks = [preset(f"{small}+{kind}").stack[0].blocks[0] for kind in kinds]
    return preset(small).replace(stack=(Stage(blocks=tuple(blocks)),)).build(seed=0).eval()


@pytest.fixture(scope="module")
def seen() -> Inspection:
    return read(loud("llama@1m+gqa:2+vocab_size=257"), TEXT, name="llama")


@pytest.fixture(scope="module")
def long() -> Inspection:
    """Returns an inspection of 300 tokens, so that maps have tiles; the residual norm of one token is an outlier."""
    found = read(loud("llama@1m+vocab_size=257+context=512"), LONG[:300], name="llama")
    rms = found.residual_rms.clone()
    rms[2:, 30] = 4000.0
    return replace(found, residual_rms=rms)


@pytest.fixture(scope="module")
def pages(seen: Inspection, long: Inspection, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    mixed = read(hybrid(), TEXT, name="hybrid", trained=False)
    made = {"short": seen, "long": long, "mixed": mixed}
    return {name: one.report(folder / f"{name}.html") for name, one in made.items()}


@pytest.fixture(scope="module")
def page(pages: dict[str, Path]) -> Path:
    return pages["short"]


def percents(page: Any, where: str) -> list[float]:
    return [float(text.replace("<", "").replace("%", "")) for text in page.locator(where).all_inner_texts()]


@pytest.mark.parametrize("how", [{}, {"scheme": "dark"}, NARROW, NARROW | {"scheme": "dark"}, {"forced": True}])
@pytest.mark.parametrize("name", ["short", "long", "mixed"])
def test_axe_finds_nothing(name: str, how: dict[str, Any], pages: dict[str, Path], view: View, axe: Axe):
    page = view(pages[name], **how)
    assert page.locator(".notice:visible").count() == (name == "mixed")
    page.locator("summary").evaluate_all("(all) => all.forEach((one) => one.click())")
    assert axe(page) == []
    wide, room = page.evaluate("() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= room


@pytest.mark.parametrize("order", [(2, 9), (9, 2)])
def test_two_clicked_tokens_list_the_heads_between_them(order: tuple[int, int], page: Path, view: View):
    """By the pattern that the model itself computes at its sites; the later token looks, whichever is clicked first."""
    opened = view(page)
    for token in order:
        opened.locator("#strip span").nth(token).click()
    settle(opened)
    model, ids = loud("llama@1m+gqa:2+vocab_size=257"), torch.as_tensor(ByteTokenizer().encode(TEXT))[None]
    patterns = capture(model, ids, "layers.*.mixer.pattern")
    weights = {
        f"layer {layer}, head {head}": float(weight)
        for layer in range(len(patterns))
        for head, weight in enumerate(patterns[f"layers.{layer}.mixer.pattern"][0, :, 9, 2])
    }
    listed = opened.locator("#pair-heads button").all_inner_texts()
    assert len(listed) == min(12, len(weights))
    shown = [weights[name] for name in listed]
    assert shown == sorted(shown, reverse=True) and shown[0] == max(weights.values())
    assert percents(opened, "#pair-heads .value") == pytest.approx([100 * one for one in shown], abs=0.6)
    assert " 9 to " in opened.locator("#pair-words").inner_text()
    opened.locator("#pair-heads button").nth(1).click()
    settle(opened)
    assert listed[1] in opened.locator("#chosen").inner_text().replace("Layer", "layer")


def test_two_clicked_tokens_of_a_long_text_have_the_weights_that_are_kept(
    long: Inspection, pages: dict[str, Path], view: View
):
    """Maps are pooled there: a weight that is not kept is marked as the mean of its tile."""
    opened = view(pages["long"])
    (strongest, weight), *_ = long.looked_at(1, 2, 121, 8)
    for token in (strongest, 121):
        opened.locator("#strip span").nth(token).click()
    settle(opened)
    names = opened.locator("#pair-heads button").all_inner_texts()
    shown = opened.locator("#pair-heads .value").all_inner_texts()
    assert len(names) == min(12, len(long.heads))
    exact = {name: float(text.rstrip("%").strip()) for name, text in zip(names, shown, strict=True) if "≈" not in text}
    assert exact["layer 1, head 2"] == pytest.approx(100 * weight, abs=0.51)


def test_no_word_is_invisible(page: Path, view: View):
    """The bytes of " " and of U+00A0 are single tokens here, and among the predicted."""
    opened = view(page)
    for where in ("#strip span", "#lens-grid td", "#predictions .chip", "#lens-grid thead th"):
        words = opened.locator(where).all_text_contents()
        assert words and all(word.strip() for word in words)
    shown = "".join(opened.locator("#strip span").all_text_contents())
    assert "cat␣sat" in shown and "⍽" in shown and "↵" in shown and "⇥" in shown


@pytest.mark.parametrize("name", ["short", "long"])
def test_attended_tokens_are_exact_and_the_rest_sums_to_one(
    name: str, seen: Inspection, long: Inspection, pages: dict[str, Path], view: View
):
    of, page = {"short": seen, "long": long}[name], view(pages[name])
    for layer, head, token in ((1, 2, len(of.ids) - 1), (0, 0, 20), (2, -1, 31)):
        for key, value in (("layer", layer), ("head", head)):
            page.select_option(f"#{key}", str(value))
        page.fill("#token", str(token))
        settle(page)
        found = of.looked_at(layer, head, token, 8)
        names = page.locator("#at li").all_inner_texts()
        assert [int(re.findall(r"(\d+)\n", line)[0]) for line in names[: len(found)]] == [key for key, _ in found]
        shown = percents(page, "#at .value")
        assert shown[: len(found)] == pytest.approx([100 * weight for _, weight in found], abs=0.51)
        assert sum(shown) == pytest.approx(100, abs=4)  # of nine rounded shares
        by = of.looked_at_by(layer, head, token, 8)
        assert percents(page, "#by .value")[: len(by)] == pytest.approx([100 * weight for _, weight in by], abs=0.51)


def test_no_predicted_token_is_impossible(seen: Inspection, view: View, tmp_path: Path):
    """Less than the page's numbers can hold is not nothing."""
    rare = seen.top_probabilities.clone()
    rare[:, :, 1:] = 1e-14
    page = view(replace(seen, top_probabilities=rare).report(tmp_path / "rare.html"))
    shown = page.locator("#predictions .said small").all_inner_texts()
    assert "0\u00a0%" not in shown and shown[1] == "< 0.1\u00a0%"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_on_colours_can_be_read(scheme: str, page: Path, view: View):
    """At every probability from 0 to 1: 4.5 to 1 at least."""
    opened = view(page, scheme=scheme)
    for share in (0, 0.25, 0.5, 0.75, 1):
        cell = opened.locator("#predictions .said small").first
        cell.evaluate("(one, share) => one.parentElement.style.setProperty('--p', share)", share)
        assert cell.evaluate(RATIO) >= 4.5
    for cell in opened.locator("#lens-grid td[role=gridcell]").all()[::17]:
        assert cell.evaluate(RATIO) >= 4.5
    for control in opened.locator(".controls select").all():
        line = "(one) => { one.style.color = getComputedStyle(one).borderTopColor; }"
        control.evaluate(line)
        assert control.evaluate(RATIO) >= 3


def test_on_a_phone_the_text_shrinks_to_the_line_around_the_token(pages: dict[str, Path], view: View):
    page = view(pages["long"], **NARROW)
    for where in ("#chosen", "#lens", "#depth"):
        before = page.locator(where).evaluate("(one) => one.getBoundingClientRect().top + scrollY")
        page.locator(where).evaluate("(one) => one.scrollIntoView()")
        page.wait_for_selector(".bench.stuck")
        assert page.locator(".bench").evaluate("(one) => one.offsetHeight") <= 0.15 * NARROW["height"]
        after = page.locator(where).evaluate("(one) => one.getBoundingClientRect().top + scrollY")
        assert after == pytest.approx(before, abs=1.5)  # nothing jumps
    token = page.locator("#strip [aria-selected=true]").bounding_box()
    pane = page.locator("#strip").bounding_box()
    assert pane["y"] <= token["y"] and token["y"] + token["height"] <= pane["y"] + pane["height"] + 1
    page.evaluate("() => scrollTo(0, 0)")
    page.wait_for_selector(".bench:not(.stuck)")


@pytest.mark.parametrize("name", ["short", "mixed"])
def test_on_a_phone_cells_have_words_and_room(name: str, pages: dict[str, Path], view: View):
    page = view(pages[name], **NARROW)
    words = page.locator("#lens-grid tbody td").all_inner_texts()
    assert len(words) >= 3 * 5 and all(words)
    assert all(page.locator("#lens-grid thead th").all_inner_texts())
    titles = page.locator("#lens-grid tbody th").all_inner_texts()  # layers, as in the table below it
    assert titles == [
        "emb.",
        *(name.removeprefix("layer ") for name in page.locator("#predictions tbody th").all_inner_texts()[1:]),
    ]
    for title in page.locator("#lens-grid tr > :first-child").all():
        assert title.evaluate("(one) => one.scrollWidth <= one.clientWidth")  # not cut
    for cell in page.locator("#head-grid [role=gridcell]").all():
        box = cell.bounding_box()
        assert box["width"] >= 24 and box["height"] >= 24
    assert page.locator("#lens-grid").bounding_box()["width"] <= NARROW["width"]
    assert page.locator(".gf-more:visible").all_inner_texts() == ["Scroll for more columns →"]  # over the predictions
    assert page.locator("#head-grid").bounding_box()["width"] <= NARROW["width"]


def test_columns_name_mixers_and_brackets_name_kv_heads(pages: dict[str, Path], view: View):
    page = view(pages["mixed"])
    kinds = page.locator("#head-grid .kinds th")
    assert [kind.get_attribute("title") for kind in kinds.all()] == [
        "mamba: layers 0 to 1", "attention: layers 2 to 2", "attention, window of 9: layers 3 to 3",
    ]  # fmt: skip
    labels = [cell.get_attribute("aria-label") for cell in page.locator("#head-grid [role=gridcell]").all()]
    assert len(labels) == 8 and labels[2].startswith("Layer 2, head 1, on KV head 0: entropy ")
    assert labels[4].startswith("Layer 2, head 2, on KV head 1")
    assert page.get_by_text("A hatched layer has no softmax").count() == 1
    assert view(pages["short"]).get_by_text("A hatched layer").count() == 0
    # Ink along the heads 0 and 1 of layer 2, at the left of their column, and none between heads 1 and 2.
    inked = page.locator("#overview").evaluate("""(canvas) => {
        const grid = document.getElementById("head-grid").getBoundingClientRect();
        const [a, b, c] = [0, 1, 2].map((head) => [...document.querySelectorAll("#head-grid [role=gridcell]")]
            .find((cell) => cell.layer === 2 && cell.head === head).getBoundingClientRect());
        const ink = (y) => canvas.getContext("2d").getImageData(a.left - grid.left + 1, y - grid.top, 1, 1).data[3];
        return [ink((a.bottom + b.top) / 2), ink(c.top - 1)];
    }""")
    assert inked[0] > 0 and inked[1] == 0


def test_by_keyboard(page: Path, view: View):
    """No picture takes the arrow keys, and both grids give them away: a reader chooses a head and a token."""
    opened = view(page)
    assert opened.locator("canvas[tabindex]").count() == 0
    assert opened.locator("canvas:not([aria-hidden=true])").count() == 0
    heads = opened.locator("#head-grid")
    assert heads.locator("[tabindex='0']").count() == 1
    heads.locator("[tabindex='0']").focus()
    for key in ("Home", "PageUp", "ArrowRight", "ArrowDown", "Enter"):
        opened.keyboard.press(key)
    opened.wait_for_function("() => document.querySelector('#chosen').textContent.startsWith('Layer 1, head 1')")
    assert heads.locator("[aria-selected=true]").get_attribute("aria-label").startswith("Layer 1, head 1")
    tokens = opened.locator("#lens-grid")
    tokens.locator("[tabindex='0']").focus()
    for key in ("Home", "ArrowRight", "ArrowUp", "Enter"):
        opened.keyboard.press(key)
    opened.wait_for_function("() => document.querySelector('#token').value === '1'")
    assert opened.evaluate("() => [document.activeElement.place, document.activeElement.depth]") == [1, 2]


def test_beyond_the_words_that_are_shown(pages: dict[str, Path], view: View):
    page = view(pages["long"], **NARROW)
    grid = page.locator("#lens-grid")
    grid.locator("[tabindex='0']").focus()
    for _ in range(12):
        page.keyboard.press("ArrowLeft")
    place = page.evaluate("() => document.activeElement.place")
    assert place == 300 - 1 - 12
    assert str(place) in "".join(cell.get_attribute("title") for cell in grid.locator("thead th").all())


def test_the_map_as_a_table(page: Path, seen: Inspection, view: View):
    opened = view(page)
    opened.select_option("#layer", "1")
    opened.select_option("#head", "3")
    opened.locator("#map-values summary").click()
    opened.wait_for_selector("#map-table td")
    weights = seen.attention[1].maps[3]
    rows = opened.locator("#map-table tbody tr")
    assert rows.count() == len(seen.ids)
    shown = rows.nth(9).locator("td").all_inner_texts()
    found = [float(text.replace("<", "").replace("%", "")) if text else 0.0 for text in shown]
    assert found == pytest.approx((100 * weights[9]).tolist(), abs=0.51)


def test_its_numbers_can_be_taken_away(page: Path, seen: Inspection, view: View, tmp_path: Path):
    opened = view(page)
    assert opened.locator(".gf-code").inner_text() == COMMAND
    with opened.expect_download() as started:
        opened.get_by_text("Download the numbers").click()
    started.value.save_as(tmp_path / "inspection.json")
    assert '"residual_rms_median"' in (tmp_path / "inspection.json").read_text()


@pytest.mark.skipif(not shutil.which("pdftotext"), reason="pdftotext is missing: apt install poppler-utils")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_paper(scheme: str, pages: dict[str, Path], view: View, tmp_path: Path):
    """Nothing is cut off at the right, and no heading is the last line of a sheet."""
    page = view(pages["long"], scheme=scheme)
    page.pdf(path=tmp_path / "page.pdf", prefer_css_page_size=True, print_background=True)
    text = subprocess.run(["pdftotext", "-layout", tmp_path / "page.pdf", "-"], capture_output=True, text=True).stdout
    headings = page.locator("h2, h3").all_inner_texts()
    sheets = [sheet.strip().splitlines() for sheet in text.split("\f") if sheet.strip()]
    assert len(sheets) >= 2 and all(sheet[-1].strip() not in headings for sheet in sheets)
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 688, "height": 1000})
    page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    for where in ("canvas", "#lens-grid", "#predictions", "#head-grid", "svg.gf-chart"):
        for one in page.locator(where).all():
            box = one.bounding_box()
            assert box is None or box["x"] + box["width"] <= 689
    paper = page.locator("#map").evaluate("(map) => [...map.getContext('2d').getImageData(60, 60, 1, 1).data]")
    assert sum(paper[:3]) > 0 and page.locator("#lens-grid td").first.evaluate(RATIO) >= 4.5


def test_no_weights(view: View, tmp_path: Path):
    """A model none of whose layers has maps, and a text of one token."""
    bare = read(preset("llama@1m+mamba+layers=2+d_model=16+vocab_size=257").build(seed=0).eval(), TEXT)
    assert view(bare.report(tmp_path / "bare.html")).locator("#lens-grid td[role=gridcell]").count() > 0
    one = inspect(loud("llama@1m"), torch.tensor([7]))
    assert view(one.report(tmp_path / "one.html")).locator("#lens-grid td[role=gridcell]").count() == 4
