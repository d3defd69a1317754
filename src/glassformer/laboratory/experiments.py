"""Experiments as files that one command runs, resumes and extends by seeds: a design, or several steps with a
description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from glassformer.comparison import Comparison, Design, compare
from glassformer.comparison.design import FILE, OWN
from glassformer.comparison.single import SingleRun
from glassformer.config import read_tree, validated
from glassformer.errors import RequestError, did_you_mean, shown
from glassformer.laboratory.ladder import Ladder, LadderDesign, ablate
from glassformer.laboratory.scaled import Scaling
from glassformer.laboratory.scaling import ScalingDesign, scale
from glassformer.parts.core.base import Value
from glassformer.parts.core.outside import naming_imports
from glassformer.runs.events import Notify
from glassformer.runs.executor import Executor
from glassformer.runs.live import shown as showing
from glassformer.runs.power import PILOT
from glassformer.training import Recipe, Run
from glassformer.typed import typed

Asked = Design | LadderDesign | ScalingDesign | SingleRun
Result = Comparison | Ladder | Scaling | Run
KINDS: dict[str, tuple[type[Design | LadderDesign | ScalingDesign], Callable[..., Any]]] = {
    "compare": (Design, compare), "ablate": (LadderDesign, ablate), "scale": (ScalingDesign, scale),
}  # fmt: skip
"""Verb of several runs -> its design and the function that runs it."""
FOLDERS = {"compare": "comparison", "ablate": "ladder", "scale": "scaling", "train": "run"}
"""Default folder of each verb."""


class Experiment(Value):
    """Content of an experiment file with several steps, in order. Each is a design with its `verb` and its folder
    `out`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    about: str = Field(max_length=2000)
    """Question of the experiment, in a sentence."""
    steps: tuple[dict[str, Any], ...] = Field(min_length=1, max_length=100)


@dataclass(frozen=True)
class ExperimentStep:
    """One step of an experiment file: a verb with its design and output folder."""

    verb: str
    tree: Mapping[str, Any]
    out: str
    where: str
    """File and index of the step, for error messages."""
    changes: Mapping[str, Any]
    """Fields of the design that the command line overrides."""

    def made(self) -> Asked:
        """Makes the design of the step from its fields. Raises RequestError for invalid ones."""
        if self.verb == "train":
            return _run_of(self.tree, self.out, self.where)
        found = KINDS[self.verb][0].from_dict(self.tree, self.where)
        return found.replace(**self.changes) if self.changes else found

    def carry_out(self, progress: bool | Notify = True, executor: Executor | None = None) -> Result:
        """Runs the step, or resumes it, and returns its result."""
        asked = self.made()
        if isinstance(asked, SingleRun):
            with showing(progress) as notify:
                return asked.train(notify)
        return KINDS[self.verb][1](asked, out=self.out, progress=progress, executor=executor)

    def check(self, before: list[str]) -> None:
        """Raises RequestError for an invalid step. Inputs from the folder of a step `before` are checked when the step
        starts."""
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
    path: str | Path, out: str | Path | None = None, **changes: Any
) -> tuple[str, list[ExperimentStep]]:  # fmt: skip
    """Reads an experiment file. Returns its description with the name of the file, and its steps, all of them checked.
    `out` is the folder of a file with one step; `changes` are fields that override the file's, if not None. Raises
    RequestError that names the file, the step and the field."""
    tree, changes = read_tree(path), {name: value for name, value in changes.items() if value is not None}
    path, out = str(path), None if out is None else str(out)
    if isinstance(tree, dict) and "about" not in tree and not isinstance(tree.get("steps"), list):
        about, trees, numbered = "", [tree], False
    else:
        experiment: Experiment = validated(Experiment, tree, "experiment", str(path))
        about, trees, numbered = f"{Path(path).name}: {experiment.about}", list(experiment.steps), True
    if out is not None and len(trees) > 1:
        raise RequestError(f"{path} has {len(trees)} steps with a folder each; leave --out out", code="conflict",
                           field="out", value=out)  # fmt: skip
    steps: list[ExperimentStep] = []
    for number, one in enumerate(trees, 1):
        where = f"{path}, step {number}" if numbered else str(path)
        with naming_imports(Path(path).parent):
            steps.append(_step(one, where, out or (None if numbered else _folder_of(path)), changes))
            steps[-1].check([step.out for step in steps[:-1]])
    if changes and all(step.verb == "train" for step in steps):
        name = next(iter(changes))
        raise RequestError(f"{path} has no step that takes --{name}", code="conflict", field=name, value=changes[name])
    return about, steps


def _folder_of(path: str) -> str | None:
    """Returns the output folder of the experiment whose design.yaml the path names, if the file is in one, so that the
    experiment continues there; None for a file elsewhere."""
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


@typed
def run(
    file: str | Path,
    *,
    seeds: int | None = None,
    tune: bool | None = None,
    watch: int | None = None,
    out: str | Path | None = None,
    executor: Executor | None = None,
    progress: bool | Notify = True,
) -> Result | list[Result]:
    """Runs an experiment that a file describes; the same call continues it.

    Parameters
    ----------
    file
        The design.yaml of an experiment, which continues in its folder; or a .yaml file with a sentence `about` it and
        `steps`, designs each with a `verb` (train, compare, ablate, scale) and a folder `out`. All are checked before
        the first starts.
    seeds, tune, watch
        Fields of the designs that count instead of the file's: runs of each model, the choice of learning rates, steps
        between observations.
    out
        Folder instead of the file's.
    executor, progress
        As in `compare`.

    Returns
    -------
    Comparison, Ladder, Scaling or Run
        The result, or a list of the results of several steps.

    Raises
    ------
    RequestError
        Before anything starts, with the file, the step and the field.
    WorkError
        If a run of a step failed; later steps are not started.

    Examples
    --------
    >>> gf.run("recipes/gpt2-to-llama.yaml", seeds=5)  # doctest: +SKIP
    """
    found = []
    for step in steps_of(file, out, seeds=seeds, tune=tune, watch=watch)[1]:
        found.append(step.carry_out(progress, executor))
        found[-1].check()
    return found[0] if len(found) == 1 else found
