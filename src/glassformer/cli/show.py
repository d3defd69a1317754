"""What the terminal shows: progress while work goes on, tables when it is done."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from glassformer.comparison import Design, compare
from glassformer.comparison.single import SingleRun
from glassformer.errors import WorkError
from glassformer.figures.terminal import Printed, output, ruled, short, size
from glassformer.parallel.launch import one_voice
from glassformer.report.tuning import finding
from glassformer.runs.executor import Executor
from glassformer.runs.live import ComparisonView, clock, decimals
from glassformer.runs.results import Answers, Power, Results, Tuning
from glassformer.runs.wording import percent, verdict_sentence
from glassformer.training import Run


def show(value: Printed, as_json: bool) -> None:
    """Prints a value of the library on standard output: as its text, or as JSON. Raises WorkError if it failed."""
    if as_json:
        print(json.dumps(value.to_dict()))
    else:
        output().print(value, crop=False)
    value.check()


def call_and_show(verb: Callable[..., Printed], *inputs: Any, as_json: bool, **options: Any) -> None:
    """Calls a verb of the library with its progress on standard error, and prints its value. Options
    without a value keep the defaults of the verb. Raises WorkError if the work failed."""
    given = {name: value for name, value in options.items() if value is not None}
    with ComparisonView(quiet=as_json) as view:
        value = verb(*inputs, progress=view.event, **given)
    show(value, as_json)


def compare_and_show(
    design: Design, out: str, command: str | None = None, executor: Executor | None = None, as_json: bool = False
) -> None:
    """Carries a design out in a folder, and says what it shows. Raises WorkError if a run failed."""
    with ComparisonView(quiet=as_json) as view:
        found = compare(design, out=out, progress=view.event, command=command, executor=executor)
    results, page = found.results, Path(found.folder or out) / "report.html"
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        show_comparison(results, page, view.noted)
    if failed := [one for one in found.runs if one.status == "failed"]:
        first = failed[0]
        name = first.name if results.budget.seeds == 1 else f"{first.name} seed {first.seed}"
        raise WorkError(
            f"{len(failed)} of {len(found.runs)} runs failed: {name}: {first.error}; the report is at {page}",
            code="failed",
        )  # fmt: skip


def show_comparison(results: Results, page: Path, noted: Sequence[str] = ()) -> None:
    """Prints tables, verdicts, and the notes that were not printed before."""
    console = output()
    for table in comparison_tables(results):
        console.print(table)
    for verdict in results.verdicts:
        console.print(verdict_sentence(verdict), markup=False, highlight=False)
    for line in power_lines(results.power) if results.power is not None else []:
        console.print(line, markup=False, highlight=False)
    for note in results.budget.notes:
        if note not in noted:
            console.print(f"note: {note}", markup=False, highlight=False)
    if results.tuning is not None:
        console.print(rates_table(results.tuning))
        console.print(finding(results.tuning), markup=False, highlight=False)
    if results.budget.seeds == 1:
        console.print("One seed proves nothing: the order of the arms may be luck. --seeds 3 gives intervals.")
    print(f"report: {page}")


def power_lines(power: Power) -> list[str]:
    """What showing a difference takes: a line for each pair, and one for the whole comparison."""

    def words(seeds: int | None) -> str:
        return "more than can be run" if seeds is None else str(seeds)

    size = f"{percent(power.effect)} of the loss ({power.difference:.4f} nats per token)"
    lines = [
        f"{one.b} against {one.a}: the paired difference has sd {one.sd:.4f} ({power.confidence:.0%} interval "
        f"{one.sd_low:.4f} to {one.sd_high:.4f}, from {power.pilot} seeds); {words(one.seeds)} seeds show {size} with "
        f"{power.power:.0%} power, {words(one.seeds_low)} to {words(one.seeds_high)} over that interval"
        for one in power.pairs
    ]
    if power.seeds is None or power.hours is None:
        return [*lines, f"no comparison here shows {size}"]
    return [*lines, f"--seeds {power.seeds} shows {size}: {power.hours:.3g} hours of training for all arms"]


def comparison_tables(results: Results) -> list[Table]:
    """Summary and extrapolation, best loss first; two, so that each fits a narrow terminal."""
    several = (results.budget.seeds or 1) > 1
    summary = ruled(f"{results.data.name}, held-out text")
    reach = ruled("loss at multiples of the training context")
    longest = max((run.extrapolation for run in results.runs), key=len, default=[])
    for table, headings in (
        (summary, ("params", "loss", "bits/byte", "tokens/s", "memory", "ms/tok", "state/tok")),
        (reach, tuple(f"{row.context:,}" for row in longest)),
    ):
        table.add_column("model", overflow="fold", min_width=12)
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
    for run in sorted(results.runs, key=lambda run: run.validation.loss if run.validation else math.inf):
        name = f"{run.name} seed {run.seed}" if several else run.name
        found, train, made = run.validation, run.train, run.generation
        if run.status != "ok" or found is None or train is None:
            summary.add_row(name, short(run.parameters or 0), run.status)
            continue
        summary.add_row(
            name, short(run.parameters or 0), f"{found.loss:.4f}", decimals(found.bits_per_byte),
            f"{train.tokens_per_second:,.0f}", size(train.peak_memory_bytes),
            *((f"{1000 * made.seconds_per_token:.2f}", size(made.state_bytes_per_token)) if made else ("no", "no")),
        )  # fmt: skip
        reach.add_row(name, *("cannot" if row.loss is None else f"{row.loss:.4f}" for row in run.extrapolation))
    return [summary, reach] if reach.row_count else [summary]


def rates_table(tuning: Tuning) -> Table:
    """What every arm was tried at, and what was chosen."""
    table = ruled("learning rates")
    table.add_column("model", overflow="fold", min_width=12)
    for heading in ("rates", "usual", "chosen", "loss at usual", "at chosen", "sensitivity"):
        table.add_column(heading, justify="right", no_wrap=True)
    for arm in tuning.arms:
        rates = sorted({trial.rate for trial in arm.trials})
        table.add_row(
            arm.name, f"{rates[0]:.3g} to {rates[-1]:.3g}", f"{arm.usual:.3g}", f"{arm.chosen:.3g}",
            decimals(arm.loss_usual), decimals(arm.loss_chosen), decimals(arm.sensitivity),
        )  # fmt: skip
    return table


def train_and_show(asked: SingleRun, as_json: bool = False) -> None:
    """Trains one model, and says what came of it. Raises WorkError if it diverged."""
    leads = one_voice()
    with ComparisonView(quiet=as_json or not leads) as view:
        run, found = asked.train(view.event)
    if not leads:
        return
    show_run(run, as_json, found)
    if run.status != "ok":
        raise WorkError(f"the run diverged: {run.error}", code="diverged")


def show_run(run: Run, as_json: bool, found: Answers | None = None) -> None:
    summary = {**run.to_dict(), **({} if found is None else {"answers": found.model_dump()})}
    if as_json:
        print(json.dumps(summary))
    elif run.status == "ok" and run.validation:
        nats = f", perplexity {run.validation['perplexity']:.2f}" if run.recipe.objective.in_nats else ""
        bits = run.validation["bits_per_byte"]
        print(
            f"{run.tokens:,} tokens{sides(run.read)} in {clock(run.seconds)}, "
            f"{run.tokens_per_second:,.0f} tokens/s; held-out loss {run.validation['loss']:.4f}{nats}"
            + ("" if bits is None else f", {decimals(bits)} bits per byte")
        )
        if found is not None:
            print(answers_in_words(found))
        print(f"run: {run.folder}")


def sides(read: dict[str, int]) -> str:
    """Of the tokens that a run read, those of sources and targets, where it reads pairs."""
    parts = [f"{read[side]:,} of {side}" for side in ("sources", "targets") if side in read]
    return f" ({', '.join(parts)})" if parts else ""


def answers_in_words(found: Answers) -> str:
    words = [f"{found.pairs:,} held-out sources answered greedily: {found.exact:.1%} exactly"]
    if found.placeholders is not None:
        words.append(f"placeholders kept in {found.placeholders:.1%} of those that have any")
    if found.bleu is not None and found.chrf is not None:
        words.append(f"BLEU {found.bleu:.1f}, chrF {found.chrf:.1f}")
    return ", ".join(words)
