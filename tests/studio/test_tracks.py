"""Curves, events and layers of trainings as their files tell them, and what a person can do to these files."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

import glassformer as gf
from glassformer import machine
from glassformer.agents import comparisons as comparisons_
from glassformer.errors import WorkError
from glassformer.figures.terminal import clock
from glassformer.laboratory.experiments import steps_of
from glassformer.parts.core.base import to_plain
from glassformer.runs.request import read_request
from glassformer.studio import runs as runs_
from glassformer.studio import tracks as tracks_
from glassformer.studio.bodies import RunsRequest, TextPieceRequest, TrainRequest
from glassformer.studio.kept import PageShelf
from glassformer.studio.look import look
from glassformer.studio.models import Models
from glassformer.studio.runs import Runs
from glassformer.studio.tail import Tail
from glassformer.studio.tracks import POINTS, Event, RunTrack
from tests.refused import failed, refused

STEPS = 60
SPIKE = 41


def loss_of(step: int, seed: int) -> float:
    return 9.5 if step == SPIKE and seed == 0 else 4 - 0.02 * step - 0.1 * seed


def training(folder: Path, name: str, models: tuple[str, ...] = ("gpt2@0.05m",), seeds: int = 1, **design: Any) -> Path:
    """A folder as a training leaves it that was stopped before its runs ended: steps, statistics, one spike."""
    place = folder / name
    for model in models:
        config = gf.preset(f"{model}+vocab_size=32")
        for seed in range(seeds):
            arm = place / "runs" / f"{model}-seed{seed}"
            (arm / "run").mkdir(parents=True)
            recipe = gf.Recipe(tokens=STEPS * 64, context=32, batch_size=2, seed=seed)
            (arm / "request.json").write_text(json.dumps({"name": model, "recipe": {"seed": seed}}))
            (arm / "run" / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
            (arm / "run" / "recipe.yaml").write_text(yaml.safe_dump(to_plain(recipe)))
            with (arm / "run" / "metrics.jsonl").open("w") as file:
                for step in range(1, STEPS + 1):
                    file.write(json.dumps({
                        "step": step, "tokens": 64 * step, "seconds": 0.1 * step, "loss": loss_of(step, seed),
                        "learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_second": 640.0}) + "\n")  # fmt: skip
            with (arm / "run" / "dynamics.jsonl").open("w") as file:
                for step in range(1, STEPS + 1, 5):
                    places = {f"layers.{layer}.mixer": [0.1 * layer + 0.001 * step] * 2 for layer in range(2)}
                    file.write(json.dumps({"step": step, "statistics": {"attention_entropy": places}}) + "\n")
                if seed == 0:
                    file.write(json.dumps({"step": SPIKE, "event": "spike", "what": "loss", "value": 9.5,
                                           "sigmas": 8.2, "batch": ["a text"]}) + "\n")  # fmt: skip
    asked = {"schema": 1, "verb": "compare", "models": list(models), "data": "number-words", "tokens": STEPS * 64,
             "seeds": seeds, **design}  # fmt: skip
    (place / "asked.yaml").write_text(yaml.safe_dump(asked))
    return place


def asked(**given: Any) -> TrainRequest:
    return TrainRequest(**{"models": ["gpt2@0.05m"], "data": "number-words", "tokens": 20_000} | given)


def test_view_has_a_curve_with_its_spike_and_the_words_of_the_event(tmp_path: Path) -> None:
    training(tmp_path, "one", seeds=2)
    view = Runs(tmp_path).view("one")
    assert [run["seed"] for run in view["runs"]] == [0, 1] and view["marks"] and view["state"] == "incomplete"
    first, second = view["runs"]
    assert first["events"] == ["step 41: spike of loss, 9.5, 8.2 sigma"] and second["events"] == []
    assert first["progress"] == "step 60, 3,840 tokens, loss 2.800" and first["weights"] is None
    assert view["figure"].count("<title>gpt2@0.05m: 9.500 at") == 1 and "9.5" in view["narrow"]


def test_marks_of_many_events_are_found_without_comparing_all_pairs(tmp_path: Path) -> None:
    """Against the nearest step by definition, and with a bound on the number of comparisons."""

    class Rows(Tail[Any]):
        def __init__(self, rows: list[Any]) -> None:
            super().__init__(tmp_path / "none", lambda line: None)
            self.given = rows

        def rows(self) -> list[Any]:
            return self.given

    class Step:
        looks = 0

        def __init__(self, step: int) -> None:
            self.number, self.tokens, self.loss = step, 64.0 * step, 4 - 0.001 * step

        @property
        def step(self) -> int:
            Step.looks += 1
            return self.number

    def marks(rows: list[Step], events: list[Event]) -> list[tuple[float, float]]:
        return RunTrack("one", "gpt2", 0, tmp_path, Rows(rows), Rows(events)).marks()

    few = [Step(step) for step in range(3, 60, 7)]
    events = [Event(step, "spike", 9.0 if step % 2 else None) for step in range(70)]
    near = [min(few, key=lambda row: abs(row.number - event.step)) for event in events]
    assert marks(few, events) == [
        (row.tokens, row.loss if event.loss is None else event.loss) for row, event in zip(near, events, strict=True)
    ]
    assert marks([], events) == [] == marks(few, [])
    many, Step.looks = [Step(step) for step in range(3000)], 0
    found = marks(many, [Event(step, "spike", None) for step in range(3000)])
    assert POINTS // 2 <= len(found) <= POINTS and Step.looks <= 2 * len(many)
    assert all(loss == 4 - 0.001 * tokens / 64 for tokens, loss in found)


def test_why_and_layers_are_those_of_the_library(tmp_path: Path) -> None:
    place = training(tmp_path, "one")
    runs = Runs(tmp_path)
    found = runs.why("one", "gpt2@0.05m-seed0")
    expected = gf.why(place / "runs" / "gpt2@0.05m-seed0")
    assert {key: found[key] for key in expected.to_dict()} == expected.to_dict()
    assert found["commands"] == [f"glassformer why {place / 'runs' / 'gpt2@0.05m-seed0' / 'run'}"]
    layers = runs.dynamics("one", "")
    assert layers["statistics"] == {"attention_entropy": "entropy", "attention_entropy_worst": "worst head"}
    assert layers["statistic"] == "attention_entropy" and "steps 57" not in layers["curves"]
    assert layers["layers"].count("<svg") >= 1 and "Layer" in layers["layers"] and "spike" in layers["words"]
    assert runs.dynamics("one", "attention_entropy_worst")["statistic"] == "attention_entropy_worst"
    assert runs.dynamics("one", "nothing")["statistic"] == "attention_entropy"
    with refused(code="unknown", field="run"):
        runs.why("one", "../one/runs/gpt2@0.05m-seed0")
    with refused(code="unknown", field="name"):
        runs.dynamics("../one", "")


def test_overlaid_trainings_have_notes_on_differences(tmp_path: Path) -> None:
    for name, design in (("a", {}), ("b", {}), ("c", {"tokens": 5}), ("d", {"data": "python-docs"})):
        training(tmp_path, name, **design)
    runs = Runs(tmp_path)
    found = runs.over(["a", "b"])
    assert [row["letter"] for row in found["runs"]] == ["A", "B"] and len(found["notes"]) == 1
    assert found["figure"].count("gf-mean") == 2 and "B gpt2@0.05m" in found["legend"].replace("<wbr>", "")
    assert "budgets" in " ".join(runs.over(["a", "c"])["notes"])
    assert "different texts" in " ".join(runs.over(["a", "d"])["notes"])
    assert len(runs.over(["a", "a"])["runs"]) == 1
    with refused(code="unknown", field="name"):
        runs.over(["a", "nothing"])


def test_trainings_of_earlier_days_are_listed_with_their_day(tmp_path: Path) -> None:
    training(tmp_path, "old")
    os.utime(tmp_path / "old" / "asked.yaml", (0, 0))
    training(tmp_path, "new")
    rows = Runs(tmp_path).listed()["runs"]
    assert [row["name"] for row in rows] == ["new", "old"] and rows[1]["created"].startswith("1970-01-01")
    assert rows[0]["data"] == "number-words"


def test_text_of_the_folder_is_trained_on_and_no_other_file(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.texts.take(TextPieceRequest(upload="0" * 16, name="mine.txt", size=6, content="b25lCm9uZQo="[:8]))
    design = runs.design(asked(data="mine.txt"))
    assert design.data == str(tmp_path / "texts" / "mine.txt") and design.recipe["watch"] > 0
    assert "watch" not in runs.design(asked(watch=False)).recipe
    for name in ("../mine.txt", "texts/mine.txt", "other.txt", str(tmp_path / "texts" / "mine.txt")):
        with refused(code="unsupported", field="data"):
            runs.design(asked(data=name))


def test_plan_before_the_start_shows_runs_and_time(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    found = runs.plan(asked(models=["gpt2@1m", "llama@1m"], tokens=None, minutes=2, seeds=3))
    assert "2 models x 3 seeds x 2:00: about 12:00" in found["words"]
    assert found["sizes"][0] == f"gpt2@1m: {gf.preset('gpt2@1m').num_params():,} parameters"
    assert "how fast" in runs.plan(asked())["words"]
    with refused(code="conflict", field="budget"):
        runs.plan(asked(minutes=1))


def test_model_too_large_for_the_memory_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda *where: 1 << 30)
    with refused(code="memory", field="models"):
        Runs(tmp_path / "runs").start(asked(models=["llama-3-8b"]))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(machine, "free_memory", lambda *where: 1000)
    place = training(tmp_path, "one")
    run = place / "runs" / "gpt2@0.05m-seed0" / "run"
    models = Models(None, lambda: {str(run): run}, {str(run): run}.get)
    (run / "latest").write_text("step_00000060")
    with refused(code="memory", field="model"):
        models.served(str(run))


def test_expression_of_ten_thousand_characters_is_refused() -> None:
    with pytest.raises(ValidationError) as caught:
        asked(models=["gpt2+" + "a" * 10_000])
    assert caught.value.errors()[0]["type"] == "string_too_long"


def test_full_disk_at_the_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *args: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with failed(code="disk"):
        Runs(tmp_path / "runs").start(asked())
    assert list(tmp_path.iterdir()) == []


def test_full_disk_after_the_start_leaves_no_process_and_loses_no_design(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, real, spawn = Runs(tmp_path), comparisons_.replace_text, subprocess.Popen
    full, made = {"asked.yaml"}, list[subprocess.Popen[bytes]]()

    def write(path: Path, text: str) -> None:
        if path.name in full:
            raise WorkError("the disk is full", code="disk")
        real(path, text)

    def sleeper(command: list[str], **given: Any) -> subprocess.Popen[bytes]:
        made.append(spawn([sys.executable, "-c", "import time; time.sleep(600)"], **given))
        return made[-1]

    monkeypatch.setattr(comparisons_, "replace_text", write)
    monkeypatch.setattr(comparisons_.subprocess, "Popen", sleeper)
    with failed(code="disk"):
        runs.start(asked())
    assert list(tmp_path.iterdir()) == [] and made == []
    full = {"process.txt"}  # the process runs, and its number cannot be kept
    with failed(code="disk"):
        runs.start(asked())
    assert made[0].poll() is not None
    (row,) = runs.listed()["runs"]
    assert row["state"] == "incomplete" and runs.comparisons.design_of(row["name"])["tokens"] == 20_000
    full = set()
    runs.comparisons.resume(row["name"])  # once there is room
    assert runs.view(row["name"])["state"] == "running"
    shutil.rmtree(tmp_path / row["name"])
    assert runs.listed()["runs"] == [] and made[1].poll() is not None


@pytest.mark.parametrize(("code", "state"), [("stopped", "incomplete"), ("disk", "failed")])
def test_stopped_training_has_not_failed_and_a_full_disk_has_its_sentence(
    tmp_path: Path, code: str, state: str
) -> None:
    place = training(tmp_path, "one")
    (place / "progress.txt").write_text("glassformer: a sentence\n")
    (place / "answer.json").write_text(json.dumps({"error": {"code": code, "field": "", "message": "a sentence"}}))
    view = Runs(tmp_path).view("one")
    assert view["state"] == state and view["refused"] == ("a sentence" if state == "failed" else "")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runs_, "BEAT", 0.001)
    monkeypatch.setattr(runs_, "FRESH", 0.0)
    return


def messages(runs: Runs, after_first: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All messages of the stream of a training that seems to run; `after_first` is called after the first one."""
    monkeypatch.setattr(runs.comparisons, "running", lambda name: True)

    async def read() -> list[str]:
        found: list[str] = []
        async for message in runs.events("one", None):
            found.append(message.decode())
            if len(found) == 1:
                after_first()
        return found

    return asyncio.run(asyncio.wait_for(read(), 60))


