"""Heat maps: the right colour in the right place, one scale for several maps, finite whatever comes."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.figures import Axis, HeatColumn, Mark, heat_legend, heat_map, heat_scale, is_not_finite, stylesheet
from glassformer.figures.heat import LEVELS, MOST_COLUMNS, MOST_ROWS

values = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([None, "nan", "inf", "x", True, 10**400])
)
unit = heat_scale("entropy", [], low=0, high=1)


def cells(svg: str) -> list[tuple[tuple[float, float, float, float], str, str]]:
    """Returns box (left, top, right, bottom), class and title of every cell; parsing proves that the SVG is valid."""
    found = []
    for node in ElementTree.fromstring(svg).iter("path"):
        kind = node.get("class", "")
        if kind.startswith("gf-h"):
            box = re.match(r"M([\d.]+),([\d.]+)H([\d.]+)V([\d.]+)H", node.get("d", ""))
            assert box
            left, top, right, bottom = map(float, box.groups())
            found.append(((left, top, right, bottom), kind, node.findtext("title", "")))
    return found


def test_a_value_has_its_colour_at_its_place() -> None:
    columns = [HeatColumn(0, 50, [0.0, 1.0], "steps 1–50"), HeatColumn(50, 200, [0.5, None], "steps 51–200")]
    found = cells(heat_map(columns, ["0", "1"], unit, Axis("Step", low=0, high=200), "t", "layer"))
    assert [kind for _, kind, _ in found] == ["gf-h0", f"gf-h{LEVELS - 1}", f"gf-h{LEVELS // 2}", "gf-hn"]
    assert [title for *_, title in found] == [
        "layer 0, steps 1–50: 0",
        "layer 1, steps 1–50: 1",
        "layer 0, steps 51–200: 0.5",
        "layer 1, steps 51–200: not recorded",
    ]
    (first, above, second, _) = (box for box, *_ in found)
    assert first[2] == second[0] and math.isclose(3 * (first[2] - first[0]), second[2] - second[0], abs_tol=0.02)
    assert above[3] <= first[1] and above[0] == first[0]  # the first row is at the bottom


@given(st.floats(1e-6, 1e3), st.floats(1.5, 1e5), st.floats(0, 1))
def test_levels_are_even_in_the_logarithm(low: float, ratio: float, share: float) -> None:
    scale = heat_scale("x", [low, low * ratio], "log")
    wanted = LEVELS * share
    assert abs(scale.level(low * ratio**share) - min(wanted, LEVELS - 1)) <= 1
    assert scale.level(0.0) == 0 and scale.level(low * ratio * 2) == LEVELS - 1


@given(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=20), st.sampled_from(["linear", "log"]))
def test_a_larger_value_never_has_a_lower_colour(found: list, kind: str) -> None:
    scale = heat_scale("x", found, kind)  # type: ignore[arg-type]
    levels = [scale.level(v) for v in sorted(found)]
    assert levels == sorted(levels) and levels[0] >= 0 and levels[-1] < LEVELS


def test_scale_marks_values_beyond_it() -> None:
    calm = [0.5, 1.0]
    near = heat_scale("x", calm, "log", every=[0.5, 6.0])
    assert (near.low, near.high, near.below, near.above) == (0.5, 6.0, False, False)
    far = heat_scale("x", calm, "log", every=[0.5, 4000.0, 0.0])
    assert (far.high, far.below, far.above) == (10.0, True, True)
    assert "≥ 10" in heat_legend(far) and "≤ 0.5" in heat_legend(far) and "≥" not in heat_legend(near)
    wide = heat_scale("x", [1e-12, 1e3], "log")
    assert math.isclose(wide.low, 1e-3) and wide.below
    fixed = heat_scale("x", [0.4], low=0, high=1, every=[0.4, 1.2])
    assert (fixed.low, fixed.high, fixed.above) == (0, 1, True)


def test_not_recorded_and_not_finite_are_distinguished() -> None:
    column = HeatColumn(0, 1, [math.nan, "inf", -math.inf, None, "words", True])
    found = cells(heat_map([column], list("012345"), unit, Axis("Step"), "t", "layer"))
    assert [kind for _, kind, _ in found] == ["gf-hx"] * 3 + ["gf-hn"] * 3
    assert [title for *_, title in found][1:4] == [
        "layer 1: inf, not finite", "layer 2: -inf, not finite", "layer 3: not recorded",
    ]  # fmt: skip
    assert [is_not_finite(v) for v in (1.0, 1, "1", None, math.nan, "nan")] == [False] * 4 + [True] * 2
    legend = heat_legend(unit, missing=True, not_finite=True)
    assert "not recorded" in legend and "not finite" in legend
    assert "not recorded" not in heat_legend(unit)


@given(
    st.lists(
        st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False), st.lists(values, max_size=4)), max_size=6
    ),
    st.lists(st.floats(), max_size=4),
    st.sampled_from(["linear", "log"]),
)
@settings(max_examples=60, deadline=None)
def test_a_map_of_anything_is_well_formed_and_finite(found: list, marks: list, kind: str) -> None:
    columns = [HeatColumn(start, end, row, "<&>") for start, end, row in found]
    scale = heat_scale("<x>", [v for c in columns for v in c.values], kind)  # type: ignore[arg-type]
    svg = heat_map(columns, ["<0>", "1", "2"], scale, Axis("<Step>"), '"t"', "y", [Mark(x, 4, "<m>") for x in marks])
    for tree in map(ElementTree.fromstring, (svg, heat_legend(scale, True, True))):
        keys = ("d", "x", "y", "cx", "cy", "r", "width", "height", "viewBox")
        drawn = [value for node in tree.iter() for key, value in node.attrib.items() if key in keys]
        assert not any(re.search("nan|inf", value, re.I) for value in drawn)
        numbers = [float(n) for value in drawn for n in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", value)]
        assert all(abs(n) <= 2e6 for n in numbers)


def test_the_cells_are_bounded_and_the_words_keep_apart() -> None:
    columns = [HeatColumn(i, i + 1, [0.5] * 500) for i in range(1000)]
    svg = heat_map(columns, [str(i) for i in range(500)], unit, Axis("Step"), "t", "layer")
    assert len(cells(svg)) == MOST_COLUMNS * MOST_ROWS
    names = [float(n.get("y", "")) for n in ElementTree.fromstring(svg).iter("text") if n.get("text-anchor") == "end"]
    assert len(names) > 3
    levels = sorted(names[: names.index(min(names)) + 1], reverse=True)
    assert all(a - b >= 12 for a, b in itertools.pairwise(levels))


def test_marks_at_one_place_are_both_seen() -> None:
    marks = [Mark(5, 0, "a spike"), Mark(5, 0, "skipped"), Mark(9, 4, "another")]
    svg = heat_map([HeatColumn(0, 10, [0.5])], ["0"], unit, Axis("Step"), "t", "layer", marks)
    circles = [(float(c.get("cx", "")), c.findtext("title")) for c in ElementTree.fromstring(svg).iter("circle")]
    assert [title for _, title in circles] == ["a spike", "skipped"]
    assert abs(circles[0][0] - circles[1][0]) >= 7.9
    assert math.isclose((circles[0][0] + circles[1][0]) / 2, (34 + 490) / 2, abs_tol=0.1)


def test_heat_map_has_an_accessible_name() -> None:
    tree = ElementTree.fromstring(
        heat_map([HeatColumn(0, 1, [0.1])], ["0"], unit, Axis("Step"), "entropy of a", "layer")
    )
    assert tree.get("role") == "img" and tree.get("aria-label") == "entropy of a"
    assert "Nothing was recorded" in heat_map([], ["0"], unit, Axis("Step"), "t")


def luminance(colour: str) -> float:
    """Returns the relative luminance of WCAG 2."""
    shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("which", [0, 1], ids=["light", "dark"])
def test_the_colours_are_in_order_of_lightness_and_far_from_the_paper_at_their_high_end(which: int) -> None:
    style = stylesheet()
    ramp = [luminance(re.findall(rf"--gf-h{i}: (#[0-9a-f]{{6}})", style)[which]) for i in range(LEVELS)]
    paper = luminance(re.findall(r"--gf-paper: (#[0-9a-f]{6})", style)[which])
    assert ramp == sorted(ramp, reverse=which == 0) and len(set(ramp)) == LEVELS
    assert all(f".gf-h{i} {{ fill: var(--gf-h{i}) }}" in style for i in range(LEVELS))
    high, low = sorted((ramp[-1], paper), reverse=True)
    assert (high + 0.05) / (low + 0.05) > 7
