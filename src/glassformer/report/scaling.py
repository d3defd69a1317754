"""The page of a scaling law: its figures with intervals, what it was fitted to, and how well it predicts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..figures import (
    Axis,
    Markup,
    Series,
    copyable,
    count,
    document,
    embedded,
    legend,
    line_chart,
    si,
    tag,
    write_document,
)
from .html import caption, cell, figure, scroll, section, two_sizes


def write_scaling(found: dict[str, Any], command: str, path: str | os.PathLike[str]) -> Path:
    """Writes the page of a law, as `laboratory.summary` gives it."""
    return write_document(render_scaling(found, command), path)


def render_scaling(found: dict[str, Any], command: str) -> str:
    """The page as text."""
    parts = {
        "figures": ("Figures", _figures(found)), "fit": ("Fit", _fit(found)),
        "predictions": ("Predictions", _predictions(found)),
        "allocation": ("Compute-optimal sizes", _allocation(found)),
    }  # fmt: skip
    there = [section(key, title, part) for key, (title, part) in parts.items() if part is not None]
    header = tag(
        "header", tag("p", "Glassformer scaling law", class_="kicker"), tag("h1", found["formula"]),
        tag("p", finding(found), class_="finding"), copyable(command),
    )  # fmt: skip
    links = [tag("li", tag("a", title, href=f"#{key}")) for key, (title, part) in parts.items() if part is not None]
    body = tag(
        "div", header, tag("nav", tag("ul", *links), aria_label="Contents"),
        tag("main", *there, id="content", tabindex="-1"), class_="page",
    )  # fmt: skip
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    skip = tag("a", "Skip to the figures", href="#content", class_="gf-skip")
    return document("Scaling law", skip, body, embedded(found, "law"), style=style)


def finding(found: dict[str, Any]) -> str:
    """What the fit says, in a few sentences."""
    told = [
        f"Fitted to {_many(found['points'], 'point')} of {_many(found['runs'], 'run')}, up to "
        f"{si(found['largest_flops'])} FLOPs: off by {found['error']:.2%} on average, "
        f"{found['worst_error']:.2%} at most."
    ]
    if found["left_out"]:
        told.append(f"{_many(found['left_out'], 'row')} without a finite loss {_is(found['left_out'])} left out.")
    out = found["held_out"]
    if "error" in out:
        told.append(
            f"From all others the largest run is predicted at {out['predicted']:.4f}; it has {out['measured']:.4f} "
            f"({out['error']:+.2%})."
        )
    if found["starts_that_agree"] < 0.5:
        told.append("Most starts ended elsewhere: these points do not say much about this law.")
    return " ".join(told)


def _figures(found: dict[str, Any]) -> Markup:
    rows = [
        (one["name"], f"{one['value']:.6g}", f"{one['low']:.4g} to {one['high']:.4g}",
         "" if one["without_furthest"] is None else f"{one['without_furthest']:.6g}")
        for one in found["figures"]
    ]  # fmt: skip
    told = f"Intervals of {found['level']:.0%}: runs drawn again with replacement, all points of a run together."
    heads = ("figure", "fitted", "interval", "without the 5 points furthest off")
    return figure(_table("Figures of the law", heads, rows), caption(told))


def _fit(found: dict[str, Any]) -> Markup:
    series = [
        Series(f"{count(curve['params'])} parameters", [tuple(point) for point in curve["fitted"]], style=i,
               markers=[tuple(point) for point in curve["measured"]])
        for i, curve in enumerate(found["curves"])
    ]  # fmt: skip
    x, y = Axis("Training tokens", "log", unit="tokens"), Axis("Loss, nats", decimals=3)
    title = "Loss against tokens, measured and fitted"
    wide = line_chart(series, x, y, title)
    narrow = line_chart(series, x, y, title, width=372, height=300, end_labels=False)
    return figure(two_sizes(wide, narrow), legend(series), caption("Markers are runs; lines are the law at that size."))


def _predictions(found: dict[str, Any]) -> Markup | None:
    rows = [
        (f"{si(one['params'])} parameters, {si(one['tokens'])} tokens", f"{one['loss']:.4f}",
         f"{one['low']:.4f} to {one['high']:.4f}")
        for one in found["predicted"]
    ]  # fmt: skip
    rows += [
        (f"the best with {si(one['flops'])} FLOPs: {si(one['params'])} parameters, {si(one['tokens'])} tokens "
         f"({one['ratio']:.1f} a parameter)", f"{one['loss']:.4f}", "")
        for one in found["optimal"]
    ]  # fmt: skip
    if not rows:
        return None
    told = "Intervals are of the law; a run scatters around it by the noise of its seed."
    return figure(_table("Predictions", ("of", "loss", "interval"), rows), caption(told))


def _allocation(found: dict[str, Any]) -> Markup | None:
    fitted = next((one for one in found["figures"] if one["name"] == "a"), None)
    rows = []
    if fitted is not None:
        rows.append(("the fitted law", f"{fitted['value']:.3f}", f"{fitted['low']:.3f} to {fitted['high']:.3f}"))
    ways = {"parabolas": "a parabola through each budget", "lowest": "the lowest loss of each budget"}
    for way, told in ways.items():
        one = found["allocation"][way]
        read = one.get("why", _many(one.get("optima", 0), "budget"))
        rows.append((told, f"{one['a']:.3f}" if "a" in one else "–", read))
    return figure(
        _table("Exponents of the compute-optimal size", ("read from", "a of N ~ C^a", ""), rows),
        caption("A parabola is biased where the best size is not in the middle of those tried."),
    )


def _table(label: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    head = tag("thead", tag("tr", *(tag("th", word, scope="col") for word in headings)))
    body = tag("tbody", *(tag("tr", tag("th", row[0], scope="row"), *map(cell, row[1:])) for row in rows))
    return scroll(label, tag("table", head, body))


def _many(value: int, noun: str) -> str:
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def _is(value: int) -> str:
    return "is" if value == 1 else "are"
