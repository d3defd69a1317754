"""Pages of scaling laws: parameters with intervals, the fitted points, predictions, and differences between models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from glassformer.figures import (
    Axis,
    Dot,
    Markup,
    Series,
    copyable,
    count,
    interval_axis,
    interval_domain,
    interval_row,
    join,
    legend,
    line_chart,
    scatter_chart,
    si,
    tag,
)
from glassformer.laboratory.cells import CellRun
from glassformer.laboratory.several import FigureGap, LawDifference, LawsRecord, LossGap, ModelLaw, NoLaw
from glassformer.laboratory.summary import HeldOut, LawFigure, LawRecord, Unfitted
from glassformer.report.html import caption, cell, figure, framed, scroll, section, two_sizes
from glassformer.units import plural

PAIRS = (("alpha", "beta"), ("alpha_N", "alpha_D"))
"""Pairs of exponents that are drawn against each other."""
MEANING = {
    "alpha": "gain from parameters", "beta": "gain from tokens", "alpha_N": "gain from parameters",
    "alpha_D": "gain from tokens",
}  # fmt: skip


def render_scaling(found: LawRecord, command: str) -> str:
    """Returns the page of one scaling law as HTML text."""
    parts: dict[str, tuple[str, Markup | None]] = {
        "figures": ("Figures", _figures(found)), "fit": ("Fit", _fit(found)),
        "predictions": ("Predictions", _predictions(found)),
        "allocation": ("Compute-optimal sizes", _allocation(found)),
    }  # fmt: skip
    return _page("Scaling law", found.formula, finding(found), command, parts, found.to_dict())


def render_several(found: LawsRecord) -> str:
    """Returns the page of several models' scaling laws as HTML text."""
    fitted = found.fitted
    names = [law.model for law in found.laws]
    parts: dict[str, tuple[str, Markup | None]] = {
        "exponents": ("Exponents", _exponents(fitted, found.differences)),
        "best": ("Compute-optimal loss", _best(fitted, found.differences)),
        "held-out": ("The largest run, predicted from the others", _held_out(fitted)),
    }
    for i, law in enumerate(fitted):
        drawn = (_fit(law), _sizes(law), _budgets(law), _allocation(law), _predictions(law))
        parts[f"law-{i}"] = (law.model, tag("div", tag("p", finding(law)), *(one for one in drawn if one)))
    parts["runs"] = ("Runs", _runs(found.runs))
    parts["notes"] = ("Notes", tag("ul", *(tag("li", note) for note in found.notes)))
    title = f"How the loss of {_and(names)} scales"
    return _page("Scaling laws", title, several_finding(found), found.command, parts, found.to_dict())


def _page(
    kicker: str, title: str, told: str, command: str, parts: dict[str, tuple[str, Markup | None]], data: object
) -> str:  # fmt: skip
    header = tag(
        "header", tag("p", f"Glassformer {kicker.lower()}", class_="kicker"), tag("h1", title),
        tag("p", told, class_="finding"), copyable(command),
    )  # fmt: skip
    made = {key: (head, section(key, head, part)) for key, (head, part) in parts.items() if part is not None}
    return framed(kicker, header, made, data, "law", "figures")


def several_finding(found: LawsRecord) -> str:
    """Returns a summary of the scaling laws of several models, in a few sentences."""
    runs, told = found.runs, []
    trained = sum(run.status == "ok" for run in runs)
    told.append(f"{plural(trained, 'run')} of {plural(len(found.laws), 'model')}, fitted by {_formula(found)}.")
    told += [
        f"The losses of {law.model} do not follow this form: its exponents are not meaningful."
        for law in found.fitted if not law.describes
    ]  # fmt: skip
    for pair in found.differences:
        a, b = pair.a, pair.b
        shown = [one for one in pair.figures if one.shown]
        if shown:
            each = _and([f"{one.name} by {_signed(one, 3)}" for one in shown])
            told.append(f"{b} differs from {a} in {each}.")
        else:
            told.append(f"No difference in exponents is shown between {a} and {b}.")
        for one in pair.losses[:1]:
            lower = b if one.difference < 0 else a
            told.append(
                f"At {si(one.flops)} FLOPs shared out best, the loss of {b} differs by {_signed(one, 4)}: "
                + (f"that of {lower} is lower." if one.shown else "no difference is shown.")
            )
    for law in found.laws:
        if isinstance(law, NoLaw):
            told.append(f"{law.model} has no law: {law.why}.")
        if law.lost:
            lost = plural(law.lost, "run")
            told.append(f"{lost} of {law.model} diverged or failed, and {_is(law.lost)} left out.")
    return " ".join(told)


