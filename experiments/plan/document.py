"""docs/planning.md: how a plan is made, the questions that it answers, and its comparison with published figures.

>>> python -m experiments.plan.document
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from experiments.plan import calculators, mpt
from experiments.plan.published import Point, points
from experiments.plan.published import beyond as published_beyond
from experiments.plan.questions import answers
from glassformer.planning import time as planning_time
from glassformer.planning.machines import machines

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
GENERATED = "<!-- `python -m experiments.plan.document` writes this page. -->"
INTRODUCTION = """# Planning

`glassformer plan` computes what a model takes before a machine is rented: exact parameters and FLOPs, memory by use, an
interval of time, and cost. Everything follows from the costs that each part of a config declares, so that it holds for
every composition, not for one family.

```
glassformer plan qwen3-8b --explain                                 # every figure with its formula
glassformer plan llama-3-8b --gpu h100 --batch 8 --context 4k       # decoding: what fits, time of a token, cost
glassformer plan llama-2-70b --weights int4 --gpu h100              # weights quantised to 4 bits, matmuls in bf16
glassformer plan llama-3-8b --train --gpu h100:8 --nodes 4 --batch 64 --recompute full --tokens 15T --explain
glassformer plan llama-3-8b --train --gpu h100 --batch 64 --layout dp=4,tp=8,sp=1,zero=1 --price 2.5USD
glassformer plan llama-3-8b --train --gpu h100:8 --find             # layouts that fit, the fastest first
glassformer plan llama@10m --here                                   # steps timed on this machine
```

The same from Python: `gf.plan("llama-3-8b", train=True, machine="h100:8", nodes=4, batch=64, micro_batch=1,
tokens="15T")` prints what the command prints and has `memory`, `time` (kinds of work, MFU, HFU, interval) and `run`
(days, hours, energy, cost); `gf.plan("llama-3-8b", machine="h100")` has `decoding`. `find=True` gives the layouts and
`here=True` the timed steps; a list of models gives several plans next to each other. `.report("plan.html")` writes the
page.