@pytest.mark.usefixtures("quick")
def test_folder_deleted_under_a_stream_ends_it_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training(tmp_path, "one")
    training(tmp_path, "two")
    runs = Runs(tmp_path)
    found = messages(runs, lambda: shutil.rmtree(tmp_path / "one"), monkeypatch)
    assert found[0].startswith("id: ") and found[-1].startswith("event: lost\ndata: {")
    assert json.loads(found[-1].partition("data: ")[2])["message"]
    assert [row["name"] for row in runs.listed()["runs"]] == ["two"] and runs.view("two")["runs"]
    shutil.rmtree(tmp_path / "two")
    tmp_path.rmdir()
    assert runs.listed()["runs"] == [] and runs.weights() == {}
    for act in (runs.view, runs.tracks, runs.known):
        with refused(code="unknown", field="name"):
            act("two")


@pytest.mark.usefixtures("quick")
def test_view_is_made_once_for_all_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training(tmp_path, "one")
    runs, made = Runs(tmp_path), []
    view = runs.view
    monkeypatch.setattr(runs, "view", lambda name: made.append(name) or view(name))

    async def ten() -> set[str]:
        return {one.id for one in await asyncio.gather(*(runs.latest("one") for _ in range(10)))}

    assert len(asyncio.run(ten())) == 1 and made == ["one"]