def finding(found: LawRecord) -> str:
    """Returns a summary of one fitted scaling law, in a few sentences."""
    told = [
        f"Fitted to {plural(found.points, 'point')} of {plural(found.runs, 'run')}, up to "
        f"{si(found.largest_flops)} FLOPs: off by {found.error:.2%} on average, "
        f"{found.worst_error:.2%} at most."
    ]
    if found.left_out:
        told.append(f"{plural(found.left_out, 'row')} without a finite loss {_is(found.left_out)} left out.")
    out = found.held_out
    if isinstance(out, HeldOut):
        told.append(
            f"From all others the largest run is predicted at {out.predicted:.4f}, in {out.low:.4f} to "
            f"{out.high:.4f}; it has {out.measured:.4f} ({out.error:+.2%})."
        )
    if not found.describes:
        told.append("The losses do not follow this form: its figures are those of the nearest law, and say little.")
    if found.starts_that_agree < 0.5:
        told.append("Most starts ended elsewhere: these points do not say much about this law.")
    return " ".join(told)


def _figures(found: LawRecord) -> Markup:
    rows = [
        (one.name, f"{one.value:.6g}", interval_words(one),
         "" if one.without_furthest is None else f"{one.without_furthest:.6g}")
        for one in found.figures
    ]  # fmt: skip
    told = f"Intervals of {found.level:.0%}: bootstrap over runs."
    heads = ("figure", "fitted", "interval", "without the 5 points furthest off")
    return figure(_table("Figures of the law", heads, rows), caption(told))


def _fit(found: LawRecord) -> Markup:
    series = [
        Series(f"{count(curve.params)} parameters", curve.fitted, style=i,
               markers=curve.measured)
        for i, curve in enumerate(found.curves)
    ]  # fmt: skip
    x, y = Axis("Training tokens", "log", unit="tokens"), Axis("Loss, nats", decimals=3)
    title = "Loss against tokens, measured and fitted"
    wide = line_chart(series, x, y, title)
    narrow = line_chart(series, x, y, title, width=372, height=300, end_labels=False)
    return figure(two_sizes(wide, narrow), legend(series), caption("Markers are runs; lines are the law at that size."))


def _sizes(found: LawRecord) -> Markup | None:
    if not found.sizes:
        return None
    series = [
        Series(f"{si(curve.tokens)} tokens", curve.fitted, style=i,
               markers=curve.measured)
        for i, curve in enumerate(found.sizes)
    ]  # fmt: skip
    return _lines(series, "Parameters of the layers", "Loss against parameters, measured and fitted", "parameters",
                  "Markers are runs; lines are the law with that many tokens.")  # fmt: skip


def _budgets(found: LawRecord) -> Markup | None:
    if not found.budgets:
        return None
    series = [
        Series(f"{si(one.flops)} FLOPs", one.fitted, style=i,
               markers=one.measured, note="" if one.inside else "lowest at an edge")
        for i, one in enumerate(found.budgets)
    ]  # fmt: skip
    read = found.allocation.read_between
    told = "Runs of one budget of compute, and the parabola through them." if not read else (
        "Losses at common budgets of compute, read between the runs of each size, and the parabola through them."
    )  # fmt: skip
    return _lines(series, "Parameters of the layers", "Loss of equal compute against parameters", "parameters", told)


def _lines(series: Sequence[Series], label: str, title: str, unit: str, told: str) -> Markup:
    x, y = Axis(label, "log", unit=unit), Axis("Loss, nats", decimals=3)
    narrow = line_chart(series, x, y, title, width=372, height=300, end_labels=False)
    return figure(two_sizes(line_chart(series, x, y, title), narrow), legend(series), caption(told))


