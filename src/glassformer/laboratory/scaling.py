"""Scaling laws of architectures, from runs to verdict: one comparison for each size and budget."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np

from glassformer.comparison.arms import DesignArm, FixedFields, arms, listing, recipe_fields
from glassformer.comparison.design import FILE, OWN, Design, design_of, from_tree, to_yaml
from glassformer.comparison.experiment import carry_out, checked_folder, command_of, read_text
from glassformer.comparison.verbs import place_of_work
from glassformer.config import ModelConfig, first_difference
from glassformer.errors import RequestError, shown
from glassformer.files import check_output, check_schema, only_writer, output, refuse_foreign, replace_text
from glassformer.laboratory.cells import CELLS, runs_of
from glassformer.laboratory.estimate import SOURCE, rates
from glassformer.laboratory.forms import FORMS
from glassformer.laboratory.grid import Cell, Grid, grid
from glassformer.laboratory.law import different, fit_scaling_law, refuse_far
from glassformer.laboratory.points import points
from glassformer.laboratory.scaled import REPORT, Planned, Scaling, ScalingLaw, ScalingPlan
from glassformer.laboratory.several import laws
from glassformer.naming import at_size
from glassformer.naming.resolve import ModelLike
from glassformer.options import CellKeywords
from glassformer.parts.core.base import PartConfig, to_plain
from glassformer.runs.events import Notify, PlanEvent
from glassformer.runs.executor import Executor, interruptible, with_callbacks
from glassformer.runs.live import shown as showing
from glassformer.text import DataLike, Tokens
from glassformer.training import Callback, Interrupted, Recipe
from glassformer.training.pace import evaluated, run_seconds
from glassformer.training.request import fit
from glassformer.typed import typed
from glassformer.units import quantity

VERB = "scale"
RECORD = "scaling.json"
OTHERS = ("tokens", "minutes", "steps", "match", "seed", "tune", "within", "power", "looks",
          "flops")  # fmt: skip
"""Options of `compare` that `scale` does not take, or takes with another meaning."""


@dataclass(frozen=True, kw_only=True)
class ScalingDesign:
    """Design of an experiment on scaling laws: models, sizes and budgets, and one comparison for each size and
    budget."""

    models: tuple[DesignArm, ...]
    sizes: Any
    budgets: Any
    isoflop: Any
    grid: Grid
    form: str
    hours: float | None
    predict: tuple[tuple[float, float], ...]
    flops: tuple[float, ...]
    far: bool
    cells: Mapping[Cell, Design]
    """The comparison of each size and budget."""

    @classmethod
    def of(
        cls,
        models: Sequence[ModelLike] | Mapping[str, ModelLike],
        data: str | Path | None = None,
        *,
        sizes: str | Sequence[str] | None = None,
        budgets: str | Sequence[Any] | float | None = None,
        isoflop: str | Sequence[Any] | float | None = None,
        form: str = "chinchilla",
        hours: float | None = None,
        predict: str | Sequence[Any] = (),
        flops: str | float | Sequence[Any] = (),
        far: bool = False,
        recipe: Recipe | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Makes a scaling design from the arguments of `scale`. Raises RequestError for invalid ones."""
        options = recipe_fields(recipe, options)
        predicted, compute = pairs(predict), amounts(flops)
        if sizes is None:
            message = "give the sizes of the models: --sizes 0.3m,1m..10m"
            raise RequestError(message, code="missing", field="sizes")
        named = tuple(arms(models).values())
        chosen = grid(sizes, budgets, isoflop)
        chosen.check(form)
        if compute and len(FORMS[form].reads) < 2:
            raise RequestError(
                f"{FORMS[form].formula} says nothing of how to share compute; leave flops out", field="flops",
                code="conflict",
            )  # fmt: skip
        _refuse_others(options)
        if hours is not None and not hours > 0:
            raise RequestError(code="range", field="hours", value=hours, expected="above 0")
        sized = {size: [arm.at_size(size) for arm in named] for size in chosen.sizes}
        plain = {"allow_unmatched": True, "loss_alone": True, **options}
        Design.of([arm for some in sized.values() for arm in some], data, tokens=1, **plain)  # one context for all
        cells = {cell: Design.of(sized[cell.size], data, **plain, **cell.given) for cell in chosen.cells}
        return cls(
            models=named, sizes=_kept(sizes), budgets=_kept(budgets), isoflop=_kept(isoflop), grid=chosen, form=form,
            hours=hours, predict=predicted, flops=compute, far=far, cells=FixedFields(cells),
        )  # fmt: skip

    @property
    def first(self) -> Design:
        """Comparison of the smallest size and budget; its text, recipe and seeds are common to all."""
        return next(iter(self.cells.values()))

    @property
    def parts(self) -> tuple[type[PartConfig], ...]:
        """Classes of the parts of the design's models and recipes."""
        return self.first.parts

    @property
    def data(self) -> str | None:
        """Name of the training text, as in a `Design`."""
        return self.first.data

    @property
    def tokenizer(self) -> str:
        """Tokenizer of the training text, as in a `Design`."""
        return self.first.tokenizer

    def replace(self, **changes: Any) -> Self:
        """Returns a copy of the design with other values for some arguments of the constructor `ScalingDesign.of`.
        Raises RequestError for invalid ones."""
        asked = {name: getattr(self, name) for name in ASKED}
        options = {name: getattr(self.first, name) for name in OWN - {*OTHERS}} | dict(self.first.recipe)
        changes = recipe_fields(changes.pop("recipe", None), changes)
        return self.of(**{**asked, "data": self.data, **options, **changes})

    def to_dict(self) -> dict[str, Any]:
        """Returns the design as plain values: the content of design.yaml."""
        rest = self.first.to_dict() | {"verb": VERB, "models": listing(self.models)}
        for name in ("tokens", "flops", "allow_unmatched", "loss_alone"):
            rest.pop(name, None)
        asked = {name: to_plain(getattr(self, name)) for name in ASKED if name != "models"}
        return rest | {name: value for name, value in asked.items() if value not in (None, [], False)}

    def save(self, folder: str | Path) -> None:
        """Writes the design to design.yaml in the folder."""
        replace_text(Path(folder) / FILE, to_yaml(self.to_dict()))

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any], where: str = "") -> Self:
        """Makes a scaling design from the content of a design.yaml. Raises RequestError for invalid content."""
        return from_tree(tree, VERB, where, cls.of)


