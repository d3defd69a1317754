"""Events of training, each written as one line of JSON; the docstrings of their types say when they occur."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_serializer

from glassformer.runs.results import Key, RunResult
from glassformer.text import OnProgress


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")


class StageEvent(_Event):
    """Message on work that has several parts, such as the start of its next comparison."""

    event: Literal["stage"] = "stage"
    words: str
    """Sentence."""


class PlanEvent(_Event):
    """Runs of a scaling law, with their estimated time, before the first of them."""

    event: Literal["plan"] = "plan"
    plan: Any
    """Plan, a `laboratory.scaling.ScalingPlan`."""


class ReadingEvent(_Event):
    """Progress of one stage of work on a text, a file or a model: `done` of `total` units, None if unknown."""

    event: Literal["reading"] = "reading"
    stage: str
    done: int
    total: int | None


class Begin(_Event):
    """Start of a comparison, before anything is trained."""

    event: Literal["begin"] = "begin"
    runs: list[Key]
    """Runs in the order of the request."""
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
    """Run that finished before and is not trained again."""

    event: Literal["kept"] = "kept"


class Start(_RunEvent):
    """Start of the process of a run."""

    event: Literal["start"] = "start"


class Step(_RunEvent):
    """Progress of a run, a few times a second."""

    event: Literal["step"] = "step"
    step: int
    done: float
    """Fraction of the run that is done, 0 to 1."""
    loss: float
    tokens_per_second: float
    seconds_left: float
    learning_rate: float | None = None
    grad_norm: float | None = None
    validation: dict[str, Any] | None = None
    """Held-out measures, if this step took them; else None."""


class Wrote(_RunEvent):
    """Text that the model generates at this step."""

    event: Literal["wrote"] = "wrote"
    step: int
    prompt: str
    text: str


class Watched(_RunEvent):
    """Event in training, such as a loss spike or the step skipped because of it, as a sentence."""

    event: Literal["watched"] = "watched"
    words: str


class Measuring(_RunEvent):
    """Start of the measurements on the trained model, after training."""

    event: Literal["measuring"] = "measuring"


class Error(_RunEvent):
    """Reason why a run cannot continue, as a sentence."""

    event: Literal["error"] = "error"
    error: str


class End(_RunEvent):
    """End of a run, successful or not."""

    event: Literal["end"] = "end"
    result: RunResult

    @field_serializer("result")
    def _given_fields(self, result: RunResult) -> dict[str, Any]:
        return result.to_dict()


Event = StageEvent | PlanEvent | ReadingEvent | Begin | Kept | Start | Step | Wrote | Watched | Measuring | Error | End
Notify = Callable[[Event], None]
_EVENTS: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


def silent(event: Event) -> None:
    """Does nothing: the `Notify` for silence."""


def reading(notify: Notify) -> OnProgress:
    """Returns a function that passes the progress of reading a text to `notify`, for `text.prepare`."""
    return lambda stage, done, total: notify(ReadingEvent(stage=stage, done=done, total=total))


def encode(event: Event) -> str:
    """Returns an event as one line of JSON, without its end."""
    return event.model_dump_json()


def decode(line: str) -> Event | None:
    """Returns the event of a line; None for any other printed text."""
    try:
        return _EVENTS.validate_json(line)
    except ValidationError:
        return None