def _exponents(laws: Sequence[ModelLaw], differences: Sequence[LawDifference]) -> Markup | None:
    """Returns the figure of the two exponents of every model with their intervals, and the differences."""
    if not laws:
        return None
    pieces: list[Markup] = []
    of = [{one.name: one for one in law.figures} for law in laws]
    pair = next((names for names in PAIRS if of[0].keys() >= set(names)), None)
    if pair is not None:
        dots = [
            Dot(law.model, x.value, y.value, style=i, x_range=_ends(x), y_range=_ends(y))
            for i, (law, figures) in enumerate(zip(laws, of, strict=True))
            for x, y in [[figures[name] for name in pair]]
        ]
        across, up = (Axis(f"{name}: {MEANING[name]}", decimals=3) for name in pair)
        title = "Exponents with their intervals"
        narrow = scatter_chart(dots, across, up, title, width=372, height=300, names=False)
        key = legend([Series(dot.label, (), style=dot.style) for dot in dots])
        pieces.append(figure(two_sizes(scatter_chart(dots, across, up, title), narrow), key))
    names = list(dict.fromkeys(one.name for law in laws for one in law.figures))
    rows = []
    for name in names:
        row = [name]
        for law in laws:
            one = next((one for one in law.figures if one.name == name), None)
            row.append("–" if one is None else f"{one.value:.4g} ({interval_words(one)})")
        rows.append(row)
    level = f"Intervals of {laws[0].level:.0%}: bootstrap over runs."
    pieces.append(figure(_table("Fitted parameters", ("figure", *(law.model for law in laws)), rows), caption(level)))
    pieces += [_differences("figure", {one.name: one for one in found.figures}, found, 3) for found in differences]
    return join(pieces)


def _best(laws: Sequence[ModelLaw], differences: Sequence[LawDifference]) -> Markup | None:
    rows = [
        (law.model, f"{si(one.flops)}", si(one.params), si(one.tokens), f"{one.ratio:.1f}",
         f"{one.loss:.4f} ({one.low:.4f} to {one.high:.4f})")
        for law in laws for one in law.optimal
    ]  # fmt: skip
    if not rows:
        return None
    heads = ("model", "FLOPs, 6 N D", "parameters", "tokens", "tokens a parameter", "loss")
    pieces = [figure(_table("The best use of compute by each law", heads, rows),
                     caption("N and D of the lowest loss that the law gives with so much compute."))]  # fmt: skip
    pieces += [
        _differences("FLOPs", {si(one.flops): one for one in found.losses}, found, 4)
        for found in differences
        if found.losses
    ]
    return join(pieces)


def _differences(head: str, gaps: Mapping[str, FigureGap | LossGap], pair: LawDifference, digits: int) -> Markup:
    """Returns the figure of the differences between two models' scaling laws, with intervals, around zero."""
    domain = interval_domain(v for one in gaps.values() for v in (one.low, one.high, one.difference))
    rows = []
    for name, one in gaps.items():
        decided = one.shown
        words = f"{name}: {_signed(one, digits)}"
        cells = (
            cell(interval_row(one.difference, one.low, one.high, domain, words, decided), class_="plot"),
            cell(_signed(one, digits), class_="figures"),
            cell("shown" if decided else "not shown", class_="decided" if decided else "undecided"),
        )
        rows.append(tag("tr", tag("th", name, scope="row"), *cells))
    columns = {head: None, f"{pair.b} minus {pair.a}": "plot", "Difference": "figures", "": None}
    heads = [tag("th", word, scope="col", class_=kind) for word, kind in columns.items()]
    foot = tag("tfoot", tag("tr", tag("td"), tag("td", interval_axis(domain), class_="plot"), tag("td"), tag("td")))
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows), foot, class_="verdicts")
    told = f"{pair.b} minus {pair.a}, each interval for itself. Runs of one size and budget are drawn together."
    return figure(scroll(f"What differs between {pair.a} and {pair.b}", table), caption(told))