ASKED = ("models", "sizes", "budgets", "isoflop", "form", "hours", "predict", "flops", "far")
"""Fields of a `ScalingDesign` that are given; the others are derived."""


@typed
def scale(
    models: Sequence[ModelLike] | Mapping[str, ModelLike] | ScalingDesign | None,
    data: DataLike | None = None,
    *,
    sizes: str | Sequence[str] | None = None,
    budgets: str | Sequence[Any] | float | None = None,
    isoflop: str | Sequence[Any] | float | None = None,
    hours: float | None = None,
    form: str | None = None,
    columns: Mapping[str, str] | None = None,
    where: Mapping[str, str] | None = None,
    without_worst: int = 0,
    predict: str | Sequence[Any] | None = None,
    flops: str | float | Sequence[Any] | None = None,
    far: bool | None = None,
    out: str | Path | None = None,
    executor: Executor | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | Notify = True,
    command: str | None = None,
    **options: Unpack[CellKeywords],
) -> Scaling | ScalingLaw:
    """Trains models at several sizes and budgets and fits a scaling law of each; or fits one to a table of runs.

    Each size and budget is one comparison in `out`/cells, so that the same call resumes, and more models, sizes,
    budgets or seeds are added to those in the folder. Every run has its own schedule, which ends with its budget. Runs
    that diverge are shown and left out.

    Parameters
    ----------
    models
        Expressions without a size, paths, configs or models, or a mapping from names to them; or a `ScalingDesign`,
        whose fields the others then change. A config keeps its parts at every size. None if `data` is a table.
    data
        As in `compare`. Without models, a table as `fit_scaling_law` reads it: a .csv file, the folder of a `scale` or
        `compare`, columns or rows.
    sizes
        "0.3m,0.6m,1m..10m": those of the table or any number of parameters. A..B is a ladder of about factor 2, A..B:N
        one of N rungs.
    budgets
        Budgets of each run in tokens, "250k,1M..4M".
    isoflop
        Instead, budgets of each run in training FLOPs, "1e13,3e13". Tokens follow from the FLOPs of the model.
    hours
        Limit of the time of all runs. If the estimate is longer, nothing is trained.
    form
        "chinchilla", the default, "kaplan", "kaplan_params", "overtraining", "params", "tokens" or "compute".
    columns, where, without_worst
        Of a table: names of its columns, rows to choose by the text of a column, number of highest losses to leave out.
    predict
        Parameters and tokens whose loss is predicted.
    flops
        Budgets of compute (6 N D) at which the best losses are compared; by default that of the largest run and ten
        times it.
    far
        Predict beyond ten times the largest run.
    out
        Folder of scaling.json, report.html and the runs; of a table, the page to write. If None, nothing is kept.
    executor, callbacks, progress, command
        As in `compare`.
    **options
        Seeds, tokenizer, and fields of the recipe of all runs, as in `compare`.

    Returns
    -------
    Scaling or ScalingLaw
        The laws of the models with their runs and differences; or the law of a table.

    Raises
    ------
    RequestError
        Before anything is trained: for sizes and budgets that are too few for the form, an expression with its own
        size, a prediction out of reach, too little time, and options of the other form of this verb.
    Interrupted
        On Ctrl-C; the same call continues.

    Examples
    --------
    >>> found = gf.scale(["gpt2"], "python-docs", sizes="0.1m..1m", budgets="50k,100k")  # doctest: +SKIP
    >>> found.laws[0].values["alpha"]  # doctest: +SKIP
    """
    if not models:
        training = {
            "sizes": sizes, "budgets": budgets, "isoflop": isoflop, "hours": hours, "executor": executor,
            "callbacks": callbacks or None, **options,
        }  # fmt: skip
        return _of_table(
            data, form or "chinchilla", columns, where, without_worst, out, command, training,
            predict=pairs(predict), flops=amounts(flops), far=bool(far),
        )  # fmt: skip
    if columns or where or without_worst:
        raise RequestError(
            "--columns, --where and --without-worst are for a table of runs; leave the models out",
            code="conflict", field="columns" if columns else "where" if where else "without_worst",
        )  # fmt: skip
    asked = {
        "sizes": sizes, "budgets": budgets, "isoflop": isoflop, "form": form, "hours": hours, "predict": predict,
        "flops": flops, "far": far,
    }  # fmt: skip
    design, text = design_of(ScalingDesign, models, data, asked, options)
    executor = with_callbacks(executor, callbacks)
    with showing(progress) as notify, place_of_work(out) as place:
        found = _trained(design, text, Path(place), notify, executor, command)
    return found if out is not None else replace(found, folder=None)


