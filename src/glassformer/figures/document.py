"""Complete pages without external files; writing of pages and figures."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..files import atomic_file, replace_text
from .markup import Markup, join, tag


def stylesheet() -> str:
    """Returns the CSS of the figures: colours, lines and fonts, for light and dark screens and for paper."""
    return files(__package__).joinpath("figures.css").read_text(encoding="utf-8")


def script() -> str:
    """Returns the JavaScript for values on hover, legends, sortable tables, and the download of embedded data."""
    return files(__package__).joinpath("interact.js").read_text(encoding="utf-8")


def document(title: str, *body: Markup, style: str = "", code: str = "") -> str:
    """Returns a complete HTML page as text; `style` (CSS) and `code` (JavaScript) come after those of the figures.

    The page's content security policy runs only this code and loads nothing."""
    code = script() + code
    fingerprint = base64.b64encode(hashlib.sha256(code.encode("utf-8")).digest()).decode("ascii")
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{fingerprint}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content="Glassformer"),
        tag("title", title),
        tag("style", Markup(stylesheet() + style)),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', *body, tag('script', Markup(code))), lang='en')}\n"


def copyable(command: str, label: str = "The command") -> Markup:
    """Returns a command in a box, with a button for copying it, which the page's script makes visible; `label` names
    the box for screen readers."""
    words = join((tag("span", word, class_="gf-word") if word else "" for word in command.split(" ")), " ")
    box = tag("code", words, class_="gf-code", tabindex="0", role="group", aria_label=label)
    button = tag("button", "Copy", type="button", class_="gf-copy", data_copy=command, hidden=True,
                 aria_label=f"Copy: {label[:1].lower()}{label[1:]}")  # fmt: skip
    return tag("span", box, button, class_="gf-command")


def embedded(values: object, name: str) -> Markup:
    """Returns a <script> element that holds `values` as strict JSON, escaped so that no text in them can end the
    element; the page's code finds it by its id, `name`."""
    text = json.dumps(values, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return tag("script", Markup(text), type="application/json", id=name)


def write_document(page: str, path: str | os.PathLike[str]) -> Path:
    """Writes the text of a page to `path`, making its folder if needed, and returns the path. An old file is replaced
    atomically.

    Raises WorkError if the disk refuses."""
    target = Path(path)
    replace_text(target, page)
    return target


def write_figure(figure: Any, path: Path, dpi: int) -> None:
    """Writes a matplotlib figure in the format of the path's ending; a .png names Glassformer as its software. Raises
    WorkError if the disk refuses."""
    marked = {"metadata": {"Software": "Glassformer"}} if path.suffix.lower() == ".png" else {}
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=dpi, **marked)
