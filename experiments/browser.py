"""Pages in Chromium, through playwright: the eyes of the browser tests and of the screenshots."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
HERE = "http://127.0.0.1:"
WIDE, NARROW = 1440, 390
"""Pixels of a desktop, and of a phone."""


def chromium() -> str | None:
    """Returns the path of this machine's Chromium; None without one."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


def missing() -> str | None:
    """Returns the reason why no page can be opened here, with the remedy; None if pages can be."""
    if find_spec("playwright") is None:
        return "playwright is not installed: pip install -e '.[dev]'"
    return None if chromium() else f"Chromium is not installed (as {', '.join(NAMES)}): apt install chromium"


@contextmanager
def opened() -> Iterator[Browser]:
    """Yields the browser; closes it at the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


def look(
    browser: Browser,
    path: str | Path,
    width: int = WIDE,
    height: int = 900,
    scheme: Literal["light", "dark"] = "light",
    forced: bool = False,
    scale: float = 1,
    complaints: list[str] | None = None,
) -> Page:
    """Opens a file, or an address of this machine, in a new window without network; returns the drawn page. `forced`:
    the system's colours, as in Windows' high contrast. Errors of the page's scripts are appended to `complaints`."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        device_scale_factor=scale,
        color_scheme=scheme,
        forced_colors="active" if forced else "none",
        reduced_motion="reduce",
        offline=not str(path).startswith(HERE),
    )
    page = context.new_page()
    if complaints is not None:
        page.on("pageerror", lambda problem: complaints.append(str(problem)))
        page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
    page.goto(str(path) if str(path).startswith(HERE) else Path(path).resolve().as_uri())
    settle(page)
    return page


def settle(page: Page) -> None:
    """Waits until the page is drawn: it is `gf-busy` while its script unpacks data, and draws in the next frames."""
    page.wait_for_function("() => !document.querySelector('.gf-busy')")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
