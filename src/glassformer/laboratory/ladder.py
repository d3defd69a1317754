"""Ladders: the effect of each change between two models, one at a time in both directions, or by factorial design.

OUT/              a comparison of all arms, or a tuned one: it resumes and takes more seeds
OUT/ladder.json   the rungs with losses, differences and costs
OUT/ladder.html   the same as a page
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, Unpack

from glassformer.comparison.arms import DesignArm, check_seeds, given_budget, one_arm
from glassformer.comparison.design import FILE, LEAST_SEEDS, OWN, Design, design_of, from_tree, to_yaml
from glassformer.comparison.experiment import command_of
from glassformer.comparison.verbs import begun, place_of_work
from glassformer.errors import RequestError, WorkError
from glassformer.figures.terminal import Reported, Tabular, decimals, ruled, size, unbroken
from glassformer.files import refuse_foreign, replace_text
from glassformer.laboratory.pages.ladder import findings, render_ladder
from glassformer.laboratory.rungs import Kind, LadderRecord, Rung
from glassformer.laboratory.steps import Point, as_steps, between, check_steps
from glassformer.naming.resolve import ModelLike
from glassformer.options import LadderKeywords
from glassformer.parts.core.base import PartConfig
from glassformer.runs.effects import MOST, combined
from glassformer.runs.events import Notify, StageEvent
from glassformer.runs.executor import Executor, with_callbacks
from glassformer.runs.files import read_results
from glassformer.runs.live import shown
from glassformer.text import DataLike, Tokens
from glassformer.training import Callback, Interrupted
from glassformer.typed import typed
from glassformer.units import plural

VERB = "ablate"
RESULTS, PAGE = "ladder.json", "ladder.html"
LADDER_SEEDS = 3
"""Default number of seeds of a ladder."""
LEAST_STEPS = 10
"""Fewest optimizer steps of a run: before them every model is still near its initial weights."""


@dataclass(frozen=True, kw_only=True)
class Ladder(LadderRecord, Reported, Tabular):
    """The effect of each change between two models; `print` shows arms and findings.

    Attributes
    ----------
    folder : Path or None
        Folder of ladder.json, ladder.html and the comparison of all arms; None if nothing was written. The other
        attributes are those of `LadderRecord`.

    Examples
    --------
    >>> found = gf.ablate("gpt2@0.3m", "tiny.txt", to="gpt2@0.3m+rope", tokens="50k")  # doctest: +SKIP
    >>> found.arms[1].loss  # doctest: +SKIP
    """

    folder: Path | None = None

    def lines(self) -> Iterator[Any]:
        """Yields a table of the arms, what each change does, and the place of the page."""
        table = ruled(f"{self.base} to {self.target}")
        table.add_column("changes", overflow="fold", min_width=12)
        for heading in ("loss", "params", "tokens/s", "memory", "state/tok"):
            table.add_column(heading, justify="right", no_wrap=True)
        for arm in self.arms:
            held, speed = (
                "-" if value is None else f"{value:,.0f}" for value in (arm.parameters, arm.tokens_per_second)
            )
            table.add_row(
                arm.label, arm.trouble or decimals(arm.loss), held, speed, size(arm.peak_memory_bytes),
                size(arm.state_bytes_per_token),
            )  # fmt: skip
        yield table
        yield from findings(self)
        if self.folder is not None:
            yield unbroken(f"page: {self.folder / PAGE}")

    def html(self) -> str:
        return render_ladder(self)

    def records(self) -> list[dict[str, Any]]:
        """Returns a table row for each arm: loss, interval, costs."""
        return [arm.to_dict() for arm in self.arms]


@dataclass(frozen=True, kw_only=True)
class LadderDesign:
    """Design of a ladder (experiment on the changes between two models): its ends, its arms, and the comparison of the
    arms."""

    base: DesignArm
    to: DesignArm | None
    changes: tuple[str, ...] | None
    """Requested changes; None if they are to be found."""
    kind: Kind
    steps: tuple[str, ...]
    target: DesignArm
    rungs: tuple[Rung, ...]
    comparison: Design

    @classmethod
    def of(
        cls,
        base: ModelLike | Mapping[str, ModelLike],
        data: str | Path | None = None,
        *,
        to: ModelLike | Mapping[str, ModelLike] | None = None,
        changes: str | Sequence[str] | None = None,
        design: Kind = "ladder",
        seeds: int | None = None,
        **options: Any,
    ) -> Self:
        """Makes a ladder's design from the arguments of `ablate`. Raises RequestError for invalid ones."""
        seeds = LADDER_SEEDS if seeds is None else check_seeds(seeds)
        start, goal = one_arm(base, "model"), None if to is None else one_arm(to, "target")
        asked = None if changes is None else as_steps(changes)
        steps, target = _steps(start, goal, asked)
        arms, rungs = _rungs(start, steps, design)
        return cls(
            base=start, to=goal, changes=None if asked is None else tuple(asked), kind=design, steps=tuple(steps),
            target=target, rungs=tuple(rungs), comparison=Design.of(arms, data, seeds=seeds, **options),
        )  # fmt: skip

    def __post_init__(self) -> None:
        """Raises RequestError for a comparison that cannot isolate a change."""
        if (seeds := self.comparison.seeds) < LEAST_SEEDS:
            message = f"seeds={seeds} gives no interval; a ladder needs --seeds {LEAST_SEEDS} or more, by default 3"
            raise RequestError(message, code="range", field="seeds", value=seeds, expected=f"at least {LEAST_SEEDS}")
        _refuse_small(self.comparison)

    @property
    def data(self) -> str | None:
        """Name of the training text, as in a `Design`."""
        return self.comparison.data

    @property
    def tokenizer(self) -> str:
        """Tokenizer of the training text, as in a `Design`."""
        return self.comparison.tokenizer

    @property
    def parts(self) -> tuple[type[PartConfig], ...]:
        """Classes of the parts of the ladder's models and recipes."""
        return self.comparison.parts

    def replace(self, **changes: Any) -> Self:
        """Returns a copy of the design with other values for some arguments of the constructor `LadderDesign.of`.
        Raises RequestError for invalid ones."""
        ends = {"base": self.base, "to": self.to, "changes": self.changes, "design": self.kind}
        if new := {name: changes.pop(name) for name in ends if name in changes}:
            comparison = self.comparison.replace(**changes)
            options = {name: getattr(comparison, name) for name in OWN} | dict(comparison.recipe)
            return self.of(**{**ends, **new, **options, "data": comparison.data})
        return replace(self, comparison=self.comparison.replace(**changes))

    def to_dict(self) -> dict[str, Any]:
        """Returns the design as plain values: the content of design.yaml."""
        asked = {
            "to": None if self.to is None else self.to.entry,
            "changes": None if self.changes is None else list(self.changes),
            "design": None if self.kind == "ladder" else self.kind,
        }  # fmt: skip
        rest = self.comparison.to_dict()
        del rest["models"]
        ends = {"base": self.base.entry} | {name: value for name, value in asked.items() if value is not None}
        return rest | {"verb": VERB, "seeds": self.comparison.seeds} | ends

    def save(self, folder: str | Path) -> None:
        """Writes the design to design.yaml in the folder."""
        replace_text(Path(folder) / FILE, to_yaml(self.to_dict()))

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any], where: str = "") -> Self:
        """Makes a ladder's design from the content of a design.yaml. Raises RequestError for invalid content."""
        return from_tree(tree, VERB, where, cls.of)