def test_finished_run_is_a_model_and_one_that_was_trained_on_is_read_again(tmp_path: Path, letters: Any) -> None:
    folder = training(tmp_path, "one") / "runs" / "gpt2@0.05m-seed0"
    runs = Runs(tmp_path)
    assert runs.weights() == {}
    (folder / "result.json").write_text("{}")
    assert runs.weights() == {}
    shutil.rmtree(folder / "run")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 200)
    gf.train(letters.config, text, tokens=512, context=32, batch_size=2, out=folder / "run",
             tokenizer=letters.tokenizer, progress=False)  # fmt: skip
    name = str(folder / "run")
    assert list(runs.weights()) == [name]
    models = Models(None, runs.weights, runs.weights_of)
    models.names = []
    assert models.listed() == [{"name": name, "kind": "run", "label": "one: gpt2@0.05m-seed0"}]
    first = models.served(name)
    assert models.served(name) is first and models.about(name)["label"] == "one: gpt2@0.05m-seed0"
    assert models.trained_here(name) and not models.trained_here(str(text))
    models.trained = dict
    assert models.listed() == [] and models.listed([name])[0]["label"] == "one: gpt2@0.05m-seed0"
    page = look(models.served(name), models.label(name), "the cat", ("layers.0.ffn",), PageShelf())
    assert [one["name"] for one in page["answers"]] == [
        "one: gpt2@0.05m-seed0", "one: gpt2@0.05m-seed0 without layers.0.ffn"
    ]  # fmt: skip
    assert name in page["commands"][0]
    os.utime(folder / "run" / "latest", (1, 1))
    assert models.served(name) is not first
    shutil.rmtree(tmp_path / "one")
    with refused(code="unknown", field="model"):
        models.served(name)
    models.close()


