"""Page of a comparison or of one run: title, finding and sections in order; written atomically."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from ..figures import Markup, copyable, count, join, si, tag, write_document
from ..runs.arms import PARAMETERS, Arm, arms_of
from ..runs.results import VERSION, Budget, Data, Results, RunResult
from ..thresholds import WORTH_SAYING
from .configs import config_section
from .curves import curve_section, extrapolation_section, rate_section
from .dynamics import dynamics_section
from .facts import answer_section, cost_section, course_section, facts_section, plain, sample_section
from .finding import sentence
from .html import Absent, framed, section
from .summary import summary
from .tuning import tuning_section
from .verdicts import verdict_section

_CONTENTS = {
    "summary": "Summary", "verdicts": "Verdicts", "tuning": "Learning rates", "curves": "Loss",
    "rates": "Learning rate", "dynamics": "Dynamics", "contexts": "Contexts",
    "configs": "Architecture", "samples": "Samples", "answers": "Answers", "cost": "Speed and quality",
    "setup": "Setup", "absent": "Not shown",
}  # fmt: skip
NAMED = 6
"""Largest number of missing runs that a notice names"""


def write_report(results: Results, path: str | os.PathLike[str]) -> Path:
    """Writes the page of a comparison to `path` atomically, so that a reader finds the old page or the complete new
    one; returns the path."""
    return write_document(render(results), path)


def write_run(run: RunResult, path: str | os.PathLike[str]) -> Path:
    """Writes the page of one run to `path` atomically; returns the path."""
    return write_document(render_run(run), path)


def render(results: Results) -> str:
    """Returns the page of a comparison as HTML text. Missing values leave gaps with a reason; strings are never treated
    as markup."""
    arms = arms_of(results.paced)
    pending = _pending(results, arms)
    made = {
        "summary": summary(results, arms),
        "verdicts": verdict_section(results.verdicts, arms, results.again.get("seeds", "--seeds 3"), pending),
        "tuning": tuning_section(results, arms, results.again.get("tune", "--tune")),
        "curves": curve_section(arms),
        "rates": rate_section(arms),
        "dynamics": dynamics_section(arms, results.again.get("watch", "--watch")),
        "contexts": extrapolation_section(results, arms),
        "configs": config_section(arms),
        "samples": sample_section(arms),
        **answer_section(arms),
        "cost": cost_section(arms),
        "setup": facts_section(results),
    }
    header = _header(results, arms, sentence(results, arms))
    return _document(_title(results, arms), header, made, results.to_dict())


def render_run(run: RunResult) -> str:
    """Returns the page of one run as HTML text: losses, learning rate, training dynamics, samples, and wiring."""
    arms = arms_of([run])
    found: Markup | str = sentence(Results(version=VERSION, data=Data({}), budget=Budget(), runs=[run]), arms)
    if run.status == "stopped" and run.error:
        found = f"{run.error}."
    header = tag(
        "header", tag("p", "Glassformer run", class_="kicker"), tag("h1", run.name), tag("p", found, class_="finding")
    )
    made = {
        "curves": curve_section(arms), "rates": rate_section(arms), "dynamics": dynamics_section(arms, "--watch"),
        "samples": course_section(run), **answer_section(arms), "configs": config_section(arms),
    }  # fmt: skip
    return _document(run.name, header, made, {"runs": [run.to_dict()]})


def _document(title: str, header: Markup, made: dict[str, Markup | Absent], results: dict) -> str:
    """Returns a page as HTML text: header, table of contents and sections; absent ones are listed at the end."""
    there = {key: part for key, part in made.items() if not isinstance(part, Absent)}
    absent = [part for part in made.values() if isinstance(part, Absent)]
    if absent:
        there["absent"] = _absent(absent)
    contents = {key: (_CONTENTS[key], part) for key, part in there.items()}
    return framed(title, header, contents, plain(results), "results", "results")


def _absent(parts: Sequence[Absent]) -> Markup:
    """Returns the page's list of missing sections: the reasons, and the commands that would fill them."""
    items = [
        tag("li", tag("b", f"{part.title}: "), part.reason, copyable(part.command) if part.command else None)
        for part in parts
    ]
    return section("absent", "Not shown", tag("ul", *items, class_="absent"))


def _title(results: Results, arms: Sequence[Arm]) -> str:
    """Returns the given title; without one, a title made of the data and the names of the arms, missing ones included,
    or from three arms on their number."""
    if results.title and results.title.strip():
        return results.title
    data = results.data.name
    where = f" on {data}" if data else ""
    names = list(dict.fromkeys([*(arm.name for arm in arms), *(name for name, _ in _asked(results))]))
    if not names:
        return f"A comparison{where}"
    return (" and ".join(names) if len(names) < 3 else f"{len(names)} language models compared") + where


