"""Files of the page, read once and sent by name: a request for any other name is refused."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from glassformer.figures import stylesheet

TYPES = {
    "html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8",
    "json": "application/json",
}  # fmt: skip
INDEX = "index.html"
LANGUAGES = ("en", "zh")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy of the page: no other address is fetched, and only files of the page run as code."""


@cache
def page_files() -> dict[str, bytes]:
    """Returns the content of each file of the page by name, with the styles of the figures."""
    folder = files(__package__).joinpath("page")
    found = {one.name: one.read_bytes() for one in folder.iterdir() if one.name.rpartition(".")[2] in TYPES}
    return found | {"figures.css": stylesheet().encode()}


def media_type(name: str) -> str:
    """Returns the media type of a file of the page."""
    return TYPES[name.rpartition(".")[2]]
