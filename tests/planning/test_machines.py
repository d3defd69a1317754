"""Machines are data with units and sources; what is not known is refused with the nearest."""

from __future__ import annotations

from pathlib import Path

import pytest

from glassformer.errors import Code, RequestError
from glassformer.planning.machines import Price, cluster, machines
from glassformer.units import quantity
from tests.refused import refused


@pytest.mark.parametrize(
    ("text", "unit", "number"),
    [("80GB", "B", 80e9), ("80 GiB", "B", 80 * 2**30), ("4k", "", 4000), ("15T", "", 15e12), ("1.5B", "", 1.5e9),
     ("3.35TB/s", "B/s", 3.35e12), ("989.5TFLOP/s", "FLOP/s", 989.5e12), (7, "W", 7), ("1_000", "", 1000)],
)  # fmt: skip
def test_numbers_have_units(text: object, unit: str, number: float):
    assert quantity(text, unit) == pytest.approx(number)


@pytest.mark.parametrize("text", ["", "GB", "80QB", "-1", "1e999", True, None, "nan", "80GB/s", "9" * 100])
def test_invalid_quantity_is_refused(text: object):
    with pytest.raises(RequestError) as caught:
        quantity(text, "B", "memory")
    assert caught.value.field == "memory"


def test_every_machine_has_a_source_and_every_price_a_date():
    for one in machines().values():
        assert one.source.startswith("https://") and one.peak_of("bfloat16") > 1e13
        assert one.price is None or (one.price.date[:2] == "20" and one.price.source)


def test_a_node_is_multiplied():
    assert cluster("h100:8", nodes=4).count == 32 and cluster("h100:8", 4).node == 8
    assert cluster("a100-80gb").count == 1


@pytest.mark.parametrize("text", ["h10", "H100s", "h100:0", "h100:x", "h100:"])
def test_a_wrong_machine_is_one_sentence(text: str):
    with pytest.raises(RequestError) as caught:
        cluster(text)
    assert caught.value.field == "machine" and "h100" in str(caught.value)


def test_user_file_adds_machines_to_ours(tmp_path: Path):
    own = tmp_path / "mine.yaml"
    fields = "memory: 24GB, bandwidth: 1TB/s, peak: {bfloat16: 165T}, inside: 32GB/s, between: 1GB/s, power: 450W"
    own.write_text(f"box: {{title: Box, {fields}, source: measured}}\n")
    assert cluster("box:2", own=own).machine.memory == 24e9
    assert cluster("h100", own=own).machine.memory == 80e9
    own.write_text(f"box: {{title: Box, {fields.replace('24GB', '24GW')}, source: measured}}\n")
    with refused(code="type", field="memory"):
        machines(own)


@pytest.mark.parametrize(
    ("wrong", "code", "field"),
    [("measured: {products: 1, scores: 1, elementwise: 1, links: 1, error: [-1, 0], source: us}", "range",
      "measured.error.0"),
     ("measured: {products: 1, scores: 1, elementwise: 1, links: 1, error: [0.1, -0.1], source: us}", "conflict",
      "measured"),
     ("price: {low: 3, high: 2, currency: USD, date: 2026-01-01, source: us}", "conflict", "price")],
)  # fmt: skip
def test_impossible_user_values_are_refused(tmp_path: Path, wrong: str, code: Code, field: str):
    own = tmp_path / "mine.yaml"
    fields = "memory: 24GB, bandwidth: 1TB/s, peak: {bfloat16: 165T}, inside: 32GB/s, between: 1GB/s, power: 450W"
    own.write_text(f"box: {{title: Box, {fields}, source: measured, {wrong}}}\n")
    with refused(code=code, field=field):
        machines(own)


def test_a_price_has_a_currency():
    assert Price.of("2.5USD").low == 2.5
    with refused(code="type", field="price"):
        Price.of("2.5")