def test_command_of_a_training_makes_the_design_that_was_asked_for(tmp_path: Path) -> None:
    runs, given = Runs(tmp_path), asked(models=["gpt2@0.05m", "gpt2@0.1m"], allow_unmatched=True, seeds=2)
    design = runs.design(given).to_dict() | {"batch_size": 3, "seed": 17}
    place = training(tmp_path, "one")
    (place / "asked.yaml").write_text(yaml.safe_dump(design))
    for found in (runs.view("one"), runs.dynamics("one", "")):
        verb, file, *options = shlex.split(found["commands"][0])[1:]
        assert verb == "run" and options == ["--out", str(place)]
        assert found["python"] == [f"gf.run({file!r}, out={str(place)!r})"]
        (step,) = steps_of(file, options[1])[1]
        assert step.out == str(place) and step.tree["allow_unmatched"] is True
        assert {name: step.tree.get(name) for name in design} == design
    (place / "asked.yaml").rename(place / "design.yaml")  # started by a command, not by a page
    verb, file, *options = shlex.split(runs.view("one")["commands"][0])[1:]
    (step,) = steps_of(file)[1]
    assert options == [] and step.out == str(place) and step.tree["batch_size"] == 3


def test_results_are_read_once_for_the_time_of_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (training(tmp_path, name) / "results.json").write_text("{}")
    runs, read = Runs(tmp_path), list[str]()
    monkeypatch.setattr(runs_, "read_results", lambda place: read.append(place.name))
    for _ in range(3):
        runs.plan(asked())
    assert sorted(read) == ["one", "two"]
    os.utime(tmp_path / "one" / "results.json", (1, 1))  # written again
    runs.plan(asked())
    assert sorted(read) == ["one", "one", "two"]


