"""Laws, ladders, claims, advice and checks of widths in the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from glassformer.cli.recipes import Asked, ExperimentStep
from glassformer.cli.show import compare_and_show, train_and_show
from glassformer.comparison import Design
from glassformer.comparison.single import SingleRun
from glassformer.errors import RequestError
from glassformer.figures.terminal import output, ruled, short, size
from glassformer.laboratory.advice import Goal, advise
from glassformer.laboratory.claims import claims, overview
from glassformer.laboratory.claims.stored import MEASURED
from glassformer.laboratory.ladder import PAGE, LadderDesign, ablate
from glassformer.laboratory.law import fit_scaling_law
from glassformer.laboratory.points import points
from glassformer.laboratory.scaling import REPORT, ScalingDesign, ScalingPlan, refuse_failed, scale
from glassformer.laboratory.summary import summary
from glassformer.report.claims import asked_words, figure_words, verdict_of, write_claims
from glassformer.report.claims import finding as claim_finding
from glassformer.report.ladder import findings
from glassformer.report.scaling import finding as law_finding
from glassformer.report.scaling import interval_words, several_finding, write_scaling
from glassformer.runs import events
from glassformer.runs.executor import Executor
from glassformer.runs.live import ComparisonView, clock, decimals
from glassformer.units import quantity


def show_advice(goal: Goal, context: int, memory: float, claims: str | None, model: str, as_json: bool) -> None:
    """Options, their costs, the evidence for them, and what is not known."""
    found = advise(goal, context, memory, claims, model)
    if as_json:
        print(json.dumps(found, allow_nan=False))
        return
    console = output()
    console.print(f"{model}, {context:,} tokens, {size(memory)} of memory: {goal}", style="bold", highlight=False)
    console.print(f"evidence: {found['claims']}", style="dim", highlight=False, soft_wrap=True)
    for question in found["questions"]:
        console.print(f"\n{question['asks']}", style="bold", highlight=False)
        console.print(_options(question))
        for one in question["evidence"]:
            of = f"{one['sure']}; {one['measured']}, {one['processor']}"
            console.print(f"  {one['claim']}: {one['statement']} {one['words']} ({of})", highlight=False)
        for words in question["undecided"]:
            console.print(f"  not known: {words}", style="dim", highlight=False)


def _options(question: dict[str, Any]) -> Table:
    table = ruled()
    for heading in ("option", "change", "weights, bf16", "state", "fits with weights in", "what speaks for it"):
        table.add_column(heading)
    for one in question["options"]:
        speaks = ", ".join(one["for"]) or "nothing that is measured"
        table.add_row(one["name"], one["change"], size(one["weight_bytes"]["bfloat16"]), size(one["state_bytes"]),
                      ", ".join(one["fits"]) or "none", speaks)  # fmt: skip
    return table


def show_ladder(
    ladder: LadderDesign, out: str, command: str | None = None, executor: Executor | None = None, as_json: bool = False
) -> None:
    """Trains the arms of a ladder, and says what each change does."""
    with ComparisonView(quiet=as_json) as view:
        found = ablate(ladder, out=out, progress=view.event, command=command, executor=executor)
    if as_json:
        print(json.dumps(found, allow_nan=False))
        return
    console = output()
    console.print(arms_table(found))
    for line in findings(found):
        console.print(line, markup=False, highlight=False)
    print(f"page: {Path(out) / PAGE}")


def arms_table(found: dict[str, Any]) -> Table:
    """Every arm with loss and costs."""
    table = ruled(f"{found['base']} to {found['target']}")
    table.add_column("changes", overflow="fold", min_width=12)
    for heading in ("loss", "params", "tokens/s", "memory", "state/tok"):
        table.add_column(heading, justify="right", no_wrap=True)
    for arm in found["arms"]:
        speed, held = arm["train.tokens_per_second"], arm["parameters"]
        table.add_row(
            arm["label"], arm["trouble"] or decimals(arm["loss"]), "-" if held is None else f"{held:,.0f}",
            "-" if speed is None else f"{speed:,.0f}", size(arm["train.peak_memory_bytes"]),
            size(arm["generation.state_bytes_per_token"]),
        )  # fmt: skip
    return table


def show_step(step: ExperimentStep, asked: Asked, executor: Executor | None = None) -> None:
    """Carries out one step of an experiment."""
    match asked:
        case SingleRun():
            train_and_show(asked)
        case Design():
            compare_and_show(asked, step.out, executor=executor)
        case LadderDesign():
            show_ladder(asked, step.out, executor=executor)
        case ScalingDesign():
            train_laws(asked, step.out, executor=executor)


CLAIMS_FOLDER, CLAIMS_PAGE = "claims", "index.html"


def show_claims(
    names: Sequence[str],
    every: bool,
    quick: bool,
    out: str | None,
    data: str | None,
    seeds: int | None,
    again: bool,
    command: str,
    as_json: bool,
) -> None:
    """Lists the claims, or measures those that are named."""
    if names and (every or quick):
        raise RequestError("give names, or --all, or --quick", code="conflict", field="claims", value=list(names))
    folder = Path(CLAIMS_FOLDER if out is None else out)
    if not (names or every or quick):
        rows = overview(folder, MEASURED if out is None else None)
        if as_json:
            print(json.dumps(rows, allow_nan=False))
            return
        output().print(listing(rows))
        output().print(claim_finding(rows), highlight=False)
        if out is None:
            said = f"Verdicts that are not in {folder} were measured for this release; the last column has their dates."
            output().print(said, style="dim", highlight=False)
        return

    with ComparisonView(quiet=as_json) as view:
        found = claims(names, folder, quick=quick, data=data, seeds=seeds, again=again, progress=view.event)
    rows = overview(folder)
    write_claims(rows, command, folder / CLAIMS_PAGE)
    if as_json:
        print(json.dumps([row for row in rows if row["name"] in found], allow_nan=False))
        return
    console = output()
    for row in rows:
        if row["name"] in found:
            console.print(row["statement"], style="bold", highlight=False)
            console.print(f"{row['result']['words']}; {row['result']['outcome']['sure']}", highlight=False)
            console.print(figures(row["result"]["outcome"]))
    console.print(f"page: {folder / CLAIMS_PAGE}", style="dim", highlight=False)


def listing(rows: Sequence[dict[str, Any]]) -> Table:
    table = ruled()
    for heading in ("claim", "what it says", "class", "minutes", "verdict", "date"):
        table.add_column(heading, justify="right" if heading == "minutes" else "left")
    for row in rows:
        date = row["result"]["measured"] if row["result"] else ""
        table.add_row(row["name"], row["statement"], row["kind"], f"{row['minutes']:g}", verdict_of(row), date)
    return table


def figures(outcome: dict[str, Any]) -> Table:
    table = ruled()
    for heading in ("figure", "here", "published", "the claim asks"):
        table.add_column(heading)
    for one in outcome["figures"]:
        published = "" if one["published"] is None else f"{one['published']:g}"
        table.add_row(one["name"], figure_words(one), published, asked_words(one))
    return table


def pairs(given: list[str] | None, field: str) -> dict[str, str]:
    """NAME=TEXT, each once."""
    found: dict[str, str] = {}
    for one in given or []:
        name, equals, text = one.partition("=")
        if not (name and equals and text) or name in found:
            raise RequestError(code="type", field=field, value=one, expected="NAME=TEXT, each name once")
        found[name] = text
    return found


def pair(text: str) -> tuple[float, float]:
    """7b,140b -> parameters and tokens."""
    sizes = text.split(",")
    if len(sizes) != 2:
        raise RequestError(code="type", field="predict", value=text, expected="PARAMETERS,TOKENS such as 7b,140b")
    return quantity(sizes[0], field="predict"), quantity(sizes[1], field="predict")


def show_law(
    data: str,
    form: str,
    columns: list[str] | None,
    where: list[str] | None,
    without_worst: int,
    predict: list[str] | None,
    flops: list[float] | None,
    far: bool,
    out: str | None,
    command: str,
    as_json: bool,
) -> None:
    """Fits a law to a table of runs, and says what it says."""
    read = points(data, pairs(columns, "columns"), pairs(where, "where"))
    if not 0 <= without_worst < len(read):
        raise RequestError(code="range", field="without_worst", value=without_worst, expected=f"0 to {len(read) - 1}")
    asked = [pair(one) for one in predict or []]
    law = fit_scaling_law(read.without_worst(without_worst), form)
    found = summary(law, form, asked, flops, far)
    if out is not None:
        write_scaling(found, command, out)
    if as_json:
        print(json.dumps(found, allow_nan=False))
        return
    console = output()
    console.print(found["formula"], style="bold", highlight=False)
    console.print(law_finding(found), highlight=False)
    for table in tables(found):
        console.print(table)
    if out is not None:
        console.print(f"page: {out}", style="dim", highlight=False)


class GridView(ComparisonView):
    """The plan before anything is trained, then a bar for all runs, and one for each of those at work."""

    def __init__(self, quiet: bool = False):
        super().__init__(quiet)
        self.heard: set[str] = set()
        self.ended = 0
        self.total = 0

    def plan(self, plan: ScalingPlan) -> None:
        for stage in self.reading.values():
            self.bars.update(stage, visible=False)
        if not self.console.quiet:
            self.console.print(plan_table(plan))
        for note in plan.notes:
            self._once(f"note: {note}")
        left = sum(run.seconds > 0 for run in plan.runs)
        self.say(
            f"{left} of {len(plan.runs)} runs are to be trained, about {clock(plan.seconds)} ({plan.source}). Training "
            "starts now; Ctrl-C stops it, and the same command goes on"
        )
        self.total = len(plan.runs)
        self.whole = self.bars.add_task("all runs", total=self.total, note="")

    def event(self, event: events.Event) -> None:
        if isinstance(event, events.PlanEvent):
            self.plan(event.plan)
            return
        if isinstance(event, events.Begin):
            for task in self.tasks.values():
                self.bars.remove_task(task)
            self.tasks.clear()
            self._once(event.how)
            for name, seed in event.runs:
                self.tasks[name, seed] = self.bars.add_task(f"{name} seed {seed}", total=1.0, note="waiting")
            return
        super().event(event)
        if isinstance(event, events.Kept | events.End):
            self.ended += 1
            self.bars.update(self.whole, completed=self.ended, note=f"{self.ended} of {self.total}")

    def _once(self, text: str) -> None:
        if text not in self.heard:
            self.heard.add(text)
            self.say(text)


def plan_table(plan: ScalingPlan) -> Table:
    """A row for each model, size and budget."""
    table = ruled()
    for heading in ("model", "parameters", "tokens", "FLOPs", "6 N D", "lr", "runs", "time"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    rows: dict[tuple[str, str], list[Any]] = {}
    for run in plan.runs:
        rows.setdefault((run.model, run.cell), []).append(run)
    for runs in rows.values():
        one, left = runs[0], sum(run.seconds for run in runs)
        table.add_row(
            f"{one.model}@{one.size}", short(one.params), short(one.tokens), f"{one.flops:.3g}",
            f"{one.approximate:.3g}", f"{one.learning_rate:.2g}", str(len(runs)), clock(left) if left else "done",
        )  # fmt: skip
    table.caption = "parameters of the layers, without embeddings; FLOPs of training are exact"
    return table


def train_laws(
    asked: ScalingDesign, out: str, command: str | None = None, executor: Executor | None = None, as_json: bool = False
) -> None:
    """Trains the models on a grid, and says how their losses scale."""
    with GridView(quiet=as_json) as view:
        found = scale(asked, out=out, progress=view.event, command=command, executor=executor)
    if as_json:
        print(json.dumps(found, allow_nan=False))
    else:
        console = output()
        console.print(several_finding(found), highlight=False)
        for law in found["laws"]:
            if "figures" in law:
                console.print(f"{law['model']}: {law['formula']}", style="bold", highlight=False, markup=False)
                console.print(law_finding(law), highlight=False)
                for table in tables(law):
                    console.print(table)
        for pair_of in found["differences"]:
            console.print(differences(pair_of))
        console.print(f"report: {Path(out) / REPORT}", highlight=False)
    refuse_failed(found)


def differences(found: dict[str, Any]) -> Table:
    """What differs between two models."""
    table = ruled(f"{found['b']} minus {found['a']}")
    for heading in ("", "difference", "interval"):
        table.add_column(heading, justify="right" if heading else "left")
    for one in found["figures"]:
        table.add_row(one["name"], f"{one['difference']:+.3f}", f"{one['low']:+.3f} to {one['high']:+.3f}")
    for one in found["losses"]:
        told = f"{one['low']:+.4f} to {one['high']:+.4f}"
        table.add_row(f"best loss of {one['flops']:.3g} FLOPs", f"{one['difference']:+.4f}", told)
    return table


def tables(found: dict[str, Any]) -> list[Table]:
    figures = ruled()
    for heading in ("figure", "fitted", f"interval of {found['level']:.0%}"):
        figures.add_column(heading, justify="left" if heading == "figure" else "right")
    for one in found["figures"]:
        figures.add_row(one["name"], f"{one['value']:.6g}", interval_words(one))
    made: list[Table] = [figures]
    if found["predicted"] or found["optimal"]:
        predicted = ruled()
        for heading in ("parameters", "tokens", "a parameter", "FLOPs", "loss", "interval"):
            predicted.add_column(heading, justify="right")
        for one in found["predicted"]:
            n, d = one["params"], one["tokens"]
            told = f"{one['low']:.4f} to {one['high']:.4f}"
            predicted.add_row(f"{n:.3g}", f"{d:.3g}", f"{d / n:.1f}", f"{6 * n * d:.3g}", f"{one['loss']:.4f}", told)
        for one in found["optimal"]:
            n, d, ratio, flops = (one[name] for name in ("params", "tokens", "ratio", "flops"))
            told = f"{one['low']:.4f} to {one['high']:.4f}, the best"
            predicted.add_row(f"{n:.3g}", f"{d:.3g}", f"{ratio:.1f}", f"{flops:.3g}", f"{one['loss']:.4f}", told)
        made.append(predicted)
    return made
