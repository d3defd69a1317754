"""Experiments as files, which one command runs, resumes and adds seeds to: a design, or several steps with a sentence
about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from glassformer.comparison import Design
from glassformer.comparison.design import FILE, OWN
from glassformer.comparison.single import SingleRun
from glassformer.config import read_tree, validated
from glassformer.errors import RequestError, did_you_mean, shown
from glassformer.laboratory.ladder import LadderDesign
from glassformer.laboratory.scaling import ScalingDesign
from glassformer.parts.core.base import Value
from glassformer.runs.power import PILOT
from glassformer.training import Recipe

Asked = Design | LadderDesign | ScalingDesign | SingleRun
FOLDERS = {"compare": "comparison", "ablate": "ladder", "scale": "scaling", "train": "run"}
"""The folder of each verb, by default."""


class Experiment(Value):
    """Several steps, in their order. Each is a design with its `verb`, and `out`, its folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    about: str = Field(max_length=2000)
    """What it asks, in a sentence."""
    steps: tuple[dict[str, Any], ...] = Field(min_length=1, max_length=100)


@dataclass(frozen=True)
class ExperimentStep:
    """One step of an experiment."""

    verb: str
    tree: Mapping[str, Any]
    out: str
    where: str
    """The file and the number of the step, for complaints."""
    changes: Mapping[str, Any]
    """Fields of the design that the command line gives."""

    def made(self) -> Asked:
        """The design of the step. Raises RequestError."""
        if self.verb == "train":
            return _run_of(self.tree, self.out, self.where)
        kinds: dict[str, type[Design | LadderDesign | ScalingDesign]] = {
            "compare": Design, "ablate": LadderDesign, "scale": ScalingDesign,
        }  # fmt: skip
        found = kinds[self.verb].from_dict(self.tree, self.where)
        return found.vary(**self.changes) if self.changes else found

    def check(self, before: list[str]) -> None:
        """Raises RequestError for what is wrong with the step. What it takes from the folder of a step `before` is
        checked when the step starts."""
        models = str(self.tree.get("models", self.tree.get("model", "")))
        if not any(out in models and not Path(out).exists() for out in before):
            self.made()
            return
        known = OWN | Recipe.model_fields.keys() | {"verb", "schema", "models", "model", "data", "resume"}
        for name in self.tree:
            if name not in known:
                near = did_you_mean(str(name), known)
                message = f"{self.where}: {self.verb} has no field {shown(name)}{near}"
                raise RequestError(message, code="unknown", field=shown(name), value=name)


def _run_of(tree: Mapping[str, Any], out: str, where: str) -> SingleRun:
    rest = {name: value for name, value in tree.items() if name != "verb"}
    missing = [name for name in ("model", "data") if not isinstance(rest.get(name), str)]
    if missing:
        message = f"{where}: train takes a model and data, as text"
        raise RequestError(message, code="missing", field=missing[0], value=rest.get(missing[0]), expected="a text")
    try:
        return SingleRun.of(rest.pop("model"), rest.pop("data"), out=out, **rest)
    except RequestError as error:
        raise error.of(where) from None


def steps_of(
    path: str, out: str | None = None, changes: Mapping[str, Any] | None = None
) -> tuple[str, list[ExperimentStep]]:
    """(what a file asks, its steps), all of them checked. `out` is the folder, of a file with one step; `changes` are
    fields that count instead of the file's. Raises RequestError that names the file, the step and the field."""
    tree, changes = read_tree(path), changes or {}
    if isinstance(tree, dict) and "steps" not in tree:
        about, trees, numbered = "", [tree], False
    else:
        experiment: Experiment = validated(Experiment, tree, "experiment", str(path))
        about, trees, numbered = experiment.about, list(experiment.steps), True
    if out is not None and len(trees) > 1:
        raise RequestError(f"{path} has {len(trees)} steps with a folder each; leave --out out", code="conflict",
                           field="out", value=out)  # fmt: skip
    steps: list[ExperimentStep] = []
    for number, one in enumerate(trees, 1):
        where = f"{path}, step {number}" if numbered else str(path)
        steps.append(_step(one, where, out or (None if numbered else _folder_of(path)), changes))
        steps[-1].check([step.out for step in steps[:-1]])
    if changes and all(step.verb == "train" for step in steps):
        name = next(iter(changes))
        raise RequestError(f"{path} has no step that takes --{name}", code="conflict", field=name, value=changes[name])
    return about, steps


def _folder_of(path: str) -> str | None:
    """The folder that a design was left in, which its experiment continues; None of a file elsewhere."""
    place = Path(path)
    if place.name != FILE:
        return None
    return str(place.parent.parent if place.parent.name == PILOT else place.parent)


def _step(tree: Mapping[str, Any], where: str, out: str | None, changes: Mapping[str, Any]) -> ExperimentStep:
    rest = {str(name).replace("-", "_"): value for name, value in tree.items()}
    verb, own = rest.get("verb", "compare"), rest.pop("out", None)
    if verb not in FOLDERS:
        near = did_you_mean(shown(verb), FOLDERS) or f"; use {', '.join(FOLDERS)}"
        message = f"{where}: verb={shown(repr(verb))} is not a verb of an experiment{near}"
        raise RequestError(message, code="unknown", field="verb", value=verb)
    if own is not None and not (isinstance(own, str) and own):
        raise RequestError(f"{where}: out is a folder, as text", code="type", field="out", value=own)
    return ExperimentStep(verb, rest, out or own or FOLDERS[verb], where, {} if verb == "train" else changes)


def run_experiment(
    path: str, out: str | None, changes: Mapping[str, Any], show: Callable[[ExperimentStep, Asked], None],
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Runs the steps of an experiment one after the other; each goes on where it stopped."""
    about, steps = steps_of(path, out, changes)
    if about:
        say(f"{Path(path).name}: {about}")
    for step in steps:
        say(f"{step.verb}, in {step.out}")
        show(step, step.made())