def test_speed_is_that_of_the_latest_training_and_damaged_results_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = training(tmp_path, "one")
    (place / "results.json").write_text("{ damaged")
    runs = Runs(tmp_path)
    assert "how fast" in runs.plan(asked())["words"]
    run = SimpleNamespace(flops_per_token=3e6, train=SimpleNamespace(tokens_per_second=1000.0))
    monkeypatch.setattr(runs_, "read_results", lambda place: SimpleNamespace(runs=[run]))
    os.utime(place / "results.json", (2, 2))
    design = runs.design(asked())
    (config,) = design.configs.values()
    seconds = 20_000 * 3 * config.flops(design.context) / 3e9
    assert f"about {clock(seconds)} of training in all, at the speed of one" in runs.plan(asked())["words"]


def test_number_of_trainings_in_one_figure_is_bounded_and_said(tmp_path: Path) -> None:
    found = Runs(tmp_path).listed()
    names = ["a"] * (found["most_over"] + 1)
    assert len(RunsRequest(names=names[1:]).names) == found["most_over"]
    with pytest.raises(ValidationError) as caught:
        RunsRequest(names=names)
    assert (caught.value.errors()[0]["type"], caught.value.errors()[0]["loc"]) == ("too_long", ("names",))


def test_link_to_an_old_run_is_followed_without_reading_other_comparisons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("old", "new"):
        folder = training(tmp_path, name) / "runs" / "gpt2@0.05m-seed0"
        (folder / "result.json").write_text("{}")
        (folder / "run" / "latest").write_text("step_00000060")
    os.utime(tmp_path / "old" / "asked.yaml", (0, 0))
    runs, read = Runs(tmp_path), list[Path]()
    monkeypatch.setattr(runs_, "MOST_WEIGHTS", 1)
    old = tmp_path / "old" / "runs" / "gpt2@0.05m-seed0" / "run"
    assert str(old) not in runs.weights()
    monkeypatch.setattr(tracks_, "read_request", lambda place: read.append(place) or read_request(place))
    assert [runs.weights_of(str(old)) for _ in range(2)] == [old, old] and read == [old.parent]
    elsewhere = Path("/", *old.parts[-4:])
    for other in (f"{old}/.", old.parent, elsewhere, old.parents[1] / "x" / "run", "run", "/etc/passwd"):
        assert runs.weights_of(str(other)) is None
    (old / "latest").unlink()
    assert runs.weights_of(str(old)) is None
