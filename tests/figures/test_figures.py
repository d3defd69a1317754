"""The figures: round ticks, finite paths, labels that keep apart, colours that can be read."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from glassformer.figures import (
    Axis,
    BlockSketch,
    Box,
    Dot,
    ModelSketch,
    Series,
    StageSketch,
    count,
    escape,
    finite,
    fixed,
    interval_domain,
    interval_row,
    legend,
    line_chart,
    log_ticks,
    nice_ticks,
    scatter_chart,
    script,
    si,
    stylesheet,
    tag,
    tick_labels,
    wiring_drawing,
)
from glassformer.figures.chart import spread
from glassformer.figures.style import COLOURS, colour, dash, marker

reals = st.floats(-1e12, 1e12, allow_nan=False)
anything = st.floats(allow_nan=True, allow_infinity=True)


@given(reals, reals, st.integers(3, 9))
def test_ticks_are_round_even_inside_and_near_the_target_number(a: float, b: float, target: int) -> None:
    low, high = min(a, b), max(a, b)
    assume(high - low > 1e-6 * max(abs(low), abs(high), 1e-9))
    ticks = nice_ticks(low, high, target)
    step = (ticks[-1] - ticks[0]) / (len(ticks) - 1) if len(ticks) > 1 else high - low
    assert 1 <= len(ticks) <= target + 2
    assert all(low - 1e-6 * step <= t <= high + 1e-6 * step for t in ticks)
    assert all(math.isclose(y - x, step, rel_tol=1e-4) for x, y in itertools.pairwise(ticks))
    if len(ticks) > 1:
        mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
        assert min(abs(mantissa - m) for m in (1, 2, 5, 10)) < 1e-3


@given(st.floats(1e-12, 1e12), st.floats(1.001, 1e9))
def test_log_ticks_are_inside_and_rise(low: float, ratio: float) -> None:
    ticks = log_ticks(low, low * ratio)
    assert ticks == sorted(set(ticks)) and len(ticks) <= 14
    assert all(low * (1 - 1e-6) <= t <= low * ratio * (1 + 1e-6) for t in ticks)
    assert log_ticks(-1, 5) == [] and log_ticks(3, 3) == []


@given(st.floats(-1e-3, 1e9), st.floats(1e-3, 1e9))
def test_no_two_ticks_have_the_same_label(low: float, span: float) -> None:
    assume(span > 1e-5 * abs(low))
    labels = tick_labels(nice_ticks(low, low + span))
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (10646784, "10.6M"),
        (999_999, "1M"),
        (0, "0"),
        (1500, "1.5k"),
        (2.5e9, "2.5B"),
        (0.0432, "0.0432"),
        (-12, "−12"),
        (100, "100"),
        (3e-7, "3.00e−7"),
        (1e20, "1.00e20"),
    ],
)
def test_counts_in_words(value: float, words: str) -> None:
    assert si(value) == words


def test_numbers_for_people() -> None:
    assert fixed(-0.0001) == "0.000" and fixed(-1.5, 1) == "−1.5" and fixed(0.25, 2, signed=True) == "+0.25"
    assert tick_labels([0, 200_000, 1_000_000]) == ["0", "200k", "1M"] and tick_labels([3.5, 4.0]) == [
        "3.5",
        "4.0",
    ]
    assert nice_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0] and log_ticks(1, 1000) == [1, 10, 100, 1000]
    assert [finite(v) for v in (True, "1", None, math.nan, math.inf, 10**400, 2)] == [None] * 6 + [2.0]


def test_words_are_escaped_and_markup_is_not() -> None:
    assert tag("a", "<b>", tag("i", "&"), href='"x') == '<a href="&quot;x">&lt;b&gt;<i>&amp;</i></a>'
    assert escape("\x00\ud800") == "\ufffd\ufffd" and tag("input", checked=True, x=None) == "<input checked>"


def _numbers(svg: str) -> list[float]:
    """Returns every coordinate of a drawing; parsing it also proves that it is well formed."""
    tree = ElementTree.fromstring(svg)
    keys = ("d", "x", "y", "cx", "cy", "r", "x1", "x2", "y1", "y2", "width", "height", "viewBox")
    values = [value for node in tree.iter() for key, value in node.attrib.items() if key in keys]
    assert not any(re.search("nan|inf", value, re.I) for value in values)
    return [float(number) for value in values for number in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", value)]


@given(st.lists(st.lists(st.tuples(anything, anything), max_size=12), min_size=1, max_size=4),
       st.sampled_from(["linear", "log"]), st.sampled_from(["linear", "log"]))  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_a_line_chart_of_any_numbers_is_finite(lines: list, x: str, y: str) -> None:
    series = [Series(f"<{i}>", line, i, thin=[line], markers=line[:2], ended="x") for i, line in enumerate(lines)]
    chart = line_chart(series, Axis("x", x), Axis("y", y), "t")  # type: ignore[arg-type]
    assert all(math.isfinite(n) and abs(n) <= 2e6 for n in _numbers(chart))


@given(st.lists(st.tuples(anything, anything), max_size=9))
@settings(max_examples=40, deadline=None)
def test_a_scatter_chart_of_any_numbers_is_finite(points: list) -> None:
    dots = [Dot(f"arm {i}", x, y, i) for i, (x, y) in enumerate(points)]
    assert all(math.isfinite(n) for n in _numbers(scatter_chart(dots, Axis("x"), Axis("y"), "t")))


def test_line_is_drawn_at_its_values() -> None:
    chart = line_chart(
        [Series("a", [(0, 1.0), (10, 3.0)])],
        Axis("x"),
        Axis("y", low=0, high=4),
        "t",
        200,
        110,
        end_labels=False,
    )
    found = re.search(r'class="gf-mean"', chart)
    d = re.search(r'<path d="M([\d.]+),([\d.]+)L([\d.]+),([\d.]+)" class="gf-mean"', chart)
    assert found and d
    x0, y0, x1, y1 = map(float, d.groups())
    top, bottom = 30.0, 60.0
    assert (x0, x1) == (52.0, 176.0)
    assert math.isclose(y0, bottom - (bottom - top) / 4) and math.isclose(y1, bottom - 3 * (bottom - top) / 4)


def test_an_arm_that_ran_away_does_not_stretch_the_axis() -> None:
    steady = Series("steady", [(0, 5.0), (10, 4.0)])
    wild = Series("wild", [(0, 5.0), (5, 1e6)], 1, ended="diverged", stray=True)
    chart = line_chart([steady, wild], Axis("x"), Axis("y"), "t")
    assert "1M" not in chart and 'class="gf-ended"' in chart and "diverged" in chart


@given(st.lists(st.floats(0, 300), min_size=1, max_size=12))
def test_labels_keep_apart_and_in_order(places: list[float]) -> None:
    moved = spread(places, 17.0, 0.0, 300.0)
    order = sorted(range(len(places)), key=lambda i: places[i])
    assert all(moved[b] - moved[a] >= 17.0 - 1e-6 for a, b in itertools.pairwise(order))
    if all(b - a >= 17 for a, b in itertools.pairwise(sorted(places))):
        assert all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(places, moved, strict=True))


def test_interval_is_on_its_side_of_zero() -> None:
    domain = interval_domain([-0.2, 0.1, None, math.nan])
    assert domain[0] == -domain[1] and domain[1] > 0.2
    row = interval_row(-0.1, -0.2, -0.05, domain, "t", width=300)
    middle = 150.0
    assert all(float(x) < middle for x in re.findall(r'cx="([\d.]+)"', row))
    assert interval_domain([]) == (-1.0, 1.0)


@pytest.mark.parametrize("wiring", ["pre", "post", "sandwich", "res_post", "parallel", "no_residual", "none of these"])
def test_each_wiring_has_its_own_drawing(wiring: str) -> None:
    block = BlockSketch(wiring, "rmsnorm", Box("attention", "6 heads", "rotary"), Box("mlp"))
    svg = wiring_drawing(ModelSketch(stages=(StageSketch(6, (block,)),)), "t")
    assert all(math.isfinite(n) for n in _numbers(svg))
    norms = {"sandwich": 4, "parallel": 1}.get(wiring, 2)
    assert len(re.findall(r">rmsnorm</text>", svg)) == norms
    assert svg.count("gf-plus") == {"parallel": 1, "no_residual": 0}.get(wiring, 2)
    assert ("drawn as pre" in svg) == (wiring == "none of these")


def test_a_parallel_block_with_two_norms_shows_two() -> None:
    block = BlockSketch("parallel", "layernorm", Box("attention"), Box("mlp"), shared_norm=False)
    svg = wiring_drawing(ModelSketch(stages=(StageSketch(2, (block,)),), embedding_norm="layernorm"), "t")
    assert len(re.findall(r">layernorm</text>", svg)) == 3


def test_many_arms_differ_by_more_than_colour() -> None:
    looks = {(colour(i), dash(i), re.sub(r"[\d.]+", "", marker(i, 0, 0))) for i in range(120)}
    assert len(looks) == 120
    assert len({dash(i) for i in range(6)}) == 6


def _luminance(hexa: str) -> float:
    parts = [int(hexa[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_every_colour_of_words_can_be_read(scheme: int) -> None:
    colours = dict(
        re.findall(r"--gf-([\w-]+): (#[0-9a-f]{6})", re.findall(r":root \{(.*?)\n *\}", stylesheet(), re.S)[scheme])
    )
    paper = _luminance(colours["paper"])
    for name in [*map(str, range(COLOURS)), "ink", "muted", "good", "bad"]:
        low, high = sorted([paper, _luminance(colours[name])])
        assert (high + 0.05) / (low + 0.05) >= 4.5, name


# Machado, Oliveira, Fernandes 2009, severity 1: linear RGB as it is seen without one kind of cone.
MACHADO = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
SIGHT = {"all cones": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)), **MACHADO}
APART = 0.12
"""In OKLab, where black and white are 1 apart, and neighbours of a usual palette 0.1."""


def _times(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def _oklab(linear: Sequence[float]) -> list[float]:
    """Returns the Oklab coordinates of a linear RGB colour (Ottosson 2020)."""
    cones = _times(((0.4122214708, 0.5363325363, 0.0514459929), (0.2119034982, 0.6806995451, 0.1073969566),
                    (0.0883024619, 0.2817188376, 0.6299787005)), [min(max(v, 0.0), 1.0) for v in linear])  # fmt: skip
    return _times(((0.2104542553, 0.7936177850, -0.0040720468), (1.9779984951, -2.4285922050, 0.4505937099),
                   (0.0259040371, 0.7827717662, -0.8086757660)), [math.cbrt(v) for v in cones])  # fmt: skip


def _linear(hexa: str) -> list[float]:
    parts = [int(hexa[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]


def _scheme(scheme: int) -> dict[str, str]:
    """Returns the colours of the style sheet: 0 light, 1 dark."""
    rules = re.findall(r":root \{(.*?)\n *\}", stylesheet(), re.S)[scheme]
    return dict(re.findall(r"--gf-([\w-]+): (#[0-9a-f]{6})", rules))


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_the_colours_of_arms_stay_apart_for_the_colour_blind(scheme: int, sight: str) -> None:
    colours = _scheme(scheme)
    assert COLOURS <= 6 and str(COLOURS) not in colours
    seen = [_oklab(_times(SIGHT[sight], _linear(colours[str(i)]))) for i in range(COLOURS)]
    gaps = {(i, j): math.dist(seen[i], seen[j]) for i, j in itertools.combinations(range(COLOURS), 2)}
    assert min(gaps.values()) >= APART, min(gaps, key=lambda pair: gaps[pair])


def test_that_test_can_fail() -> None:
    """Two of the palette before that were one colour to eyes without long cones: an orange and an ochre."""
    before = [_oklab(_times(MACHADO["protanopia"], _linear(c))) for c in ("#b34700", "#7d5c00")]
    assert math.dist(*before) < 0.02


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_the_borders_of_controls_can_be_seen(scheme: int) -> None:
    colours = _scheme(scheme)
    for ground in ("paper", "panel"):
        low, high = sorted(_luminance(colours[name]) for name in ("control", ground))
        assert (high + 0.05) / (low + 0.05) >= 3, ground


@pytest.mark.parametrize(("value", "words"), [
    (4096, "4096"), (9999, "9999"), (10_000, "10k"), (49_152, "49.2k"), (820_864, "821k"), (3_400_000, "3.4M"),
    (6281.4, "6281"), (0.65, "0.65"), (0, "0"), (-12_345, "−12.3k"),
])  # fmt: skip
def test_counts_of_a_page(value: float, words: str) -> None:
    assert count(value) == words


def _boxes(svg: str) -> list[tuple[float, float, float, float]]:
    """Returns the boxes (left, top, right, bottom) of the names in a scatter chart."""
    found = re.findall(r'<text x="([\d.-]+)" y="([\d.-]+)" text-anchor="(\w+)" class="gf-name">([^<]*)<', svg)
    boxes = []
    for x, y, anchor, words in found:
        length = len(words) * 7.0  # a little less than is reserved, since a letter may be narrow
        left = float(x) - {"start": 0.0, "end": length, "middle": length / 2}[anchor]
        boxes.append((left, float(y) - 10, left + length, float(y) + 2))
    return boxes


@given(st.lists(st.tuples(st.floats(6000, 7600), st.floats(1.6, 1.8)), min_size=3, max_size=8),
       st.sampled_from([860, 1040]))  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_no_two_names_overprint_in_a_scatter(points: list[tuple[float, float]], width: int) -> None:
    dots = [Dot(f"gpt2@10m+rope+rmsnorm+{i}", x, y, i) for i, (x, y) in enumerate(points)]
    boxes = _boxes(scatter_chart(dots, Axis("x"), Axis("y"), "t", width, hint="faster and better"))
    assert len(boxes) == len(points)
    for a, b in itertools.combinations(boxes, 2):
        assert not (a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3])


def test_values_beyond_an_axis_are_marked_with_their_height() -> None:
    wild = Series("a", [(0, 5.0), (5, 60.0), (6, 4.0), (10, 4.0)])
    chart = line_chart([wild], Axis("x", unit="tokens"), Axis("y", high=6.0), "t")
    assert chart.count("gf-beyond") == 1 and "up to 60.00 at 5 tokens: a" in chart and ">60.0<" in chart
    assert "gf-beyond" not in line_chart([wild], Axis("x"), Axis("y"), "t")


def test_script_is_small_and_safe_inside_a_page() -> None:
    assert len(script().encode()) < 15_000 and "</" not in script() and "http" not in script()
    assert "</" not in stylesheet() and "url(" not in stylesheet()
    assert 'aria-pressed="true"' in legend([Series("<a>", [])]) and "<a>" not in legend([Series("<a>", [])])
