"""Pieces of HTML that every section uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ..figures import Markup, breakable, document, embedded, join, swatch, tag
from ..figures.style import colour
from ..runs.arms import Arm


@dataclass(frozen=True)
class Absent:
    """Placeholder for a section without content: the reason, in half a sentence, and the command that would fill it."""

    title: str
    reason: str
    command: str = ""


def framed(
    title: str, header: Markup, contents: Mapping[str, tuple[str, Markup]], data: object, name: str, skip: str
) -> str:  # fmt: skip
    """Returns a page as HTML text: header, table of contents, sections (key -> heading, content), and `data` as JSON in
    an element with the id `name`. `skip` names the target of the skip link for keyboard users."""
    links = [tag("li", tag("a", heading, href=f"#{key}")) for key, (heading, _) in contents.items()]
    nav = tag("nav", tag("ul", *links), aria_label="Contents") if len(links) > 1 else None
    main = tag("main", *(part for _, part in contents.values()), id="content", tabindex="-1")
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    skipping = tag("a", f"Skip to the {skip}", href="#content", class_="gf-skip")
    return document(title, skipping, tag("div", header, nav, main, class_="page"), embedded(data, name), style=style)


def section(key: str, title: str, *children: object) -> Markup:
    """Returns a section with its heading, which is the target of links."""
    return tag("section", tag("h2", title, id=key), *children, aria_labelledby=key)


def arm_name(arm: Arm, plain: bool = False) -> Markup:
    """Returns the name of an arm as bold HTML, in the colour of the arm unless `plain`."""
    return tag("b", breakable(arm.name, "+"), class_="arm" if plain else f"arm {colour(arm.index)}")


def arm_label(arm: Arm) -> Markup:
    """Returns the name of an arm after a sample of the line and the marker that the arm has in the figures."""
    return tag("span", swatch(arm.index), arm_name(arm), class_="arm-label")


def scroll(label: str, *children: object) -> Markup:
    """Returns a region that scrolls sideways by itself on a narrow screen, also by keyboard, labelled for screen
    readers."""
    return tag("div", *children, class_="scroll gf-scroll", role="region", aria_label=label, tabindex="0")


def caption(*children: object) -> Markup:
    """Returns a paragraph of small text, for below a figure or a table."""
    return tag("p", *children, class_="caption")


def figure(picture: Markup, *after: object) -> Markup:
    return tag("figure", picture, *after)


def two_sizes(wide: Markup, narrow: Markup) -> Markup:
    """Returns two drawings of one figure, for wide and for narrow screens; the style sheet shows the one that fits."""
    return join([tag("div", wide, class_="wide"), tag("div", narrow, class_="narrow")])


def none(reason: str) -> Markup:
    """Returns the HTML of a missing value: a dash, with the reason below it."""
    return join([tag("span", "–", aria_hidden="true"), tag("small", reason, class_="why")])


def cell(*children: object, **attributes: Any) -> Markup:
    return tag("td", *children, **attributes)