Several models are planned at one context: `--context`, or the shortest that any of them is trained for. When decoding,
weights and states are divided by tensor parallelism within a node, over a divisor of the KV heads, and by pipeline
stages across nodes. A step that does not fit has neither time nor cost; the plan names a layout that fits."""


MACHINES = """Links are inside a node and between nodes, in one direction. `--machines mine.yaml` adds machines of
yours."""
FACTORS = """A factor is the measured time of runs over the time of the roofline. Errors are of model sizes that were
left out of the fit. A machine without factors, or a layout that divides tensors, layers or sequences, has a range."""
ELSEWHERE = """A machine without factors has the range that the factors of all other machines give, from {low:g} times
its low end to {high:g} times its high end. The two numbers were chosen by leaving each measured machine out in turn and
planning its runs with the factors of the others: at most 5 % of its runs are faster, and at most 5 % slower. With them,
{within} of the runs are inside the range; without them, runs on H100 are up to 1.4 times slower than planned."""
BEYOND = """A layout that divides tensors, layers or sequences has {low:g} to {high:g} times that range: the 10th and
the 90th percentile of published over planned time, of the {all} published steps of such layouts below, which were not
fitted. {within} of these steps are inside the whole range. If the two ends are chosen without one source and tested on
it, for each source in turn, they hold {held} of the {all} steps, and the furthest is off by {furthest:.0%}: the sources
are few."""
PUBLISHED = """Planned in bf16. If a throughput and a layout are published, the table has both the MFU by our FLOPs and
the planned throughput."""
RUNS = f"""Facts from {mpt.SOURCE}. MFU is computed from their
throughput and 6 N + 12 L d s; the time of a step is planned with factors fitted on the other sizes."""
RULES = f"""Errors of common rules against the exact answer of the config. Training memory is that of one sequence of
{calculators.CONTEXT:,} tokens with AdamW and fp32 weights."""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Returns a table in Markdown; the columns in `right` are aligned right."""
    rule = ["--:" if i in right else "---" for i in range(len(headings))]
    lines = [headings, rule, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def questions() -> str:
    rows = [
        (one.question, f"`{one.command}`" if one.command else "", one.ours, one.formula, one.quoted, one.verdict)
        for one in answers()
    ]
    return table(("question", "command", "answer", "made of", "often quoted", "is"), rows)


def model_of_time() -> str:
    lines = (planning_time.__doc__ or "").strip().split("\n\n")
    return "\n\n".join([lines[0], lines[1], f"```\n{lines[2]}\n```", *lines[3:]])


def factors() -> str:
    rows = []
    for name, machine in machines().items():
        if machine.measured is not None:
            fit = mpt.fit(name)
            named = [f"{getattr(machine.measured, field):.2f}" for field in mpt.FITTED]
            share = (f"{fit.absolute(0.5):.1%}", f"{fit.absolute(0.9):.1%}", f"{max(map(abs, fit.errors)):.0%}")
            rows.append((machine.title, f"{len(fit.errors)}", *named, *share))
    heads = ("", "runs", *mpt.FITTED, "median error", "90th percentile", "largest")
    return table(heads, rows, range(1, 9))


def published() -> str:
    def row(one: Point) -> tuple[str, ...]:
        between = "" if one.low is None or one.high is None else f"{one.low:,.5g} to {one.high:,.5g}"
        value = [f"{figure:,.0f}" if figure >= 1000 else f"{figure:.4g}" for figure in (one.published, one.ours)]
        told = "; ".join(filter(None, (one.source, one.note)))
        return (f"{one.number}", one.what, one.unit, *value, between, f"{one.error:+.1%}", told)

    heads = ("", "what", "unit", "published", "planned", "interval", "error", "source")
    return table(heads, [row(one) for one in points()], (3, 4, 5, 6))


def elsewhere() -> str:
    """Returns the text about the range of a machine without measurements, tested on the measured machines."""
    _, within = mpt.elsewhere()
    low, high = planning_time.ELSEWHERE
    shares = ", ".join(f"{share:.0%} ({machines()[gpu].title})" for gpu, share in within.items())
    return ELSEWHERE.format(low=low, high=high, within=shares)


def beyond() -> str:
    """Returns the text about the factors of divided layouts, tested on sources left out of their choice."""
    divided = [one for one in points() if one.divided is not None]
    outside = []
    for one in divided:
        (least, most), ratio = published_beyond(one.source), one.divided or 1.0
        outside.append(max(least / ratio, ratio / most, 1.0) - 1)
    low, high = planning_time.BEYOND
    held = sum(each == 0 for each in outside)
    within = sum(
        one.low <= one.published <= one.high for one in divided if one.low is not None and one.high is not None
    )
    return BEYOND.format(low=low, high=high, within=within, held=held, all=len(divided), furthest=max(outside))


def runs() -> str:
    """Returns a table of the 216 runs by machine and size: median and largest error of MFU, and of planned time."""
    rows = []
    for gpu in dict.fromkeys(row.gpu for row in mpt.rows()):
        of_gpu = [row for row in mpt.rows() if row.gpu == gpu and row.dtype == "bfloat16"]
        names = [row.model for row in of_gpu]
        by_size = dict(zip([f"{name}" for name in names], [0.0] * len(names), strict=True))
        ordered = [row for size in dict.fromkeys(names) for row in of_gpu if row.model == size]
        errors = dict(zip(map(id, ordered), mpt.fit(gpu).errors, strict=True))
        for size in by_size:
            own = [row for row in ordered if row.model == size]
            mfu = [row.mfu_of_throughput / row.mfu - 1 for row in own]
            time = [errors[id(row)] for row in own]
            rates = f"{min(row.mfu for row in own):.0f} to {max(row.mfu for row in own):.0f}"
            rows.append((
                machines()[gpu].title, size, f"{len(own)}", rates, f"{max(map(abs, mfu)):.2%}",
                f"{statistics.median(map(abs, time)):.1%}", f"{max(map(abs, time)):.1%}",
            ))  # fmt: skip
    heads = ("", "size", "runs", "MFU, %", "MFU off by at most", "time off by, median", "at most")
    return table(heads, rows, range(2, 7))


def rules() -> str:
    heads = ("", *(f"{rule.what}: {rule.unit}" for rule in calculators.RULES))
    found = [calculators.errors(rule) for rule in calculators.RULES]
    rows = [(name, *(f"{error[name]:+.0%}" for error in found)) for name in calculators.MODELS]
    worst = ("furthest", *(f"{max(error.values(), key=abs):+.0%}" for error in found))
    return table(heads, [*rows, worst], range(1, len(heads)))


def machine_table() -> str:
    rows = []
    for name, one in machines().items():
        price = one.price and f"{one.price.low:g} to {one.price.high:g} {one.price.currency}, {one.price.date}"
        source = f"[specification]({one.source})"
        rows.append((
            f"`{name}`", one.title, f"{one.memory / 1e9:.0f} GB", f"{one.bandwidth / 1e12:.3g} TB/s",
            f"{one.peak['bfloat16'] / 1e12:.4g}", f"{one.inside / 1e9:.0f} / {one.between / 1e9:.0f}", price or "–",
            "fitted" if one.measured else "range", source,
        ))  # fmt: skip
    heads = ("name", "", "memory", "bandwidth", "bf16 TFLOP/s", "links, GB/s", "an hour", "time", "source")
    return table(heads, rows, (2, 3, 4, 5))


def written() -> str:
    """Returns the whole page."""
    sections = (
        GENERATED, INTRODUCTION, "## Questions", questions(), "## Machines", MACHINES, machine_table(),
        "## Time", model_of_time(), FACTORS, factors(), elsewhere(), beyond(),
        "## Published figures", PUBLISHED, published(),
        "## 216 training runs", RUNS, runs(), "## Rules that are often used", RULES, rules(),
    )  # fmt: skip
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
    print(f"{PAGE.relative_to(PAGE.parents[1])}  {PAGE.stat().st_size / 1000:.0f} kB")