@typed
def ablate(
    base: ModelLike | Mapping[str, ModelLike] | LadderDesign,
    data: DataLike | None = None,
    *,
    to: ModelLike | Mapping[str, ModelLike] | None = None,
    changes: str | Sequence[str] | None = None,
    design: Kind | None = None,
    seeds: int | None = None,
    out: str | Path | None = None,
    executor: Executor | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | Notify = True,
    command: str | None = None,
    **options: Unpack[LadderKeywords],
) -> Ladder:
    """Trains the models between `base` and `to`, and finds the effect of each change on the loss and its costs.

    Parameters
    ----------
    base
        The first model: an expression, a path, a config or a model, or a mapping from a name to one of these; or a
        `LadderDesign`, whose fields the others then change. A model takes part as its config, and without a name it is
        called "model".
    data
        As in `compare`.
    to
        The model at the other end, given as `base` is. The changes that lead to it are found, unless `changes`
        names them.
    changes
        Changes in their order, as "rope,rmsnorm,swiglu" or as a list. Without `to`, they make the target.
    design
        "ladder", the default: the changes added one after the other from the base, and each left out of the target;
        every rung is judged against the base and against the rung before. "factorial": arms with every combination
        of up to four changes, or half of those of five, for effects and for interactions of two.
    seeds
        Runs of each model, by default 3.
    out
        Folder of ladder.json, ladder.html and a comparison of all arms. If None, nothing is kept.
    executor, callbacks, progress, command
        As in `compare`.
    **options
        Other options of `compare` and fields of the recipe.

    Returns
    -------
    Ladder
        The effects of the changes, with simultaneous intervals of all differences.

    Raises
    ------
    RequestError
        Before anything is trained: if the ends are the same model, a change does nothing at its place, no known change
        leads between the models, or the budget is less than `LEAST_STEPS` steps.
    WorkError
        If a run failed, after the page is written.

    Examples
    --------
    >>> found = gf.ablate("gpt2@0.3m", "python-docs", to="gpt2@0.3m+rope", tokens="50k")  # doctest: +SKIP
    >>> found.pairs["base"][0].verdict.verdict  # doctest: +SKIP
    """
    asked = {"to": to, "changes": changes, "design": design, "seeds": seeds}
    ladder, text = design_of(LadderDesign, base, data, asked, options)
    executor = with_callbacks(executor, callbacks)
    with shown(progress) as notify, place_of_work(out) as place:
        found = _trained(ladder, text, Path(place), notify, executor, command)
    return found if out is not None else replace(found, folder=None)


