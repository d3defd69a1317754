"""A whole page that needs nothing else; the writers of pages and of figures."""

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
    """The colours, lines and type of the figures, for light, dark and paper."""
    return files(__package__).joinpath("figures.css").read_text(encoding="utf-8")


def script() -> str:
    """The one small script: read-outs, legends, sortable tables, the download of embedded data."""
    return files(__package__).joinpath("interact.js").read_text(encoding="utf-8")


def document(title: str, *body: Markup, style: str = "", code: str = "") -> str:
    """The page as text; `style` and `code` come after those of the figures.

    Its policy lets nothing run but this code, and nothing be fetched from anywhere."""
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
    """A command in a box of its own; with the script it has a button that copies it."""
    words = join((tag("span", word, class_="gf-word") if word else "" for word in command.split(" ")), " ")
    box = tag("code", words, class_="gf-code", tabindex="0", role="group", aria_label=label)
    button = tag("button", "Copy", type="button", class_="gf-copy", data_copy=command, hidden=True,
                 aria_label=f"Copy: {label[:1].lower()}{label[1:]}")  # fmt: skip
    return tag("span", box, button, class_="gf-command")


def embedded(values: object, name: str) -> Markup:
    """Data in a page, which its script finds by `name`: strict JSON, with nothing in it that could end a script."""
    text = json.dumps(values, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return tag("script", Markup(text), type="application/json", id=name)


def write_document(page: str, path: str | os.PathLike[str]) -> Path:
    """Writes the page, and its folder where that is missing: whoever looks finds the old file or the whole new one.

    Raises WorkError where the disk refuses."""
    target = Path(path)
    replace_text(target, page)
    return target


def write_figure(figure: Any, path: Path, dpi: int) -> None:
    """Writes a figure of matplotlib; a .png has a mark of its origin, as pages have. Raises WorkError if the disk
    refuses."""
    marked = {"metadata": {"Software": "Glassformer"}} if path.suffix.lower() == ".png" else {}
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=dpi, **marked)
