"""`gf.compare` and `gf.tune`: from models or a design to a `Comparison`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from glassformer.comparison.arms import Match
from glassformer.comparison.design import Design, design_of
from glassformer.comparison.experiment import carry_out
from glassformer.comparison.result import Comparison
from glassformer.comparison.tuning import tuned
from glassformer.naming.resolve import ModelLike
from glassformer.options import DesignKeywords, TuneKeywords
from glassformer.runs.events import Notify
from glassformer.runs.executor import Executor, with_callbacks
from glassformer.runs.live import shown
from glassformer.text import DataLike, Tokens
from glassformer.training import Callback, Recipe
from glassformer.typed import typed


@typed
def compare(
    models: Design | Sequence[ModelLike] | Mapping[str, ModelLike],
    data: DataLike | None = None,
    *,
    tokens: int | str | None = None,
    minutes: float | None = None,
    flops: float | str | None = None,
    steps: int | str | None = None,
    match: Match | None = None,
    seeds: int | None = None,
    looks: str | Sequence[int] | None = None,
    power: float | str | None = None,
    tune: bool | None = None,
    within: float | None = None,
    recipe: Recipe | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    executor: Executor | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | Notify = True,
    command: str | None = None,
    **options: Unpack[DesignKeywords],
) -> Comparison:
    """Trains several models on one text under one budget, and judges their held-out losses.

    All models of a seed read the same text in the same order. If `out` holds an earlier comparison of the same kind,
    its finished runs are kept and the others are trained, failed ones included; models and seeds may be added.

    Parameters
    ----------
    models
        Expressions, paths, configs or models; a mapping from names to them; or a whole `Design`, whose fields the other
        arguments then change. An expression may change the recipe of its arm: `gpt2@1m+recipe.warmup=0.1`.
    data
        Data as for `train`: a file, a folder, the name of a corpus, token ids, or prepared tokens.
    tokens, minutes, flops, steps
        Budget of each run; exactly one is given. Counts may be text such as "200k". `steps` means the tokens of that
        many steps of the common batch size and context.
    match
        Quantity that is equal between arms. With "flops" and a budget in tokens, every arm gets the FLOPs of the first.
    seeds
        Runs of each model; by default 1, or 3 with `tune`.
    looks
        Numbers of seeds at which verdicts will be read, as a list or as "3,5"; the error rate of 5 % holds for all of
        them together.
    power
        Difference to detect, as a fraction of the first arm's loss: 0.01 or "1%". A pilot of at least three seeds in
        `out`/pilot then estimates the seeds and hours it takes, and gives no verdict.
    tune
        Choose a learning rate for each arm first, on seeds that are not used for the verdict.
    within
        Limit of a tuned comparison in minutes. A longer one is refused after a few timed steps.
    recipe
        Fields of the recipe of all arms, as a mapping or a `Recipe`; keywords have precedence.
    out
        Folder of results.json, report.html and design.yaml. If None, nothing is kept.
    executor
        Object that trains the runs; by default `runs.executor.Local`, one after the other.
    callbacks
        `Callback` objects, called at every step of every run that is trained. Runs then take this process, and no
        `executor` may be given.
    progress
        True shows progress on standard error (bars on a terminal and in a notebook, lines elsewhere), False shows
        nothing, and a function receives the events of `glassformer.runs.events`.
    command
        Command in the report that repeats the comparison; by default one that reads design.yaml.
    **options
        Other fields of `Design` (tokenizer, allow_unmatched, pretrained, loss_alone, log_to) and of the recipe.

    Returns
    -------
    Comparison
        The verdicts and the runs. A run has status "ok", "diverged" or "failed"; a failed run does not raise, unless
        rates are tuned.

    Raises
    ------
    RequestError
        Before anything is trained, if the request is wrong, the comparison is unfair, or `out` holds something else.
    WorkError
        With `tune`, if a run failed, or an arm does best at the edge of the widest grid of rates.
    Interrupted
        On Ctrl-C; the same call continues.

    Examples
    --------
    >>> plan = {"tokens": "4k", "context": 32, "batch_size": 4}
    >>> found = gf.compare(["gpt2@0.3m", "llama@0.3m"], "tiny.txt", seeds=3, **plan)
    >>> found.verdicts[0].seeds
    3
    """
    asked = {
        "tokens": tokens, "minutes": minutes, "flops": flops, "steps": steps, "match": match, "seeds": seeds,
        "looks": looks, "power": power, "tune": tune, "within": within, "recipe": recipe,
    }  # fmt: skip
    design, text = design_of(Design, models, data, asked, options)
    executor = with_callbacks(executor, callbacks)
    return begun(design, text, out, executor=executor, progress=progress, command=command)


@typed
def tune(
    models: Design | Sequence[ModelLike] | Mapping[str, ModelLike],
    data: DataLike | None = None,
    **options: Unpack[TuneKeywords],
) -> Comparison:
    """Compares models, each at its own learning rate: `compare(models, data, tune=True, **options)`.

    Parameters
    ----------
    models, data, **options
        As in `compare`.

    Returns
    -------
    Comparison
        Results, whose `tuning` holds trials, rates, cost, and the verdicts at the chosen and at the default rates.

    Raises
    ------
    RequestError, WorkError, Interrupted
        As in `compare`.

    Examples
    --------
    >>> found = gf.tune(["gpt2@0.3m", "llama@0.3m"], "python-docs", tokens="50k")  # doctest: +SKIP
    >>> found.tuning.arms[0].chosen  # doctest: +SKIP
    """
    return compare(models, data, tune=True, **options)


def begun(
    design: Design,
    text: Tokens | None,
    out: str | Path | None,
    *,
    executor: Executor | None = None,
    progress: bool | Notify = True,
    command: str | None = None,
    origin: Any = None,
) -> Comparison:
    """Carries out a comparison, tuned or not as its design says, in the folder `out`, or without one in a temporary
    folder, and returns the `Comparison`."""
    work: Callable[..., Comparison] = tuned if design.tune else carry_out
    with shown(progress) as notify, place_of_work(out) as place:
        found = work(design, text, place, notify=notify, executor=executor, command=command, origin=origin)
    return found if out is not None else replace(found, folder=None)


@contextmanager
def place_of_work(out: str | Path | None) -> Iterator[str | Path]:
    """Yields the folder `out`; without one, a folder for the comparison in a temporary folder, which is deleted at the
    end."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="glassformer-") as folder:
        yield Path(folder) / "comparison"