def _trained(
    ladder: LadderDesign, text: Tokens | None, out: Path, notify: Notify, executor: Executor | None,
    command: str | None,
) -> Ladder:  # fmt: skip
    rungs, steps, design = ladder.rungs, ladder.steps, ladder.comparison
    refuse_foreign(out, RESULTS, PAGE, ours=read_results(out) is not None)
    for words in (f"{plural(len(steps), 'change')}: {', '.join(steps)}", _announced(len(rungs), design)):
        notify(StageEvent(words=words))
    said = command or command_of(ladder, out)
    ends = {"base": ladder.base.name, "target": ladder.target.name, "command": said}
    try:
        made = begun(design, text, out, executor=executor, progress=notify, command=said, origin=ladder)
    except WorkError as error:  # with --tune, which then gives no results
        held = read_results(out)
        if isinstance(error, Interrupted) or held is None or held.tuning is None:
            raise
        _write(Ladder.of(held, rungs, steps, ladder.kind, ends), out)
        raise WorkError(f"{error}; what there is of the ladder is in {out / PAGE}", code=error.code) from None
    found = Ladder.of(made.results, rungs, steps, ladder.kind, ends, folder=out)
    _write(found, out)
    made.check()
    return found


def _write(found: Ladder, folder: Path) -> None:
    replace_text(folder / RESULTS, json.dumps(found.to_dict(), indent=1, allow_nan=False))
    found.report(folder / PAGE)


def _steps(base: DesignArm, to: DesignArm | None, asked: list[str] | None) -> tuple[list[str], DesignArm]:
    """Returns (changes from the base, target model) of a ladder. Raises RequestError if they cannot be found or do not
    fit."""
    if to is not None:
        return between(base, to, asked), to
    if asked is None:
        message = "a ladder needs its other end: give --to MODEL, or --changes rope,rmsnorm,..."
        raise RequestError(message, code="missing", field="to", expected="a model such as llama@1m")
    check_steps(base, asked)
    return asked, base.changed(asked)


def _rungs(base: DesignArm, steps: Sequence[str], kind: Kind) -> tuple[list[DesignArm], list[Rung]]:
    """Returns the arms of a ladder's design, the base first, and their rungs (the changes that each arm has). Raises
    RequestError for too few or too many steps, and for two arms that are the same model."""
    many = len(steps)
    if kind == "factorial":
        if not 2 <= many <= MOST:
            raise RequestError(
                f"a factorial design takes 2 to {MOST} changes, and here are {many}: {', '.join(steps)}; "
                "use --design ladder, or other --changes",
                code="range", field="design", value=kind, expected=f"2 to {MOST} changes",
            )  # fmt: skip
        rows = combined(many)
    else:
        added = [tuple(at < count for at in range(many)) for count in range(many + 1)]
        left_out = [tuple(at != gone for at in range(many)) for gone in range(many)]
        rows = list(dict.fromkeys([*added, *left_out]))
    arms = [base.changed([s for s, has in zip(steps, row, strict=True) if has]) for row in rows]
    rungs = [Rung(arm.name, row) for arm, row in zip(arms, rows, strict=True)]
    points: dict[Point, Rung] = {}
    for arm, rung in zip(arms, rungs, strict=True):
        twin = points.setdefault(Point.of(arm), rung)
        if twin is not rung:
            raise RequestError(
                f"{twin.name} and {rung.name} are the same model, so a change does nothing there; use other --changes",
                code="conflict", field="changes", value=rung.label(steps), expected="changes that each do something",
            )  # fmt: skip
    return arms, rungs


def _refuse_small(design: Design) -> None:
    """Raises RequestError for a training budget of fewer than `LEAST_STEPS` steps."""
    name = design.arms[0].name
    plan = design.plans(design.configs, vocab_size=1)[name]
    count = plan.num_steps(design.configs[name])
    if count is not None and count < LEAST_STEPS:
        field = "steps" if design.steps is not None else given_budget(design.amounts)
        raise RequestError(
            f"{field}={getattr(design, field)} gives runs of {count} steps, which say nothing of a change: give "
            f"{LEAST_STEPS} steps or more, {LEAST_STEPS * plan.tokens_per_step:,} tokens",
            code="range", field=field, value=getattr(design, field), expected=f"at least {LEAST_STEPS} steps",
        )  # fmt: skip


def _announced(many: int, design: Design) -> str:
    told = f"{plural(many, 'arm')} x {plural(design.seeds, 'seed')}: {plural(many * design.seeds, 'run')}"
    if design.minutes is not None:
        told += f", {many * design.seeds * design.minutes:.3g} minutes of training"
    return told + (", and those that choose the learning rates" if design.tune else "")
