"""The figures of docs/statistics: two short watched runs, one healthy and one failing, and SmolLM2.

The runs: 2 layers, width 64, 2 heads, 64 tokens of a random bigram source whose second half repeats the first, AdamW
(0.9, 0.95), no weight decay, clip 1, 300 steps with 30 of warmup (the setting of Wortsman et al. 2023, arXiv
2309.14322, made small). They differ only in the learning rate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from textwrap import fill
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

import glassformer as gf
from experiments.docs import plainly
from experiments.docs.common import PASSAGE, smollm2
from glassformer import dynamics
from glassformer.dynamics import rules
from glassformer.dynamics.probe import probe
from glassformer.dynamics.records import NAME, Records, read_records
from glassformer.dynamics.watch import Moment, Watch
from glassformer.dynamics.weights import named_matrices, spectra
from glassformer.lens import style
from glassformer.lens.reading import blank
from glassformer.model import Model

EXPRESSION = "gpt2@1m+layers=2+d_model=64+heads=2+vocab_size=64+context=64"
LEARNING_RATES = {"healthy": 1e-2, "failing": 3e-1}
STEPS, WARMUP, BATCH, TOKENS, EVERY = 300, 30, 32, 64, 5


# Two runs


@dataclass
class Run:
    rows: list[dict[str, Any]]
    """Rows of the record that have statistics."""
    records: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    losses: list[float]
    first: Model
    last: Model


@cache
def run(name: str) -> Run:
    config = gf.preset(EXPRESSION)
    model, rate = config.build(seed=0), LEARNING_RATES[name]
    table = torch.softmax(2 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    metrics: list[dict[str, Any]] = []
    records = Records(Path(mkdtemp()) / NAME)
    watch = Watch(model, EVERY, records=records)
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / WARMUP)
        text = repeated(table, step)
        loss = model.loss(text[:, :-1], text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        losses.append(loss.item())
        metrics.append({"step": step, "loss": losses[-1], "grad_norm": norm, "learning_rate": group["lr"]})
        moment = Moment(step, losses[-1], norm, rate, text[:, :-1], text[:, 1:], model, optimizer)
        watch.before_update(moment)
        optimizer.step()
        watch.after_update(moment)
    records.close()
    found = list(read_records(records.path))
    rmtree(records.path.parent)
    rows = [row for row in found if "statistics" in row]
    return Run(rows, found, metrics, losses, config.build(seed=0), model)


def repeated(table: Tensor, step: int) -> Tensor:
    """Returns tokens (BATCH, TOKENS + 1): half a text of the bigram source, repeated, and its first token."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = [torch.randint(len(table), (BATCH,), generator=generator)]
    for _ in range(TOKENS // 2 - 1):
        tokens.append(torch.multinomial(table[tokens[-1]], 1, generator=generator)[:, 0])
    return torch.stack([*tokens, *tokens, tokens[0]], dim=1)


@cache
def trained() -> dict[str, dict[str, Any]]:
    """Returns the statistics that a watch records of SmolLM2-135M reading PASSAGE, except those of gradients."""
    loaded = smollm2()
    found: dict[str, dict[str, Any]] = probe(loaded.model, loaded.tokens(PASSAGE))
    for name, places in spectra(named_matrices(loaded.model)).items():
        found.setdefault(name, {}).update(places)
    return found


# Curves of the record


@dataclass(frozen=True)
class Curves:
    """Drawing of a recorded statistic: its places, its axis, and a line at a reference value."""

    record: str
    y: str
    places: tuple[str, ...]
    """Last parts of the names of the places that are drawn."""
    log: bool = False
    line: tuple[float, str] | None = None
    smollm2: bool = True
    """True if SmolLM2 is drawn too: for statistics without gradients."""


WEIGHTS = ("q", "k", "v", "out", "up", "down")
CURVES: dict[str, list[Curves]] = {
    "attention_entropy": [Curves("attention_entropy", "entropy / log(keys)", ("mixer",), line=(0.1, "trouble below"))],
    "max_attention_logit": [
        Curves("max_attention_logit", "largest logit", ("mixer",), True, (1e4, "all diverged above"))
    ],
    "sink_mass": [Curves("sink_mass", "mass on token 0", ("mixer",), line=(0.3, "sink head above"))],
    "token_cosine": [Curves("token_cosine", "rho", ("resid_post",), line=(0.95, "trouble above"))],
    "relative_residual": [Curves("relative_residual", "mu", ("resid_post",))],
    "residual_rms": [Curves("residual_rms", "RMS", ("resid_post",), True)],
    "massive": [Curves("massive", "max |x| / median |x|", ("resid_post",), True, (1e3, "massive above"))],
    "effective_rank": [
        Curves("effective_rank", "effective rank, weights", ("q", "k", "v", "qk")),
        Curves("activation_effective_rank", "effective rank, stream", ("resid_post",)),
    ],
    "stable_rank": [
        Curves("stable_rank", "stable rank, weights", ("q", "k", "v", "qk")),
        Curves("activation_stable_rank", "stable rank, stream", ("resid_post",)),
    ],
    "spectral_norm": [Curves("spectral_norm", "largest singular value", ("q", "k", "v", "qk"), True)],
    "row_cosine": [Curves("row_cosine", "mean |cosine| of rows", ("q", "k", "v", "up"))],
    "gradient_norm": [
        Curves("gradient_norm", "norm of the gradient", WEIGHTS, True, smollm2=False),
        Curves("weight_norm", "norm of the weights", WEIGHTS, True, smollm2=False),
    ],
    "gradient_rms": [
        Curves("gradient_rms", "RMS of the gradient", WEIGHTS, True, (1e-8, "eps of Adam"), smollm2=False)
    ],
    "update_ratio": [Curves("update_ratio", "|ΔW| / |W|", WEIGHTS, True, (1e-2, "rule of thumb"), smollm2=False)],
    "dead_units": [Curves("dead_units", "share of dead units", ("hidden",))],
    "log_z": [Curves("log_z", "mean log Z", ("logits",), line=(4.16, "log V"), smollm2=False)],
}


def flat(value: Any) -> list[float]:
    return [float(one) for one in (value if isinstance(value, list) else [value])]


def series(rows: list[dict[str, Any]], curves: Curves) -> dict[tuple[str, int], tuple[list[int], list[float]]]:
    """Returns {(place, head): (steps, values)} of a recorded statistic."""
    found: dict[tuple[str, int], tuple[list[int], list[float]]] = {}
    for row in rows:
        for where, value in row["statistics"].get(curves.record, {}).items():
            if where.rsplit(".", 1)[-1] in curves.places:
                for head, one in enumerate(flat(value)):
                    steps, values = found.setdefault((where, head), ([], []))
                    steps.append(row["step"])
                    values.append(one)
    return found


def layer_of(where: str) -> int:
    inside = re.match(r"layers\.(\d+)\.", where)
    return int(inside[1]) if inside else 0


def draw_run(ax: Any, rows: list[dict[str, Any]], curves: Curves) -> list[float]:
    """Draws a line for each place and head, with a colour per place and dashes by layer; returns the last values."""
    last, seen = [], set()
    for (where, _), (steps, values) in series(rows, curves).items():
        layer, place = layer_of(where), where.rsplit(".", 1)[-1]
        one = len(curves.places) == 1
        colour = style.COLOURS[layer if one else curves.places.index(place)]
        label = (f"layer {layer}" if one else place) if where.startswith("layers.") else None
        ax.plot(
            steps, values, color=colour, linewidth=1.2, linestyle="-" if one or layer == 0 else (0, (3, 2)),
            label=None if label in seen else label,
        )  # fmt: skip
        seen.add(label)
        last.append(values[-1])
    return last


RUN_TABLE = ("| | first | last, smallest to largest |", "|---|---|---|")


def draw_runs(axes: Iterable[Any], curves: Curves, of: str = "") -> list[str]:
    """Draws each run in a plot; returns their rows of RUN_TABLE."""
    rows = []
    for ax, arm in zip(axes, LEARNING_RATES, strict=False):
        last = draw_run(ax, run(arm).rows, curves)
        first = [values[0] for _, values in series(run(arm).rows, curves).values()]
        rows.append(f"| {arm} run{of} | {span(first)} | {span(last)} |")
        ax.set_title(f"{arm}: learning rate {LEARNING_RATES[arm]:g}", loc="left", fontsize=9, color=style.INK)
        ax.set_xlabel("step")
        ax.set_ylabel(curves.y)
    return rows


def draw_trained(ax: Any, curves: Curves, of: str = "") -> str:
    """Draws a dot for each head or place of SmolLM2, by layer; returns its row of RUN_TABLE."""
    values: list[float] = []
    for where, value in trained().get(curves.record, {}).items():
        place = where.rsplit(".", 1)[-1]
        if place in curves.places:
            one = len(curves.places) == 1
            colour = style.COLOURS[5 if one else curves.places.index(place)]
            ax.plot([layer_of(where)] * len(flat(value)), flat(value), ".", color=colour, markersize=3.5, alpha=0.8)
            values += flat(value)
    if not any(values):
        ax.set_ylim(-0.05, 1)
    ax.set_title("SmolLM2-135M, trained", loc="left", fontsize=9, color=style.INK)
    ax.set_xlabel("layer")
    return f"| SmolLM2-135M, over its layers{of} | | {span(values)} |"


def by_step(name: str) -> tuple[Figure, str]:
    """Draws both runs, and SmolLM2 if it has the statistic, with a row of plots for each record; returns the figure and
    its text."""
    rows = CURVES[name]
    columns = 3 if any(one.smollm2 for one in rows) else 2
    figure = blank(3.5 * columns + 0.7, 2.9 * len(rows))
    grid = style.axes(figure, len(rows), columns) if len(rows) * columns > 1 else [[style.axes(figure)]]
    table = list(RUN_TABLE)
    for row, curves in zip(grid, rows, strict=True):
        of = f", {curves.record}" if len(rows) > 1 else ""
        table += draw_runs(row, curves, of)
        if curves.smollm2:
            table.append(draw_trained(row[2], curves, of))
        elif columns == 3:
            row[2].set_visible(False)
        share_range(list(row[:2]), curves.log)
        for ax in row:
            if curves.log:
                ax.set_yscale("log")
            low, high = sorted(ax.get_ylim())
            if curves.line and low <= curves.line[0] <= high:
                style.line(ax, *curves.line)
        handles, labels = row[0].get_legend_handles_labels()
        if len(curves.places) > 1:
            beside = row[2] if curves.smollm2 else row[1]
            style.legend(beside, handles=handles, labels=labels, loc="upper left", bbox_to_anchor=(1, 1))
        elif handles:
            style.legend(row[0])
    many = any(len(one.places) > 1 for one in rows)
    return figure, f"{about(many)}\n\n" + "\n".join(table)


def share_range(pair: list[Any], log: bool) -> None:
    """Gives both plots one range of y, unless one curve would be a flat line in it."""
    ranges = [ax.get_ylim() for ax in pair]
    low, high = min(one[0] for one in ranges), max(one[1] for one in ranges)
    high += 0.03 * (high - low)
    if not log and all(one[1] - one[0] > (high - low) / 12 for one in ranges):
        for ax in pair:
            ax.set_ylim(low, high)


def about(many: bool) -> str:
    losses = {arm: run(arm).losses[-1] for arm in LEARNING_RATES}
    return (
        f"Two runs of one model, which differ only in the learning rate; loss at step {STEPS}: "
        + ", ".join(f"{arm} {loss:.2f}" for arm, loss in losses.items())
        + (". A line for each head or matrix; dashes are layer 1." if many else ". A line for each head or layer.")
    )


def span(values: list[float]) -> str:
    """Returns the range of values as text: `0.41` or `0.02 to 0.97`."""
    if not values:
        return ""
    low, high = shown(min(values)), shown(max(values))
    return low if low == high else f"{low} to {high}"


def shown(value: float) -> str:
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


# Separate figures


def depth_of(variant: str, layers: int = 24, t: int = 64, d: int = 128, heads: int = 4) -> list[Tensor]:
    """Returns the stream (t, d) after each layer of a random network on random tokens: no mask, weights N(0, 1/inputs),
    fp64."""
    generator = torch.Generator().manual_seed(0)

    def linear(x: Tensor, outputs: int) -> Tensor:
        return x @ (torch.randn(x.shape[-1], outputs, generator=generator, dtype=x.dtype) / x.shape[-1] ** 0.5)

    def attention(x: Tensor) -> Tensor:
        q, k, v = (linear(x, d).unflatten(-1, (heads, -1)).transpose(0, 1) for _ in range(3))
        z = torch.softmax(q @ k.mT / (d // heads) ** 0.5, -1) @ v
        return linear(z.transpose(0, 1).flatten(1), d)

    def mlp(x: Tensor) -> Tensor:
        return linear(F.gelu(linear(x, 4 * d)), d)

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (d,))

    steps: dict[str, Callable[[Tensor], Tensor]] = {
        "only attention": attention,
        "Post-LN": lambda x: norm((y := norm(x + attention(x))) + mlp(y)),
        "Pre-LN": lambda x: (y := x + attention(norm(x))) + mlp(norm(y)),
        "Post-LN, branches / sqrt(L)": lambda x: norm(
            (y := norm(x + attention(x) / layers**0.5)) + mlp(y) / layers**0.5
        ),
    }
    x, stream = torch.randn(t, d, generator=generator, dtype=torch.float64), []
    for _ in range(layers):
        x = steps[variant](x)
        stream.append(x)
    return stream


VARIANTS = ("only attention", "Post-LN", "Pre-LN", "Post-LN, branches / sqrt(L)")


def draw_depth(ax: Any, statistic: Callable[[Tensor], Tensor], log: bool) -> dict[str, list[float]]:
    found = {}
    for variant in VARIANTS:
        found[variant] = [float(statistic(x)) for x in depth_of(variant)]
        ax.plot(range(1, 25), found[variant], label=variant, linewidth=1.4)
    ax.set_title("by depth at init, random tokens", loc="left", fontsize=9, color=style.INK)
    ax.set_xlabel("layer")
    if log:
        ax.set_yscale("log")
        ax.set_ylim(1e-17, 10)
    style.legend(ax)
    return found


def with_depth(name: str) -> tuple[Figure, str]:
    """Draws the runs, and the statistic by depth in untrained networks; returns the figure and its text."""
    (curves,) = CURVES[name]
    statistic = getattr(dynamics, name)
    figure = blank(11.2, 5.8)
    grid = style.axes(figure, 2, 2)
    table = [*RUN_TABLE, *draw_runs(grid[0], curves), draw_trained(grid[1, 0], curves)]
    grid[1, 0].set_ylabel(curves.y)
    if curves.line:
        for ax in grid[0]:
            style.line(ax, *curves.line)
    share_range(list(grid[0]), False)
    style.legend(grid[0, 0])
    for variant, found in draw_depth(grid[1, 1], statistic, name == "relative_residual").items():
        table.append(f"| {variant}, layers 1 and 24 | {shown(found[0])} | {shown(found[-1])} |")
    return figure, f"{about(False)}\n\n" + "\n".join(table)


def composite_residual() -> tuple[Figure, str]:
    figure = blank(6.4, 3.6)
    ax = style.axes(figure, y="composite residual")
    found = draw_depth(ax, dynamics.composite_residual, True)
    table = ["| | layer 1 | layer 3 | layer 24 |", "|---|---|---|---|"]
    table += [f"| {name} | {shown(v[0])} | {shown(v[2])} | {shown(v[-1])} |" for name, v in found.items()]
    return figure, "64 random tokens, width 128, 4 heads, no mask.\n\n" + "\n".join(table)


def entropy_bound() -> tuple[Figure, str]:
    """Draws the bound, and the entropies of random rows of equal norm; returns the figure and its text."""
    figure = blank(6.8, 3.6)
    ax = style.axes(figure, x="norm s of the row of scores", y="entropy [nats]")
    generator = torch.Generator().manual_seed(0)
    norms, least = torch.linspace(0.05, 12, 200), float("inf")
    for colour, keys in zip(style.COLOURS, (16, 256), strict=False):
        ax.plot(norms, dynamics.entropy_bound(norms, keys), color=colour, linewidth=1.6, label=f"{keys} keys")
        s = 12 * torch.rand(1000, generator=generator)
        rows = torch.randn(1000, keys, generator=generator, dtype=torch.float64)
        large = 40 * keys**0.5 * torch.rand(500, 1, generator=generator) ** 2
        rows[:500] += large * torch.eye(keys)[torch.randint(keys, (500,), generator=generator)]
        rows -= rows.mean(-1, keepdim=True)
        rows *= (s / rows.norm(dim=-1))[:, None]
        entropy = torch.special.entr(rows.softmax(-1)).sum(-1)
        ax.plot(s, entropy, ".", color=colour, markersize=1.6, alpha=0.5)
        least = min(least, float((entropy - dynamics.entropy_bound(s, keys)).min()))
    style.legend(ax)
    assert least > -1e-9
    return figure, (
        "2,000 random rows of scores, half of them with one outlier. All entropies are above the bound; "
        f"the nearest by {least:.1e} nats."
    )


def inverse_participation_ratio() -> tuple[Figure, str]:
    """Draws the ratio for random scores of growing spread, and its limit for long texts; returns figure and text."""
    figure = blank(6.8, 3.6)
    ax = style.axes(figure, x="β: scores have the standard deviation β sqrt(log T)", y="IPR")
    betas = torch.linspace(0.1, 4, 40)
    table = ["| T | β = 0.5 | β = 1 | β = 2 | β = 4 |", "|---|---|---|---|---|"]
    for t, shade in ((64, 0.4), (256, 0.65), (1024, 0.95)):
        scores = torch.randn(1024, t, generator=torch.Generator().manual_seed(0))
        deviation = float(torch.tensor(float(t)).log().sqrt())

        def ratio(beta: float, scores: Tensor = scores, deviation: float = deviation) -> float:
            return float(dynamics.inverse_participation_ratio((scores * beta * deviation).softmax(-1)))

        ax.plot(betas, [ratio(float(b)) for b in betas], color=style.colour_map()(shade), label=f"T = {t}")
        table.append(f"| {t} | " + " | ".join(f"{ratio(b):.3f}" for b in (0.5, 1.0, 2.0, 4.0)) + " |")
    limit = (1 - 2**0.5 / betas).clamp(min=0)
    ax.plot(betas, limit, color=style.COLOURS[1], linestyle=(0, (4, 3)), label="limit of long sequences")
    table.append("| limit | " + " | ".join(f"{max(0.0, 1 - 2**0.5 / b):.3f}" for b in (0.5, 1.0, 2.0, 4.0)) + " |")
    style.legend(ax)
    return figure, "Independent normal scores, the mean of 1,024 rows.\n\n" + "\n".join(table)


def cosine_map() -> tuple[Figure, str]:
    """Draws the cosine map of W_Q of both heads of layer 0, before and after each run; returns figure and text."""
    figure = blank(10.6, 3.4)
    grid = style.axes(figure, 1, 3)
    models = {"at init": run("healthy").first} | {f"{arm}, step {STEPS}": run(arm).last for arm in LEARNING_RATES}
    said = []
    for ax, (name, model) in zip(grid[0], models.items(), strict=True):
        matrix = named_matrices(model)["layers.0.mixer.q"]
        rows = matrix.within(matrix.parameter).detach().flatten(0, -2)
        style.heat(ax, dynamics.cosine_map(rows).cosines, signed=True, high=1.0, aspect="equal", bar=name != "at init")
        ax.set_title(name, loc="left", fontsize=9, color=style.INK)
        ax.set_xlabel("row, re-ordered")
        said.append(f"{name} {float(dynamics.row_cosine(rows)):.3f}")
    return figure, f"W_Q of layer 0. Mean |cosine| between rows: {', '.join(said)}."


def routed(offset: float) -> tuple[Tensor, Tensor]:
    """Probabilities and chosen experts of 4,096 random tokens that share a vector of `offset` times their size."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 8, generator=generator) / 32**0.5
    tokens = torch.randn(4096, 32, generator=generator) + offset * torch.randn(32, generator=generator)
    probabilities = (tokens @ weight).softmax(-1)
    return probabilities, probabilities.topk(2).indices


def router_load() -> tuple[Figure, str]:
    figure = blank(6.8, 3.4)
    ax = style.axes(figure, x="expert", y="share of assignments")
    said = []
    for i, offset in enumerate((0.0, 1.0, 2.0)):
        load = dynamics.router_load(routed(offset)[1], 8)
        at = torch.arange(8) + (i - 1) * 0.27
        ax.bar(at, load, width=0.25, color=style.COLOURS[i], label=f"common offset {offset:g}")
        said.append(f"offset {offset:g}: {span(load.tolist())}")
    style.line(ax, 1 / 8, "level")
    style.legend(ax)
    return figure, f"8 experts, 2 for each token. Shares, {'; '.join(said)}."


def router_curve(statistic: Callable[[Tensor, Tensor], Tensor], y: str, line: tuple[float, str]) -> tuple[Figure, str]:
    figure = blank(6.0, 3.2)
    ax = style.axes(figure, x="common offset of the tokens, in their own size", y=y)
    offsets = [i / 8 for i in range(33)]
    values = [float(statistic(*routed(offset))) for offset in offsets]
    ax.plot(offsets, values, linewidth=1.6)
    style.line(ax, *line)
    return figure, f"8 experts, 2 for each token. At no offset {values[0]:.3f}, at an offset of 4 {values[-1]:.3f}."


def diagnose() -> tuple[Figure, str]:
    """Draws the losses of both runs, with the first step of each diagnosed cause; returns the figure and the rules."""
    figure = blank(7.6, 3.4)
    ax = style.axes(figure, x="step", y="loss [nats]")
    told = []
    for colour, arm in zip(style.COLOURS, LEARNING_RATES, strict=False):
        one = run(arm)
        found = dynamics.diagnose(one.metrics, one.records, one.last.config, {"learning_rate": LEARNING_RATES[arm]})
        ax.plot(range(1, STEPS + 1), one.losses, color=colour, label=f"{arm}: {found.verdict}", linewidth=1.2)
        at = sorted({cause.step for cause in found.causes if cause.step})
        ax.plot(at, [one.losses[step - 1] for step in at], "v", color=colour, markersize=6)
        told.append(f"{arm} run: {found.verdict}\n{found.paragraph()}")
    style.legend(ax)
    named = [f"- **{rule.__name__.replace('_', ' ')}**: {plainly(' '.join((rule.__doc__ or '').split()))}"
             for rule in rules.RULES]  # fmt: skip
    wrapped = "\n\n".join(fill(paragraph, 100) for text in told for paragraph in text.splitlines())
    return figure, (
        "```\nglassformer why RUN\n```\n\nA triangle marks the first step of a diagnosed cause.\n\n"
        f"```\n{wrapped}\n```\n\nThe failures it knows, each a combination:\n\n" + "\n".join(named)
    )


OWN: dict[str, Callable[[], tuple[Figure, str]]] = {
    "token_cosine": lambda: with_depth("token_cosine"),
    "relative_residual": lambda: with_depth("relative_residual"),
    "composite_residual": composite_residual,
    "entropy_bound": entropy_bound,
    "inverse_participation_ratio": inverse_participation_ratio,
    "cosine_map": cosine_map,
    "diagnose": diagnose,
    "router_load": router_load,
    "router_entropy": lambda: router_curve(
        lambda p, _: dynamics.router_entropy(p, normalised=True), "entropy / log(experts)", (1.0, "does not decide")
    ),
    "max_violation": lambda: router_curve(
        lambda _, chosen: dynamics.max_violation(dynamics.router_load(chosen, 8)), "MaxVio", (1.0, "twice its share")
    ),
}


def draw(name: str, function: Callable[..., Any]) -> tuple[Figure, str]:
    """Returns the figure of a statistic, and its measurements as Markdown."""
    return OWN[name]() if name in OWN else by_step(name)
