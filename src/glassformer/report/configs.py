"""The section on how the arms are built and trained: their wiring drawn, and what sets them apart from the first."""

from __future__ import annotations

from collections.abc import Sequence

from ..figures import Markup, join, tag, wiring_drawing
from .diff import GROUPS, RECIPE, Difference, differences
from .html import arm_label, breakable, caption, scroll, section
from .read import Arm
from .sketch import describe, sketch


def config_section(arms: Sequence[Arm]) -> Markup:
    """Drawings first, then the table of differences."""
    known = [arm for arm in arms if arm.config]
    if not known:
        return section("configs", "How the arms differ", tag("p", "No config was recorded.", class_="gf-empty"))
    return section(
        "configs",
        "How the arms differ",
        _table(known),
        tag("div", *map(_card, known), class_="cards"),
        caption(
            "Read each drawing from the bottom: the line on the left is the residual stream, ⊕ adds to it. "
            "A dashed chip is a position, drawn where it acts."
        ),
    )


def _card(arm: Arm) -> Markup:
    """One arm's drawing under its name."""
    model = sketch(arm.config)
    return tag("figure", wiring_drawing(model, describe(arm.name, model)), tag("figcaption", arm_label(arm)))


def _table(arms: Sequence[Arm]) -> Markup:
    """The differences against the first arm, grouped by axis."""
    trees = [arm.config for arm in arms]
    if all(arm.recipe for arm in arms):
        trees = [{**arm.config, RECIPE: arm.recipe} for arm in arms]
    found = differences(trees)
    if len(arms) < 2:
        return tag("p", "There is one config, so there is nothing to compare it with.", class_="gf-empty")
    if not found:
        return tag("p", "The configs are the same.", class_="gf-empty")
    only = "The configs are the same; what differs is the recipe." if {d.group for d in found} == {RECIPE} else None
    heads = [
        tag("th", "Path in the config", scope="col"),
        *(tag("th", arm_label(arm), scope="col") for arm in arms),
    ]
    bodies = [_group(group, [d for d in found if d.group == group], len(arms)) for group in GROUPS]
    table = tag("table", tag("thead", tag("tr", *heads)), *(body for body in bodies if body), class_="diff")
    return join([caption(only) if only else "", scroll("Differences of the configs", table)])


def _group(group: str, found: Sequence[Difference], columns: int) -> Markup | None:
    if not found:
        return None
    head = tag("tr", tag("th", group, scope="rowgroup", colspan=str(columns + 1)), class_="group")
    return tag("tbody", head, *map(_row, found))


def _row(one: Difference) -> Markup:
    """One path; where an arm is like the first it says so quietly."""
    first, *others = one.values
    cells = [tag("td", _value(first))]
    for value in others:
        same = value == first
        cells.append(tag("td", "same" if same else _value(value), class_="same" if same else "changed"))
    return tag("tr", tag("th", tag("code", breakable(one.path or "config", ".")), scope="row"), *cells)


def _value(value: str | None) -> Markup:
    return tag("span", "absent", class_="same") if value is None else tag("code", value)
