"""Screenshots of pages in the README: `make screenshots`, or `python -m experiments.screenshots NAME...`.

A picture is a page written by the command that a reader would type, opened in Chromium, and saved as docs/NAME.png."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.browser import look, missing, opened, settle
from glassformer.errors import RequestError, WorkError

if TYPE_CHECKING:
    from playwright.sync_api import Page

DOCS = Path(__file__).parent.parent / "docs"
SENTENCE = "When Mary and John went to the store, John gave a drink to"


@dataclass(frozen=True)
class Picture:
    """`write` makes the page in a folder, or serves it; `arrange` brings it to the state to be shown."""

    write: Callable[[Path], Path | AbstractContextManager[str]]
    arrange: Callable[[Page], None] = lambda page: None
    width: int = 1240
    height: int = 1500


def glassformer(folder: Path, *words: str) -> None:
    """Runs the command line in `folder`, as a reader would type it. Raises WorkError if it fails."""
    done = subprocess.run([sys.executable, "-m", "glassformer", *words], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise WorkError(f"glassformer {' '.join(words)} failed: {done.stderr.strip()}", code="failed")


def inspection(folder: Path) -> Path:
    glassformer(folder, "inspect", "smollm2", "--text", SENTENCE)
    return folder / "inspection" / "inspect.html"


def report(folder: Path) -> Path:
    """Returns the page in docs that `make example` wrote, because making it again takes minutes of training."""
    return DOCS / "example" / "report.html"


@contextmanager
def studio(folder: Path) -> Iterator[str]:
    """Yields the address of a running studio, and ends it."""
    command = [sys.executable, "-m", "glassformer", "studio", "llama@10m+gqa:2", "--port", "0", "--no-open"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        assert running.stdout is not None
        try:
            yield running.stdout.readline().strip()
        finally:
            running.terminate()


def composed(page: Page) -> None:
    """Opens the choices of the mixer."""
    page.locator("[data-place='0.0.mixer']").click(timeout=120_000)
    page.locator(".choice", has_text="gqa").first.wait_for(timeout=120_000)
    page.wait_for_function("() => !document.querySelector('[aria-busy]')", timeout=120_000)
    page.evaluate("() => scrollTo(0, 0)")


STORY = "The cat sat on the mat and saw the moon. The dog slept by the door and dreamt of the sea. "
"""A text to be learned in a minute."""


def trained(page: Page) -> None:
    """Trains two small models on a text that is dropped onto the page, and opens their layers."""
    page.goto(page.url.partition("#")[0] + "#/train?models=gpt2@0.1m+llama@0.1m")
    page.locator("[name=data] option").first.wait_for(state="attached", timeout=120_000)
    file = {"name": "moon.txt", "mimeType": "text/plain", "buffer": STORY.encode() * 2000}
    page.locator("#file").set_input_files(file)  # type: ignore[arg-type]
    page.wait_for_function("() => document.querySelector('[name=data]').value === 'moon.txt'", timeout=120_000)
    page.locator("[name=kind]").select_option("tokens")
    page.locator("[name=amount]").fill("300000")
    page.get_by_role("button", name="Start").click()
    page.wait_for_function(
        "() => document.querySelector('.run [role=status] b')?.textContent === 'complete'", timeout=600_000
    )
    page.locator("summary", has_text="Layers").click()
    page.locator(".maps svg").first.wait_for(timeout=120_000)


def train_shown(page: Page) -> None:
    """Shows the training with its layers, without the form above it."""
    trained(page)
    page.evaluate("() => scrollTo(0, document.querySelector('.run').offsetTop - 10)")


def written(page: Page) -> None:
    """Lets an installed model and a trained one continue a text, and shows the alternatives of a token."""
    trained(page)
    page.goto(page.url.partition("#")[0] + "#/chat?model=smollm2&prompt=The+cat+sat+on")
    page.locator("#second option").nth(1).wait_for(state="attached", timeout=120_000)
    page.locator("#second").select_option(index=page.locator("#second option").count() - 1)
    page.locator("[name=max_tokens]").fill("24")
    page.wait_for_function("() => document.querySelectorAll('.writer .bars').length === 2", timeout=120_000)
    page.get_by_role("button", name="Write").click()
    page.wait_for_function(
        "() => [...document.querySelectorAll('.tokens')].every((one) => one.children.length === 24)", timeout=120_000
    )
    page.wait_for_function("() => !document.querySelector('[aria-busy]')", timeout=120_000)
    for i in range(2):
        page.locator(".writer").nth(i).locator(".token").nth(6).click()
    page.evaluate("() => scrollTo(0, 0)")


def learned(page: Page) -> None:
    """Opens the scores of the model of two heads, with the arithmetic of one of them."""
    page.goto(page.url.partition("#")[0] + "#/learn?model=llama@1m&step=toy.8")
    page.wait_for_function("() => document.querySelectorAll('.walk').length === 3", timeout=120_000)
    page.locator("#toy ~ .region [role=grid] tr").nth(3).locator("td").nth(1).click()
    page.evaluate("() => scrollTo(0, document.querySelector('#toy').offsetTop - 10)")


PICTURES = {
    "inspection": Picture(inspection),
    "report": Picture(report, height=1600),
    "studio": Picture(studio, composed, width=1440, height=1000),
    "studio-train": Picture(studio, train_shown, width=1440, height=1000),
    "studio-write": Picture(studio, written, width=1440, height=1000),
    "studio-learn": Picture(studio, learned, width=1240, height=900),
}


def main(names: list[str]) -> None:
    """Writes the named pictures, by default all. Raises RequestError for an unknown name, or without a browser."""
    for name in names:
        if name not in PICTURES:
            raise RequestError(
                f"no picture is named {name!r}; there are {', '.join(PICTURES)}",
                code="unknown", field="names", value=name,
            )  # fmt: skip
    if why := missing():
        raise RequestError(why, code="missing", field="browser")
    with opened() as browser:
        for name in names or list(PICTURES):
            picture, path = PICTURES[name], DOCS / f"{name}.png"
            with tempfile.TemporaryDirectory() as folder:
                written = picture.write(Path(folder))
                with nullcontext(str(written)) if isinstance(written, Path) else written as place:
                    page = look(browser, place, width=picture.width, height=picture.height)
                    picture.arrange(page)
                    settle(page)
                    page.screenshot(path=path)
                    page.context.close()
            print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (RequestError, WorkError) as problem:
        sys.exit(str(problem))
