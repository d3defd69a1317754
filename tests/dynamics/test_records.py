"""Written records are read back, cut or foreign ones are not, and every value of a file is checked."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.dynamics.records import LINE_BYTES, LONGEST_TEXT, NAME, Records, read_records
from tests.refused import failed, refused

ROW = {"step": 3, "statistics": {"weight_norm": {"layers.0.mixer.q": [1.5, 2.0], "embed": 3.25}}}
EVENT = {"step": 4, "event": "spike", "what": "loss", "value": 9.0, "sigmas": 8.25, "site": "embed", "batch": ["ab"]}


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    records = Records.open(folder, 0)
    for row in rows:
        records.write(row)
    records.close()
    return folder / NAME


def test_rows_come_back(tmp_path: Path):
    rows = read_records(written(tmp_path, ROW, EVENT))
    assert rows == [ROW, EVENT]
    assert (rows.skipped, rows.left_out) == (0, 0)


def test_the_file_is_made_with_its_first_row(tmp_path: Path):
    records = Records.open(tmp_path, 0)
    assert not (tmp_path / NAME).exists()
    records.write(ROW)
    assert json.loads((tmp_path / NAME).read_text()) == ROW, "and a row is there at once"
    records.close()
    records.close()


def test_numbers_are_rounded_and_never_bare_nan(tmp_path: Path):
    places = {"a": 1.23456789e-7, "b": [math.nan, math.inf, -math.inf], "c": 0.0}
    path = written(tmp_path, {"step": 1, "statistics": {"gradient_rms": places}})
    raw = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert raw["statistics"]["gradient_rms"] == {"a": 1.23457e-7, "b": ["nan", "inf", "-inf"], "c": 0.0}
    values = read_records(path)[0]["statistics"]["gradient_rms"]["b"]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]


@given(st.floats(allow_nan=False))
@settings(max_examples=50)
def test_six_significant_figures(value: float):
    from glassformer.dynamics.records import plain

    kept = plain(value)
    assert float(kept) == pytest.approx(value, rel=5.1e-6, abs=0 if abs(value) > 1e-300 else 1e-305)


def test_resuming_cuts_back_to_the_checkpoint(tmp_path: Path):
    path = written(tmp_path, *({"step": n, "event": "skipped"} for n in (1, 2, 3)), {"step": 2, "event": "spike"}, ROW)
    with path.open("a") as file:
        file.write('{"step": 1, "garbage')
    records = Records.open(tmp_path, 2)
    records.write({"step": 3, "event": "again"})
    records.close()
    rows = read_records(path)
    assert [(row["step"], row["event"]) for row in rows] == [
        (1, "skipped"), (2, "skipped"), (2, "spike"), (3, "again")
    ]  # fmt: skip
    assert rows.skipped == 0
    assert list(tmp_path.iterdir()) == [path], "no other file is left"
    Records.open(tmp_path, 0)
    assert read_records(path) == [], "a new run starts without records"


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_last_line_cut_by_a_crash_is_left_out(tmp_path: Path, cut: int):
    path = written(tmp_path, ROW, EVENT)
    path.write_bytes(path.read_bytes()[:-cut])
    rows = read_records(path)
    assert rows == [ROW]
    assert rows.skipped == 1


def test_a_file_cut_at_any_byte_is_read(tmp_path: Path):
    path = written(tmp_path, ROW, EVENT)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read_records(path) in ([], [ROW])


def test_a_run_without_statistics_has_no_rows(tmp_path: Path):
    assert read_records(tmp_path / NAME) == []
    (tmp_path / NAME).touch()
    assert read_records(tmp_path / NAME) == []


BAD = [
    "",
    "[]",
    "3",
    "null",
    '"step"',
    "{}",
    '{"step": 1}',
    '{"step": true, "event": "spike"}',
    '{"step": 1.0, "event": "spike"}',
    '{"step": "1", "event": "spike"}',
    '{"step": -1, "event": "spike"}',
    '{"step": 99999999999999999999, "event": "spike"}',
    '{"step": 1, "event": 3}',
    '{"step": 1, "event": "%s"}' % ("x" * 1000),
    '{"step": 1, "event": "spike", "value": "huge"}',
    '{"step": 1, "event": "spike", "value": [1]}',
    '{"step": 1, "event": "spike", "value": true}',
    '{"step": 1, "event": "spike", "batch": "text"}',
    '{"step": 1, "event": "spike", "batch": [1]}',
    '{"step": 1, "event": "spike", "site": 7}',
    '{"step": 1, "event": "rolled_back", "to": 1.5}',
    '{"step": 1, "statistics": []}',
    '{"step": 1, "statistics": {"a": 1}}',
    '{"step": 1, "statistics": {"a": {"b": "one"}}}',
    '{"step": 1, "statistics": {"a": {"b": null}}}',
    '{"step": 1, "statistics": {"a": {"b": [[1]]}}}',
    '{"step": 1, "statistics": {"a": {"b": 1%s}}}' % ("0" * 400),
    '{"step": 1, "statistics": {"a": {"b": 1%s}}}' % ("0" * 5000),
    "[" * 100_000,
    "\udcff",
]


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:40].encode("ascii", "backslashreplace").decode())
def test_invalid_line_is_skipped_and_counted(tmp_path: Path, line: str):
    path = tmp_path / NAME
    path.write_bytes(json.dumps(ROW).encode() + b"\n" + line.encode("utf-8", "surrogateescape") + b"\n")
    with path.open("a") as file:
        file.write(json.dumps(EVENT) + "\n")
    rows = read_records(path)
    assert rows == [ROW, EVENT]
    assert rows.skipped == 1


def test_unknown_fields_of_an_event_are_dropped_and_long_texts_cut(tmp_path: Path):
    path = tmp_path / NAME
    row = {**EVENT, "batch": ["x" * 9999] * 99, "html": "<b>", "site": None}
    path.write_text(json.dumps(row) + "\n")
    (read,) = read_records(path)
    assert set(read) == set(EVENT) - {"site"}
    assert [len(text) for text in read["batch"]] == [LONGEST_TEXT] * 16


def test_texts_can_always_be_printed(tmp_path: Path):
    path = tmp_path / NAME
    path.write_text('{"step": 1, "event": "\\ud800", "batch": ["a\\udc00b"]}\n')
    (row,) = read_records(path)
    assert (row["event"], row["batch"]) == ("?", ["a?b"])


def test_a_large_file_is_read_from_its_end(tmp_path: Path):
    path = written(tmp_path, *({"step": n, "event": "spike"} for n in range(1000)))
    size = path.stat().st_size
    rows = read_records(path, most_bytes=size // 2)
    assert [row["step"] for row in rows] == list(range(1000 - len(rows), 1000))
    assert 480 < len(rows) < 520
    assert rows.left_out == size - size // 2
    assert rows.skipped == 0


def test_huge_line_is_skipped(tmp_path: Path):
    path = tmp_path / NAME
    with path.open("w") as file:
        file.write(json.dumps(ROW) + "\n")
        file.write('{"step": 1, "event": "' + "x" * (2 * LINE_BYTES) + '"}\n')
        file.write(json.dumps(EVENT) + "\n")
    assert read_records(path) == [ROW, EVENT]


def test_another_kind_of_file_is_refused(tmp_path: Path):
    path = tmp_path / NAME
    path.write_bytes(bytes(range(256)) * 10)
    with refused(code="damaged", field="dynamics.jsonl"):
        read_records(path)
    path.unlink()
    path.mkdir()
    with refused(code="disk", field="dynamics.jsonl"):
        read_records(path)


def test_a_disk_that_refuses_is_one_sentence(tmp_path: Path):
    (tmp_path / NAME).mkdir()
    with failed(code="disk"):
        Records(tmp_path / NAME).write(ROW)
    with failed(code="disk"):
        Records.open(tmp_path, 0)


def test_a_file_cannot_name_places_without_end(tmp_path: Path):
    path = tmp_path / "dynamics.jsonl"
    with path.open("w") as file:
        for step in range(70):
            places = {f"{step}.{i}": 0 for i in range(1000)}
            file.write(json.dumps({"step": step, "statistics": {"x": places}}) + "\n")
    with refused(code="range", field="dynamics.jsonl"):
        read_records(path)
