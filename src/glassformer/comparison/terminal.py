"""Text form of a comparison: tables of runs and rates, verdicts, and the number of seeds needed to show a
difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from rich.console import RenderableType

from glassformer.figures.terminal import TextTable, decimals, ruled, short, size
from glassformer.report.tuning import finding
from glassformer.runs.arms import held_out_tokens
from glassformer.runs.results import Power, Results, RunResult, Tuning
from glassformer.runs.wording import failures, percent, verdict_sentence, without_length

BITS = "bits/byte"
HEADS = ("params", "loss", BITS, "tokens/s", "memory", "ms/tok", "state/tok")


def comparison_lines(results: Results) -> Iterator[str | RenderableType]:
    """Yields the parts of a comparison's output, from the table of its runs to its notes."""
    several = (results.budget.seeds or 1) > 1
    runs = sorted(results.paced, key=lambda run: run.validation.loss if run.validation else math.inf)
    named = [(f"{run.name} seed {run.seed}" if several else run.name, run) for run in runs]
    yield summary_table(results.data.name, named)
    if any(run.extrapolation for run in runs):
        yield reach_table(named)
        yield from unreached(runs)
    yield from map(verdict_sentence, results.verdicts)
    yield from failures(results)
    if results.power is not None:
        yield from power_lines(results.power)
    yield from (f"note: {note}" for note in results.budget.notes)
    if results.tuning is not None:
        yield rates_table(results.tuning)
        yield finding(results.tuning)
    if results.budget.seeds == 1:
        yield "One seed proves nothing: the order of the arms may be luck. --seeds 3 gives intervals."


def summary_table(data: str | None, named: list[tuple[str, RunResult]]) -> TextTable:
    """Returns the table with one row for each (name, run) in `named`: size, held-out loss, and costs, or the status of
    a run that failed or diverged."""
    of_text = any(run.validation is not None and run.validation.bits_per_byte is not None for _, run in named)
    tokens, _ = held_out_tokens([run for _, run in named])
    title = f"{data}, {f'{tokens} held-out tokens' if tokens else 'held-out text'}"
    table = _of_models(title, [head for head in HEADS if of_text or head != BITS])
    for name, run in named:
        params, found, train, made = short(run.parameters or 0), run.validation, run.train, run.generation
        if run.status != "ok" or found is None or train is None:
            table.add_row(name, params, run.status)
            continue
        bits = [decimals(found.bits_per_byte)] if of_text else []
        writing = (f"{1000 * made.seconds_per_token:.2f}", size(made.state_bytes_per_token)) if made else ("no", "no")
        table.add_row(
            name, params, f"{found.loss:.4f}", *bits, f"{train.tokens_per_second:,.0f}",
            size(train.peak_memory_bytes), *writing,
        )  # fmt: skip
    return table


def reach_table(named: list[tuple[str, RunResult]]) -> TextTable:
    """Returns the table of losses at multiples of the training context, separate from the summary so that both fit a
    terminal."""
    longest = max((run.extrapolation for _, run in named), key=len)
    table = _of_models("loss at multiples of the training context", [f"{row.context:,}" for row in longest])
    for name, run in named:
        if run.status == "ok":
            losses = (row.loss for row in run.extrapolation)
            table.add_row(name, *("not supported" if loss is None else f"{loss:.4f}" for loss in losses))
    return table


def unreached(runs: Iterable[RunResult]) -> Iterator[str]:
    """Yields sentences on the reasons why models have no loss at multiples of their training context, each reason
    once."""
    told: dict[str, dict[str, None]] = {}
    for run in runs:
        for row in run.extrapolation:
            if row.loss is None and row.reason:
                told.setdefault(without_length(row.reason), {})[run.name] = None
    for reason, names in told.items():
        yield f"{', '.join(names)}: {reason}"


def rates_table(tuning: Tuning) -> TextTable:
    """Returns the table of the tuning: for each arm, the range of learning rates tried, the default and the chosen
    rate, the loss at both, and the sensitivity."""
    heads = ("rates", "usual", "chosen", "loss at usual", "at chosen", "sensitivity")
    table = _of_models("learning rates", heads)
    for arm in tuning.arms:
        rates = sorted({trial.rate for trial in arm.trials})
        table.add_row(
            arm.name, f"{rates[0]:.3g} to {rates[-1]:.3g}", f"{arm.usual:.3g}", f"{arm.chosen:.3g}",
            decimals(arm.loss_usual), decimals(arm.loss_chosen), decimals(arm.sensitivity),
        )  # fmt: skip
    return table


def _of_models(title: str, heads: tuple[str, ...] | list[str]) -> TextTable:
    table = ruled(title)
    table.add_column("model", overflow="fold", min_width=12)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def power_lines(power: Power) -> Iterator[str]:
    """Yields lines with the number of seeds needed to show a difference: for each pair of arms, and for all pairs."""

    def words(seeds: int | None) -> str:
        return "more than can be run" if seeds is None else str(seeds)

    effect = f"{percent(power.effect)} of the loss ({power.difference:.4f} nats per token)"
    for one in power.pairs:
        yield (
            f"{one.b} against {one.a}: the paired difference has sd {one.sd:.4f} ({power.confidence:.0%} interval "
            f"{one.sd_low:.4f} to {one.sd_high:.4f}, from {power.pilot} seeds); {words(one.seeds)} seeds show {effect} "
            f"with {power.power:.0%} power, {words(one.seeds_low)} to {words(one.seeds_high)} over that interval"
        )
    if power.seeds is None or power.hours is None:
        yield f"no comparison here shows {effect}"
    else:
        yield f"--seeds {power.seeds} shows {effect}: {power.hours:.3g} hours of training for all arms"