def _held_out(laws: Sequence[ModelLaw]) -> Markup | None:
    rows = []
    for law in laws:
        for formula, out in ((law.formula, law.held_out), *_beside(law)):
            if isinstance(out, Unfitted):
                rows.append((law.model, formula, "–", "–", out.why))
                continue
            said = f"{out.error:+.2%} ({out.error_low:+.2%} to {out.error_high:+.2%})"
            rows.append((law.model, formula, f"{out.predicted:.4f} ({out.low:.4f} to {out.high:.4f})",
                         f"{out.measured:.4f}", said))  # fmt: skip
    first = next((law.held_out for law in laws if isinstance(law.held_out, HeldOut)), None)
    told = "The interval is that in which one run is to be expected."
    if first is not None:
        told += (
            f" The largest run has {si(first.params)} parameters and {si(first.tokens)} tokens, {first.reach:.1f} "
            "times the compute of the largest of the others."
        )
    heads = ("model", "law", "predicted", "measured", "error")
    return figure(_table("The largest run, predicted from the others", heads, rows), caption(told)) if rows else None


def _beside(law: ModelLaw) -> list[tuple[str, HeldOut | Unfitted]]:
    beside = law.beside
    if beside is None:
        return []
    return [("another form", beside) if isinstance(beside, Unfitted) else (beside.formula, beside.held_out)]


def _runs(runs: Sequence[CellRun]) -> Markup:
    rows = [
        (f"{run.model}@{run.size}", count(run.params), count(run.tokens), si(run.flops),
         si(6 * run.params * run.tokens), str(run.seed),
         f"{run.loss:.4f}" if run.loss is not None else f"{run.status}: {run.error}; left out")
        for run in sorted(runs, key=lambda run: (run.model, run.params, run.tokens, run.seed))
    ]  # fmt: skip
    heads = ("run", "parameters of the layers", "tokens", "FLOPs", "6 N D", "seed", "loss")
    return figure(_table("Runs", heads, rows))


def interval_words(one: LawFigure) -> str:
    """Formats the interval of a scaling law's parameter, with its remark."""
    return f"{one.low:.4g} to {one.high:.4g}" + (f"; {one.remark}" if one.remark else "")


def _ends(one: LawFigure) -> tuple[float, float]:
    return one.low, one.high


def _formula(found: LawsRecord) -> str:
    return next((law.formula for law in found.fitted), found.form)


def _signed(one: FigureGap | LossGap, digits: int) -> str:
    return f"{one.difference:+.{digits}f} ({one.low:+.{digits}f} to {one.high:+.{digits}f})"


def _and(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def _predictions(found: LawRecord) -> Markup | None:
    rows = [
        (f"{si(one.params)} parameters, {si(one.tokens)} tokens", f"{one.loss:.4f}",
         f"{one.low:.4f} to {one.high:.4f}")
        for one in found.predicted
    ]  # fmt: skip
    rows += [
        (f"the best with {si(one.flops)} FLOPs: {si(one.params)} parameters, {si(one.tokens)} tokens "
         f"({one.ratio:.1f} a parameter)", f"{one.loss:.4f}", "")
        for one in found.optimal
    ]  # fmt: skip
    if not rows:
        return None
    told = "Intervals are of the law; a run scatters around it by the noise of its seed."
    return figure(_table("Predictions", ("of", "loss", "interval"), rows), caption(told))


def _allocation(found: LawRecord) -> Markup | None:
    fitted = next((one for one in found.figures if one.name == "a"), None)
    rows = []
    if fitted is not None:
        rows.append(("the fitted law", f"{fitted.value:.3f}", f"{fitted.low:.3f} to {fitted.high:.3f}"))
    ways = {
        "a parabola through each budget": found.allocation.parabolas,
        "the lowest loss of each budget": found.allocation.lowest,
    }
    for told, one in ways.items():
        read = ("–", one.why) if isinstance(one, Unfitted) else (f"{one.a:.3f}", plural(one.optima, "budget"))
        rows.append((told, *read))
    return figure(
        _table("Exponents of the compute-optimal size", ("read from", "a of N ~ C^a", ""), rows),
        caption("A parabola is biased where the best size is not in the middle of those tried."),
    )


def _table(label: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    head = tag("thead", tag("tr", *(tag("th", word, scope="col") for word in headings)))
    body = tag("tbody", *(tag("tr", tag("th", row[0], scope="row"), *map(cell, row[1:])) for row in rows))
    return scroll(label, tag("table", head, body))


def _is(value: int) -> str:
    return "is" if value == 1 else "are"
