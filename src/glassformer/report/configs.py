"""Section on how the arms are built and trained: their wiring as drawings, and their differences from the first arm."""

from __future__ import annotations

from collections.abc import Sequence

from ..figures import Markup, ModelSketch, breakable, join, tag, wiring_drawing
from ..runs.arms import Arm
from ..runs.diff import RECIPE, Difference, differences, plain_name
from .html import Absent, arm_label, caption, scroll, section
from .sketch import describe, mapping, marked, sequence, sketch


def config_section(arms: Sequence[Arm]) -> Markup | Absent:
    """Returns the section with a wiring drawing of each arm and, for several arms, the table of their differences;
    Absent if no arm has a config."""
    known = [arm for arm in arms if arm.config]
    if not known:
        return Absent("How the arms differ", "no config was recorded.")
    models = marked([sketch(arm.config) for arm in known])
    cards = [_card(arm, model) for arm, model in zip(known, models, strict=True)]
    marks = " A heavy frame with ≠ marks what differs." if len(known) > 1 and any(m.differs for m in models) else ""
    return section(
        "configs",
        "How the arms differ" if len(known) > 1 else "How it is built",
        _table(known) if len(known) > 1 else None,
        tag("div", *cards, class_="cards"),
        caption(
            "Read a drawing from the bottom up. The line on the left is the residual stream; ⊕ adds to it. "
            f"A dashed box is a position encoding, drawn at the part that it changes.{marks}"
        ),
    )


def _card(arm: Arm, model: ModelSketch) -> Markup:
    """Returns one arm's drawing below its name."""
    return tag("figure", tag("figcaption", arm_label(arm)), wiring_drawing(model, describe(arm.name, model)))


def _table(arms: Sequence[Arm]) -> Markup:
    """Returns the HTML table of the arms' differences in config and recipe, in the order of the axes (embedding,
    position, mixer, ...), with a caption; only a sentence if nothing differs."""
    trees = [arm.config for arm in arms]
    if all(arm.recipe for arm in arms):
        trees = [{**arm.config, RECIPE: arm.recipe} for arm in arms]
    found = differences(trees)
    if not found:
        return caption("The configs are the same.")
    words = "The configs are the same; what differs is the recipe. " if {d.group for d in found} == {RECIPE} else ""
    if len(arms) > 2:
        words += "Tinted cells differ from the majority."
    alone = all(len(_stages(tree)) == 1 and len(_stages(tree)[0]) == 1 for tree in trees)
    heads = [
        tag("th", "What differs", scope="col"),
        *(tag("th", arm_label(arm), scope="col") for arm in arms),
    ]
    rows = tag("tbody", *(_row(one, alone) for one in found))
    table = tag("table", tag("thead", tag("tr", *heads)), rows, class_="diff")
    return join([scroll("Differences of the configs", table), caption(words) if words else ""])


def _stages(tree: dict) -> list[list]:
    """Returns, for each stage of a model's config (a group of layers), the list of its blocks."""
    return [sequence(mapping(stage).get("blocks")) for stage in sequence(tree.get("stack"))]


def _row(one: Difference, alone: bool) -> Markup:
    """Returns the row of one part or field: its description, its path, and each arm's value; values other than that of
    most arms are tinted. `alone` is True if all models have a single block; the description then omits the block's
    number."""
    usual = one.usual
    cells = [
        tag("td", _value(value), class_=None if usual is None else "usual" if value == usual else "changed")
        for value in one.values
    ]
    path = tag("small", tag("code", breakable(one.path or "config", ".")))
    return tag("tr", tag("th", plain_name(one.path or "config", alone), path, scope="row"), *cells)


def _value(value: str | None) -> Markup:
    return tag("span", "–", tag("span", "absent", class_="gf-quiet")) if value is None else tag("code", value)