def _header(results: Results, arms: Sequence[Arm], finding: Markup) -> Markup:
    """Returns the top of the page: title, finding, notices, and the conditions of the comparison in one line."""
    return tag(
        "header",
        tag("p", "Glassformer comparison", _when(results), class_="kicker"),
        tag("h1", _title(results, arms)),
        tag("p", finding, class_="finding"),
        _progress_notice(results, arms),
        _seed_notice(results, arms),
        _terms(results, arms),
    )


def _when(results: Results) -> Markup | None:
    """Returns the date and time at which the comparison was made, as HTML; None if they were not recorded."""
    created = results.created
    if not created:
        return None
    try:
        moment = datetime.fromisoformat(created)
        words = f"{moment.day} {moment:%B %Y, %H:%M}"
    except ValueError:
        words = created
    return join([" · ", tag("time", words, datetime=created)])


def _asked(results: Results) -> list[tuple[str, str]]:
    """Returns (name of the arm, seed as text) of each requested run."""
    return [(name, str(seed)) for name, seed in results.asked]


def _missing(results: Results, arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """Returns (name of the arm, seed as text) of each requested run that has not ended."""
    there = {(arm.name, str(run.seed)) for arm in arms for run in arm.runs}
    return [one for one in _asked(results) if one not in there]


def _pending(results: Results, arms: Sequence[Arm]) -> str:
    """Returns the reason why verdicts are missing: runs are still to come, or the comparison is a pilot; "" for
    neither."""
    if _missing(results, arms):
        return "given once all runs have ended: seen after each, they would invite a stop at a lucky moment."
    if results.power is not None:
        many = results.power.seeds or "more seeds than can be run"
        return f"these runs are a pilot, which shows none; seeds of a comparison that it plans: {many}."
    return ""


def _progress_notice(results: Results, arms: Sequence[Arm]) -> Markup | None:
    """Returns a notice with the number of runs that ended and the names of missing ones; None if all have ended."""
    asked, missing = _asked(results), _missing(results, arms)
    if not missing:
        return None
    several = len({seed for _, seed in asked}) > 1
    names = [f"{name} seed {seed}" if several else name for name, seed in missing[:NAMED]]
    more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
    return tag(
        "p",
        tag("strong", f"{len(asked) - len(missing)} of {len(asked)} runs so far. "),
        f"Everything below covers only these and may change. Still to come: {', '.join(names)}{more}.",
        class_="notice",
        role="note",
    )


def _seed_notice(results: Results, arms: Sequence[Arm]) -> Markup | None:
    """Returns a notice that one seed does not measure chance, if some arm has one seed and no further seed is to come;
    else None."""
    alone = [arm for arm in arms if len(arm.runs) < 2]
    if not alone:
        return None
    if any(arm.name == name for arm in alone for name, _ in _missing(results, arms)):
        return None  # more seeds will follow
    who = "every arm was" if len(alone) == len(arms) else f"{', '.join(arm.name for arm in alone)} was"
    return tag(
        "p",
        tag("strong", "One seed proves nothing. "),
        f"Here {who} trained once, and another seed can change a loss by as much as the arms differ. "
        "Three seeds give intervals and verdicts:",
        copyable(results.again.get("seeds", "--seeds 3"), "The command with three seeds"),
        class_="notice",
        role="note",
    )


def _terms(results: Results, arms: Sequence[Arm]) -> Markup:
    """Returns the line of conditions of the comparison: matched quantity, seeds, parameters, data, machine."""
    counts = sorted({len(arm.runs) for arm in arms})
    parameters = sorted(p for arm in arms if (p := arm.mean(PARAMETERS)) is not None)
    size = dict.fromkeys(count(p) for p in (parameters[:1] + parameters[-1:]))
    device = filter(None, (results.machine.processor, results.machine.device, results.machine.dtype))
    facts = [
        _matched(results),
        ("Seeds per arm", " to ".join(str(n) for n in (counts[:1] + counts[1:][-1:]))),
        ("Parameters", " to ".join(size)),
        ("Data", results.data.name),
        ("Machine", ", ".join(device)),
    ]
    shown = [tag("div", tag("dt", name), tag("dd", words)) for name, words in facts if words]
    return tag("dl", *shown, class_="terms") if shown else Markup("")


def _matched(results: Results) -> tuple[str, str]:
    """Returns (label, text) on the quantity that all arms have in equal amount, such as tokens: its amount per arm, or
    its range over arms if the amounts spent differ."""
    budget = results.budget
    match, amounts = budget.match, {"tokens": budget.tokens, "flops": budget.flops, "minutes": budget.minutes}
    amount = amounts.get(match or "")
    unit = {"flops": "FLOPs"}.get(match or "", match)
    spent = [value for value in budget.spent.values() if value]
    if spent and max(spent) > (1 + WORTH_SAYING) * min(spent) > 0:
        return "Roughly matched", f"{si(min(spent))} to {si(max(spent))} {unit} per arm"
    if match == "minutes" and amount == 1:
        unit = "minute"
    return "Matched", f"{si(amount)} {unit} per arm" if amount is not None else unit if unit else ""
