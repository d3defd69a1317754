"""Sinks: they send the rows that the run recorded, a missing package is reported early, a failure ends no run."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from glassformer.dynamics.records import NAME
from glassformer.errors import RequestError
from glassformer.naming import preset
from glassformer.text import TextData
from glassformer.training import Report, Reporter, sinks, train
from glassformer.training.progress import read_metrics
from glassformer.training.sinks import SINKS, Logger, check_sinks, flat, open_sinks
from tests.refused import refused

Written = list[tuple[int, dict[str, float]]]


class Kept:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.rows: Written = []
        self.closed = 0

    def write(self, step: int, numbers: Any) -> None:
        self.rows.append((step, dict(numbers)))

    def close(self) -> None:
        self.closed += 1


class Broken(Kept):
    """A sink that works once."""

    def write(self, step: int, numbers: Any) -> None:
        super().write(step, numbers)
        if len(self.rows) > 1:
            raise ConnectionError("the network\nis gone")


def report(step: int = 3, **changes: Any) -> Report:
    return Report(**{
        "step": step, "steps": 10, "tokens": 96, "seconds": 1.0, "loss": 2.5, "learning_rate": 1e-3, "grad_norm": 0.7,
        "tokens_per_second": 96.0, "done": 0.3, **changes,
    })  # fmt: skip


def train_with(logger: Logger, text: TextData, out: Path) -> Any:
    recipe = {"tokens": 8 * 64, "batch_size": 2, "context": 32, "compile": False, "threads": 1, "watch": 4}
    return train(preset("llama@1m+layers=2+d_model=32+heads=2"), text, recipe, out, callbacks=[Reporter(logger)])


# --- What is sent ---


def test_a_run_is_sent_as_it_was_recorded(text: TextData, tmp_path: Path) -> None:
    kept = Kept()
    with Logger({"kept": kept}) as logger:
        train_with(logger, text, tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    sent = [(step, numbers["loss"]) for step, numbers in kept.rows if "loss" in numbers]
    assert sent == [(row["step"], row["loss"]) for row in rows if "loss" in row] and len(sent) == 8
    checked = [(step, numbers["validation/loss"]) for step, numbers in kept.rows if "validation/loss" in numbers]
    assert checked == [(row["step"], row["validation"]["loss"]) for row in rows if "validation" in row]
    assert kept.closed == 1


def test_sinks_change_nothing_about_the_run(text: TextData, tmp_path: Path) -> None:
    with Logger({"kept": Kept()}) as logger:
        train_with(logger, text, tmp_path / "a")
    train_with(Logger({}), text, tmp_path / "b")
    one, other = (
        [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in row] for name in "ab"
    )
    assert one == other


def test_a_row_of_statistics_is_sent_by_name_and_place() -> None:
    kept = Kept()
    statistics = {
        "attention_entropy": {"layers.0.mixer": [0.25, 0.5, 0.75]},
        "log_z": {"logits": 8.5},
        "gradient_norm": {"embed": math.nan, "head": "inf", "layers.0.ffn.up": [1.0, math.inf]},
    }
    Logger({"kept": kept}).record({"step": 50, "statistics": statistics})
    assert kept.rows == [(50, {
        "attention_entropy/layers.0.mixer/min": 0.25, "attention_entropy/layers.0.mixer/mean": 0.5,
        "attention_entropy/layers.0.mixer/max": 0.75, "log_z/logits": 8.5, "gradient_norm/layers.0.ffn.up/min": 1.0,
    })]  # fmt: skip
    assert flat({}) == {} and flat({"a": {"b": []}}) == {}


def test_events_are_sent_at_their_step() -> None:
    kept = Kept()
    logger = Logger({"kept": kept})
    spike = {"step": 61, "event": "spike", "what": "loss", "sigmas": 7.2}
    logger(
        report(
            60,
            events=[spike, {"step": 61, "event": "skipped"}, {"step": 61, "event": "not_finite", "sigmas": math.inf}],
        )
    )
    assert kept.rows == [(61, {"event/spike": 7.2}), (61, {"event/skipped": 1.0}), (61, {"event/not_finite": 1.0})]
    logger(report(loss=math.nan))
    assert "loss" not in kept.rows[-1][1] and kept.rows[-1][1]["grad_norm"] == 0.7


# --- What fails ---


def test_failed_sink_is_dropped_and_the_run_continues(text: TextData, tmp_path: Path) -> None:
    kept, broken = Kept(), Broken()
    with (
        pytest.warns(
            UserWarning, match="broken failed and gets no more of this run: ConnectionError: the network is gone"
        ),
        Logger({"broken": broken, "kept": kept}) as logger,
    ):
        run = train_with(logger, text, tmp_path / "run")
    assert run.status == "ok" and len(broken.rows) == 2 and broken.closed == 0
    assert sum("loss" in numbers for _, numbers in kept.rows) == 8 and kept.closed == 1


@pytest.mark.parametrize("name", SINKS)
def test_missing_package_of_a_sink_is_refused_before_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda package: None)
    with pytest.raises(RequestError) as caught:
        open_sinks([name], tmp_path / "run", "run", {})
    assert str(caught.value) == f"log_to={name} needs the package {SINKS[name].package}: pip install {name}"
    assert not (tmp_path / "run").exists()


def test_unknown_or_repeated_sinks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda package: object())
    with refused(code="unknown", field="log_to"):
        check_sinks(["tensorboard", "mlflow"])
    with refused(code="conflict", field="log_to"):
        check_sinks(["wandb", "wandb"])
    check_sinks([])
    check_sinks(SINKS)


# --- The packages, played by recorders ---


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], list[Any]]:
    """Puts a module in the place of a package; its calls are recorded."""

    def play(name: str, **functions: Any) -> None:
        for part in [name] if name != "torch.utils.tensorboard" else [name, "tensorboard"]:
            module = ModuleType(part)
            module.__spec__ = ModuleSpec(part, None)
            for key, function in functions.items():
                setattr(module, key, function)
            monkeypatch.setitem(sys.modules, part, module)

    return play  # type: ignore[return-value]


def recorder(calls: list[Any]) -> Any:
    """An object whose every method records its call."""

    class Recorder(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **named: calls.append((name, args, named))

    return Recorder()


def test_tensorboard_writes_into_the_run_folder_and_purges_rows_after_the_checkpoint(
    played: Any, tmp_path: Path
) -> None:
    calls: list[Any] = []

    def writer(*args: Any, **named: Any) -> Any:
        calls.append(("SummaryWriter", args, named))
        return recorder(calls)

    played("torch.utils.tensorboard", SummaryWriter=writer)
    with open_sinks(["tensorboard"], tmp_path / "run", "run", {}, step=0) as logger:
        logger.write(7, {"loss": 2.5, "lost": math.nan})
    place = str(tmp_path / "run" / "tensorboard")
    assert calls == [
        ("SummaryWriter", (place,), {}), ("add_scalar", ("loss", 2.5, 7), {}), ("close", (), {}),
    ]  # fmt: skip
    with open_sinks(["tensorboard"], tmp_path / "run", "run", {}, step=7):
        pass
    assert calls[3] == ("SummaryWriter", (place,), {"purge_step": 8})


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_resumed_run_is_the_same_run_in_the_sink(name: str, played: Any, tmp_path: Path, capsys: Any) -> None:
    calls: list[Any] = []

    def init(**named: Any) -> Any:
        print("welcome to", name)
        calls.append(("init", (), named))
        return recorder(calls)

    played(name, init=init)
    for folder in ("a", "a", "b"):
        with open_sinks([name], tmp_path / folder / "run", "run", {"model": "m"}) as logger:
            logger.write(3, {"loss": 2.5})
    assert [call[0] for call in calls] == ["init", "log", "finish"] * 3
    assert calls[1] == ("log", ({"loss": 2.5},), {"step": 3})
    first, again, other = (named for kind, _, named in calls if kind == "init")
    same = "id" if name == "wandb" else "name"
    assert first == again and first[same] != other[same]
    assert first["project"] == "glassformer" and first["resume"] == "allow" and first["config"] == {"model": "m"}
    assert capsys.readouterr().out == ""  # standard output is for the result


def test_one_that_cannot_be_opened_closes_the_others(played: Any, tmp_path: Path) -> None:
    calls: list[Any] = []

    def refuse(**named: Any) -> Any:
        raise ValueError("No API key\nconfigured")

    played("trackio", init=lambda **named: recorder(calls))
    played("wandb", init=refuse)
    with refused(code="missing", field="log_to"):
        open_sinks(["trackio", "wandb"], tmp_path / "run", "run", {})
    assert calls == [("finish", (), {})]


def test_event_files_read_back(text: TextData, tmp_path: Path) -> None:
    """Against TensorBoard's own reader."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_sinks(["tensorboard"], tmp_path / "run", "run", {}) as logger:
        run = train_with(logger, text, tmp_path / "run")
        for line in (tmp_path / "run" / NAME).read_text(encoding="utf-8").splitlines():
            logger.record(json.loads(line))
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    losses = [row["loss"] for row in run.metrics if "loss" in row]
    assert [event.step for event in found.Scalars("loss")] == list(range(1, 9))
    assert [event.value for event in found.Scalars("loss")] == pytest.approx(losses, rel=1e-6)
    assert [event.step for event in found.Scalars("log_z/logits")] == [1, 4, 8]
