"""What happens while runs train: typed events, each of which is one line of JSON.

stage                                   work of several comparisons: what follows, as a sentence
plan                                    the runs of a scaling law, with their time
reading                                 how far a stage of the work is, such as reading a text
begin                                   a comparison: the runs that are asked for
kept, start, end                        a run: finished before; trained from here on; its result is there
step, wrote, watched, measuring, error  within a run, told by the process that trains it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_serializer

from glassformer.runs.results import Key, RunResult
from glassformer.text import OnProgress


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")


class StageEvent(_Event):
    """What follows, in work that takes several comparisons."""

    event: Literal["stage"] = "stage"
    words: str
    """A sentence."""


class PlanEvent(_Event):
    """The runs of a scaling law, with the time that they will take, before the first of them."""

    event: Literal["plan"] = "plan"
    plan: Any
    """The `laboratory.scaling.ScalingPlan`."""


class ReadingEvent(_Event):
    """Progress of one stage on a text, a file or a model; `total` may be unknown."""

    event: Literal["reading"] = "reading"
    stage: str
    done: int
    total: int | None


class Begin(_Event):
    """Before anything is trained."""

    event: Literal["begin"] = "begin"
    runs: list[Key]
    """In the order in which they were asked for."""
    how: str
    """Device, dtype and compilation, as a sentence."""
    notes: list[str]


class _RunEvent(_Event):
    name: str
    seed: int

    @property
    def key(self) -> Key:
        return self.name, self.seed


class Kept(_RunEvent):
    """The run finished before and is not trained again."""

    event: Literal["kept"] = "kept"


class Start(_RunEvent):
    """The process of the run starts."""

    event: Literal["start"] = "start"


class Step(_RunEvent):
    """Progress, a few times a second."""

    event: Literal["step"] = "step"
    step: int
    done: float
    """Share of the run, 0 to 1."""
    loss: float
    tokens_per_second: float
    seconds_left: float
    learning_rate: float | None = None
    grad_norm: float | None = None
    validation: dict[str, Any] | None = None
    """Held-out measures, if this step took them."""


class Wrote(_RunEvent):
    """Text that the model writes by now."""

    event: Literal["wrote"] = "wrote"
    step: int
    prompt: str
    text: str


class Watched(_RunEvent):
    """A spike, or what was done about it, as a sentence."""

    event: Literal["watched"] = "watched"
    words: str


class Measuring(_RunEvent):
    """The model is trained; its measures are taken."""

    event: Literal["measuring"] = "measuring"


class Error(_RunEvent):
    """Why the run cannot go on, as a sentence."""

    event: Literal["error"] = "error"
    error: str


class End(_RunEvent):
    """The run has ended, well or not."""

    event: Literal["end"] = "end"
    result: RunResult

    @field_serializer("result")
    def _given_fields(self, result: RunResult) -> dict[str, Any]:
        return result.to_dict()


Event = StageEvent | PlanEvent | ReadingEvent | Begin | Kept | Start | Step | Wrote | Watched | Measuring | Error | End
Notify = Callable[[Event], None]
_EVENTS: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


def silent(event: Event) -> None:
    """A `Notify` that does nothing."""


def reading(notify: Notify) -> OnProgress:
    """Returns the function that tells of a text that is read, for `text.prepare`."""
    return lambda stage, done, total: notify(ReadingEvent(stage=stage, done=done, total=total))


def encode(event: Event) -> str:
    """One line of JSON, without its end."""
    return event.model_dump_json()


def decode(line: str) -> Event | None:
    """The event of a line; None where the line is something else that was printed."""
    try:
        return _EVENTS.validate_json(line)
    except ValidationError:
        return None
