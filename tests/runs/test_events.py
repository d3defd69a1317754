"""Events come back from their line of JSON; other lines give no event."""

from __future__ import annotations

import json
import math

import pytest

from glassformer.runs.events import (
    Begin,
    End,
    Error,
    Event,
    Kept,
    Measuring,
    StageEvent,
    Start,
    Step,
    Watched,
    decode,
    encode,
)
from glassformer.runs.results import RunResult
from tests.runs.test_results import FAILED, finished

WHO = {"name": "gpt2@1m", "seed": 3}
EVENTS: list[Event] = [
    StageEvent(words="learning rates: 12 runs, about 3 minutes"),
    Begin(runs=[("gpt2@1m", 3), ("llama@1m", 3)], how="on cpu", notes=["a note\nof two lines"]),
    Kept(**WHO),
    Start(**WHO),
    Step(**WHO, step=7, done=0.5, loss=2.25, tokens_per_second=128.0, seconds_left=1.5),
    Watched(**WHO, words="step 61: spike of loss"),
    Measuring(**WHO),
    Error(**WHO, error="the disk is full"),
    End(**WHO, result=RunResult.of(finished())),
    End(**WHO, result=RunResult.of(FAILED)),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.event)
def test_an_event_comes_back_from_its_line(event: Event) -> None:
    line = encode(event)
    assert "\n" not in line and json.loads(line)["event"] == event.event
    assert decode(line) == event and decode(line + "\n") == event


def test_the_result_in_an_event_is_the_entry_of_results() -> None:
    assert json.loads(encode(EVENTS[-1]))["result"] == FAILED


def test_numbers_that_are_not_finite_come_back() -> None:
    """In a line that every reader of JSON takes: none of them is a bare NaN."""
    line = encode(Step(**WHO, step=1, done=0.0, loss=math.inf, tokens_per_second=0.0, seconds_left=math.nan))
    json.loads(line, parse_constant=lambda word: pytest.fail(word))
    back = decode(line)
    assert isinstance(back, Step) and back.loss == math.inf and math.isnan(back.seconds_left)


@pytest.mark.parametrize(
    "line", ["", "loading\n", "{", "[]", "3", "null", '{"step": 3}', '{"event": "dance"}', '{"event": "step"}',
             '{"event": "step", "name": "a", "seed": 0, "step": "x"}', "[" * 10_000],
)  # fmt: skip
def test_other_lines_give_no_event(line: str) -> None:
    assert decode(line) is None