def _kept(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given


def _of_table(
    data: Any, form: str, columns: Mapping[str, str] | None, where: Mapping[str, str] | None, without_worst: int,
    out: str | Path | None, command: str | None, training: Mapping[str, Any], *, predict: Sequence[tuple[float, float]],
    flops: Sequence[float], far: bool,
) -> ScalingLaw:  # fmt: skip
    if given := [name for name, value in training.items() if value is not None]:
        message = f"{_option(given[0])} is for training; name the models, such as gpt2 llama"
        raise RequestError(message, code="missing", field="models")
    files = [Path(data)] if isinstance(data, str | Path) else []
    if out is not None:
        check_output(out, force=None, sources=files)
    read = points(data, columns, where)
    if not 0 <= without_worst < len(read):
        raise RequestError(code="range", field="without_worst", value=without_worst, expected=f"0 to {len(read) - 1}")
    law = fit_scaling_law(read.without_worst(without_worst), form)
    found = ScalingLaw.of(law, form, predict, flops, far, command=command or "gf.scale")
    if out is not None:
        with output(out, force=None, sources=files):
            found.report(out)
    return found


def _option(name: str) -> str:
    """Returns the command-line option of a keyword argument."""
    return {"learning_rate": "--lr"}.get(name, f"--{name.replace('_', '-')}")


def amounts(given: str | float | Sequence[Any] | None) -> tuple[float, ...]:
    """Parses one or several budgets of compute. Raises RequestError."""
    listed = [] if given is None else given if isinstance(given, list | tuple) else [given]
    return tuple(quantity(one, field="flops") for one in listed)


def pairs(given: str | Sequence[Any] | None) -> tuple[tuple[float, float], ...]:
    """Parses one or several pairs (parameters, tokens); a pair may be text such as "7b,140b". Raises RequestError."""
    found = []
    for one in [given] if isinstance(given, str) else given or ():
        sizes = one.split(",") if isinstance(one, str) else list(one) if isinstance(one, list | tuple) else []
        if len(sizes) != 2:
            expected = "PARAMETERS,TOKENS such as 7b,140b"
            raise RequestError(code="type", field="predict", value=str(one), expected=expected)
        found.append((quantity(sizes[0], field="predict"), quantity(sizes[1], field="predict")))
    return tuple(found)


def _trained(
    asked: ScalingDesign,
    text: Tokens | None,
    out: Path,
    notify: Notify,
    executor: Executor | None,
    command: str | None,
) -> Scaling:
    folder, first, form, far = _folder(out), asked.first, asked.form, asked.far
    text = read_text(first, first.tokenizer, notify, folder) if text is None else text
    together = {name: config for design in asked.cells.values() for name, config in design.configs.items()}
    sized = {name: arm for design in asked.cells.values() for name, arm in design.named.items()}
    names = [arm.name for arm in asked.models]
    common = first.common.replace(tokens=1, flops=None)
    objective = common.objective.among(together)
    known = objective.with_tokens(text)
    vocabulary = known.tokenizer.vocab_size
    fitted = {n: fit(c, vocabulary, first.context, sized[n].own("vocab_size")) for n, c in together.items()}
    runs = [
        _planned(cell, model, name, fitted[name], plan, seed)
        for cell, design in asked.cells.items()
        for plans in [design.plans({name: fitted[name] for name in design.configs}, vocabulary, objective=objective)]
        for model, (name, plan) in zip(names, plans.items(), strict=True)
        for seed in range(design.seeds)
    ]
    _refuse(runs, form, [6 * n * d for n, d in asked.predict] + list(asked.flops), far)
    record = {"data": text.describe(), "recipe": to_plain(common.replace(objective=objective))}
    _check_record(folder, record)

    measured = rates(fitted, known, common.replace(objective=objective))
    done = _finished(folder)
    runs = [
        run if (run.cell, run.model, run.seed) in done
        else _timed(run, run_seconds(run.tokens, measured[at_size(run.model, run.size)], evaluated(common, known)))
        for run in runs
    ]  # fmt: skip
    plan = ScalingPlan(runs, SOURCE, [*text.notes, *_notes(asked.grid, fitted, len(text.train), runs)])
    if asked.hours is not None and plan.seconds > asked.hours * 3600:
        raise RequestError(
            f"the {plan.left} runs would take about {plan.seconds / 3600:.1f} hours "
            f"({SOURCE}), and hours={asked.hours:g} is given; leave out the largest sizes or budgets",
            code="range", field="hours", value=asked.hours, expected=f"at least {plan.seconds / 3600:.1f}",
        )  # fmt: skip
    notify(PlanEvent(plan=plan))
    command = command or command_of(asked, folder)
    begun = Scaling(
        command=command, **record, form=form, grid=asked.grid, notes=tuple(plan.notes),
        status=f"{len(done)} of {len(runs)} runs so far", folder=folder,
    )  # fmt: skip
    ended = 0
    try:
        with only_writer(folder), interruptible():
            asked.save(folder)
            if not (folder / RECORD).exists():  # laws of an earlier call stay until the new ones exist
                _write(begun, folder)
            for cell, design in asked.cells.items():
                carry_out(design, text, folder / CELLS / cell.name, notify=notify, command=command, executor=executor)
                ended += 1
            trained = [run for run in runs_of(folder) if run.model in names]
            fits, differences = laws(trained, form, asked.predict, asked.flops, far)
            found = replace(begun, status="complete", runs=tuple(trained), laws=fits, differences=differences)
            _write(found, folder)
            found.report(folder / REPORT)
    except (KeyboardInterrupt, Interrupted):
        raise Interrupted(
            f"stopped; {ended} of {len(asked.cells)} sizes and budgets are finished, in {folder}; the same command "
            "continues from here",
            code="stopped",
        ) from None  # fmt: skip
    return found


def _refuse_others(options: Mapping[str, Any]) -> None:
    if wrong := [name for name in OTHERS if options.get(name)]:
        raise RequestError(
            f"{wrong[0]}={options[wrong[0]]}: the runs of a scaling law differ in it, or are not judged; give sizes, "
            "budgets and seeds",
            code="conflict", field=wrong[0], value=options[wrong[0]],
        )  # fmt: skip


def _folder(out: str | Path) -> Path:
    folder = checked_folder(out)
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise RequestError(
                f"--out {folder}: {place} is a file; name a folder", field="out", value=str(out), code="exists"
            )
    refuse_foreign(folder, "results.json", REPORT, FILE, CELLS, ours=(folder / RECORD).exists())
    return folder


def _check_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Raises RequestError if the experiment in the folder was started on another text, or with another recipe."""
    try:
        held = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError):
        held = None
    if not isinstance(held, dict) or not isinstance(held.get("data"), dict):
        raise RequestError(f"--out {folder}: {RECORD} cannot be read; name another folder", code="damaged", field="out")
    check_schema("scaling", held.get("schema"), folder / RECORD)
    for what in ("fingerprint", "tokenizer_fingerprint"):
        if held["data"].get(what) != record["data"].get(what):
            told = shown(held["data"].get("name", "another text"))
            raise RequestError(
                f"--out {folder} was started on another text, {told}; name another folder", field="out", code="changed"
            )
    was = held.get("recipe") or {}
    if change := first_difference(was, record["recipe"], besides=("threads", "device", "compile", "watch")):
        path, before, now = (shown(word) for word in change)
        raise RequestError(
            f"--out {folder} was started with {path}={before}, and {path}={now} is asked for; name another folder",
            code="conflict", field=path, value=now, expected=before,
        )  # fmt: skip


def _planned(cell: Cell, model: str, name: str, config: ModelConfig, plan: Recipe, seed: int) -> Planned:
    tokens = (plan.num_steps(config) or 0) * plan.tokens_per_step
    params = config.num_params(embeddings=False)
    return Planned(
        model, cell.size, cell.name, params, tokens, 3.0 * config.flops(plan.context) * tokens, 6.0 * params * tokens,
        plan.peak_learning_rate(config), seed, 0.0,
    )  # fmt: skip


def _timed(run: Planned, seconds: float) -> Planned:
    return Planned(**{**asdict(run), "seconds": seconds})


def _refuse(runs: Sequence[Planned], form: str, asked: Sequence[float], far: bool) -> None:
    """Raises RequestError, before any run is trained, for a form or a prediction that the runs of a model cannot
    support."""
    for model in dict.fromkeys(run.model for run in runs):
        own = [run for run in runs if run.model == model]
        values = {what: np.array([getattr(run, of) for run in own], dtype=float)
                  for what, of in (("params", "params"), ("tokens", "tokens"), ("flops", "approximate"))}  # fmt: skip
        if missing := FORMS[form].lacks(**{what: different(values[what]) for what in FORMS[form].reads}):
            raise RequestError(f"{model}: {missing}", code="conflict", field="sizes", value=model)
        if asked and not far:
            refuse_far(max(asked), float(values["flops"].max()))


def _notes(chosen: Grid, fitted: Mapping[str, ModelConfig], tokens: int, runs: Sequence[Planned]) -> list[str]:
    """Returns remarks for the report, on properties of the runs that a reader of the laws should know."""
    found = ["N counts the parameters of the layers, without the embedding and the head."]
    if chosen.isoflop:
        found.append(
            "Tokens of a run are its budget over the exact training FLOPs of a token of its model, in whole steps; "
            "laws are written in 6 N D."
        )
    met = [name for name, c in fitted.items() if c.active_params(embeddings=False) < c.num_params(embeddings=False)]
    if met:
        found.append(f"{met[0]} has experts: N counts all of them, and a token meets some.")
    most = max(run.tokens for run in runs)
    if most > tokens:
        found.append(f"The longest run reads its {tokens:,} tokens of text {most / tokens:.1f} times.")
    return found


def _finished(folder: Path) -> set[tuple[str, str, int]]:
    """Returns (cell, model, seed) of the runs in the folder that are finished."""
    try:
        return {(run.cell, run.model, run.seed) for run in runs_of(folder) if run.status != "failed"}
    except RequestError:
        return set()


def _write(found: Scaling, folder: Path) -> None:
    replace_text(folder / RECORD, json.dumps(found.to_dict(), indent=1, allow_nan=False))
