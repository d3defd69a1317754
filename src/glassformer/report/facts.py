"""Sections on cost against quality, samples, and the facts needed to check or repeat the comparison."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..figures import Axis, Dot, Markup, Series, copyable, count, finite, fixed, join, legend, scatter_chart, si, tag
from ..runs.arms import BITS_PER_BYTE, LOSS, TRAINING_SPEED, Arm
from ..runs.diff import alike
from ..runs.results import Answers, Results, RunResult, Sample, unlike
from .html import Absent, arm_label, caption, scroll, section, two_sizes

_COST = "Speed against quality"
DRAWN_FROM = 3  # least number of arms of the chart
SHOWN = 16  # characters of a fingerprint; the embedded data has all of it
ANSWER = 300  # largest number of shown characters of a source or an answer
SAMPLE = 3000  # largest number of shown characters of a sample


def cost_section(arms: Sequence[Arm]) -> Markup | Absent:
    """Returns the section with a chart of training speed against quality; Absent with fewer than `DRAWN_FROM` arms, or
    if their speeds do not compare."""
    quality, named = BITS_PER_BYTE, "bits per byte"
    if not any(arm.stat(quality) for arm in arms):  # because the tokenizer loses part of the text
        quality, named = LOSS, "nats per token"
    if why := unlike([run for arm in arms for run in arm.counted]):
        return Absent(_COST, f"{why}, so their speeds do not compare.")
    dots = []
    for arm in arms:
        x, y = arm.stat(TRAINING_SPEED), arm.stat(quality)
        if x and y and arm.finished:
            title = f"{arm.name}: {count(x.mean)} tokens/s, {fixed(y.mean)} {named}"
            dots.append(Dot(arm.name, x.mean, y.mean, arm.index, x.range, y.range, title))
    if len(dots) < DRAWN_FROM:
        words = "where an arm has both, the summary says all" if len(dots) < 2 else "the summary holds these two points"
        return Absent(_COST, f"drawn from three arms on; {words}.")
    left_out = [arm.name for arm in arms if arm.name not in {dot.label for dot in dots}]
    axes = Axis("Training tokens per second"), Axis(f"Validation, {named}")
    title = f"{named.capitalize()} against training speed. " + "; ".join(dot.title for dot in dots)
    hint = "faster, lower loss ↘"
    wide = scatter_chart(dots, *axes, title, width=860, height=380, hint=hint)
    narrow = scatter_chart(dots, *axes, title, width=372, height=300, hint=hint, names=False)
    key = legend([Series(dot.label, [], dot.style) for dot in dots])
    words = "Whiskers span the seeds." if any(dot.x_range for dot in dots) else ""
    if left_out:
        words += f" Not drawn, because speed or quality is missing: {', '.join(left_out)}."
    return section("cost", _COST, tag(
        "figure", tag("div", key, class_="narrow"), two_sizes(wide, narrow), caption(words) if words else None,
        class_="cost",
    ))  # fmt: skip


def sample_section(arms: Sequence[Arm]) -> Markup | Absent:
    """Returns the section with the text that each arm generated, its prompt underlined; Absent without any."""
    cards = [_sample(arm) for arm in arms]
    if not any(_generated(arm) for arm in arms):
        return Absent("Samples", "no text was generated.")
    return section("samples", "Samples", tag("div", *cards, class_="samples"), caption(
        "The prompt is underlined, the rest was generated. One sample shows how a model writes, not how well."
    ))  # fmt: skip


def answer_section(arms: Sequence[Arm]) -> dict[str, Markup]:
    """Returns {"answers": section} on the answers of each arm's first run to held-out sources: the share of correct
    answers, a table of classes, and examples; {} if no first run has answers."""
    found = [(arm, run.answers) for arm in arms for run in arm.runs[:1] if run.answers is not None]
    if not found:
        return {}
    parts = (part for arm, one in found for part in _answers(arm, one))
    return {"answers": section("answers", "Answers", *parts)}


def _answers(arm: Arm, found: Answers) -> Iterator[Markup]:
    yield tag("h3", arm_label(arm))
    yield tag("p", f"{found.words}.")
    if found.labels:
        shares = [row[i] / max(1, sum(row)) for i, row in enumerate(found.confusion)]
        heads = ["right class", *(f"given {name}" for name in found.labels), "right"]
        rows = [
            tag("tr", tag("th", name), *(tag("td", f"{n:,}") for n in row), tag("td", f"{share:.1%}"))
            for name, row, share in zip(found.labels, found.confusion, shares, strict=True)
        ]
        yield _listed("Classes", heads, rows)
        yield caption("Held-out texts by the class they have (rows) and the class they were given (columns).")
    heads = ["text" if found.labels else "source", "right", "given"]
    rows = [tag("tr", *(tag("td", cell[:ANSWER]) for cell in one)) for one in found.samples]
    yield _listed("Examples", heads, rows)


def _listed(title: str, names: Sequence[str], rows: Sequence[Markup]) -> Markup:
    heads = tag("tr", *(tag("th", name) for name in names))
    return scroll(title, tag("table", tag("thead", heads), tag("tbody", *rows)))


def _generated(arm: Arm) -> Sample | None:
    made = (run.generation.sample for run in arm.runs if run.generation)
    return next(made, None)


def course_section(run: RunResult) -> Markup | Absent:
    """Returns the section with the texts that a run generated during training and after it; Absent without any."""
    last = run.generation.sample if run.generation else None
    if not run.written and last is None:
        return Absent("Samples", "no text was generated.")
    at = [(f"step {one.step:,}, {si(one.tokens)} tokens", one.prompt, one.text) for one in run.written]
    at += [] if last is None else [("the trained model", last.prompt, last.text)]
    cards = [tag("div", tag("h3", title), _text(title, prompt, text)) for title, prompt, text in at]
    return section("samples", "Samples", tag("div", *cards, class_="samples"), caption(
        "How the text of the model changes as it learns, after the same prompt, which is underlined. One sample shows "
        "how a model writes, not how well."
    ))  # fmt: skip


def _sample(arm: Arm) -> Markup:
    sample = _generated(arm)
    if not sample:
        body = tag("p", f"No sample: {arm.trouble or 'none was generated'}.", class_="gf-empty")
    else:
        body = _text(f"Sample of {arm.name}", sample.prompt, sample.text)
    return tag("div", tag("h3", arm_label(arm)), body)


def _text(label: str, prompt: str, text: str) -> Markup:
    """Returns a text with its prompt underlined, cut after `SAMPLE` characters; `label` is for screen readers."""
    if prompt and text.startswith(prompt):
        text = text[len(prompt) :]
    more = tag("span", f" … {len(text) - SAMPLE} more characters", class_="same") if len(text) > SAMPLE else None
    first = tag("span", prompt, class_="prompt") if prompt else None
    return tag("pre", first, text[:SAMPLE], more, tabindex="0", aria_label=label)


# --- Data, budget, machine, command ---

_NAMES = {
    "cores": "CPU cores", "dtype": "dtype", "torch": "PyTorch", "python": "Python", "flops": "FLOPs",
    "flops_per_token": "FLOPs per token", "match": "Matched on", "memory_bytes": "Memory", "bytes": "Text",
    "train_bytes": "Training text", "validation_bytes": "Held-out text", "train_tokens": "Training tokens",
    "validation_tokens": "Tokens held out", "vocab_size": "Vocabulary", "split_seed": "Seed of the split",
    "spent": "Spent, by arm", "cores_of_others": "Cores used by other programs", "learning_rates": "Learning rate",
}  # fmt: skip


def facts_section(results: Results) -> Markup:
    """Returns the section with all recorded fields of data, budget and machine, the notes on fairness, and the command
    that repeats the comparison."""
    budget = results.budget.model_dump(exclude_unset=True)
    notes = [restyled(note) for note in budget.pop("notes", [])]
    columns = [
        _facts("Data", results.data.root),
        _facts("Budget", budget),
        _facts("Machine and versions", results.machine.root),
    ]
    fairness = [tag("h3", "Fairness"), tag("ul", *(tag("li", note) for note in notes))] if notes else []
    return section(
        "setup",
        "Data, budget and machine",
        tag("div", *columns, class_="facts"),
        *fairness,
        _command(results),
    )


def _facts(title: str, facts: dict) -> Markup:
    """Returns a titled list of recorded names and values, without missing values."""
    known = [(key, value) for key, value in facts.items() if value is not None]
    rows = [tag("div", tag("dt", _words(key)), tag("dd", _value(str(key), value))) for key, value in known]
    return tag("div", tag("h3", title), tag("dl", *rows) if rows else tag("p", "Not recorded.", class_="gf-empty"))


def _words(key: object) -> str:
    """Returns the label in plain words of a key of results.json."""
    name = str(key)
    plain = name.removesuffix("_bytes").replace("_", " ")
    return _NAMES.get(name) or plain[:1].upper() + plain[1:]


def _value(key: str, value: Any) -> Markup:
    """Formats a recorded value of any JSON type by its key: yes or no, items, a number, a shortened fingerprint,
    text."""
    if isinstance(value, bool):
        return join(["yes" if value else "no"])
    if isinstance(value, dict) and len(value) > 1 and alike(list(value.values())):
        return join([_value(key, next(iter(value.values()))), " for every arm"])
    if isinstance(value, dict):
        return join((tag("span", f"{k}: ", _value(str(k), v), class_="item") for k, v in value.items()), " ")
    if isinstance(value, list | tuple):
        return join((_value(key, v) for v in value), ", ")
    if isinstance(value, int | float):
        return join([_number(key, value)])
    if key.endswith("fingerprint") and isinstance(value, str) and len(value) > SHOWN:
        return tag("code", f"{value[:SHOWN]}…")
    return join(["–" if value is None or value == "" else str(value)])


def _number(key: str, value: int | float) -> str:
    """Formats a number by its key: bytes with their unit, whole numbers as counts, other values with three figures."""
    real = finite(value)
    if real is None:
        return "–"
    if key == "bytes" or key.endswith("_bytes"):
        words = si(real)
        number, suffix = (words[:-1], words[-1]) if words[-1:].isalpha() else (words, "")
        return f"{number} {suffix.replace('B', 'G')}B"
    if "seed" in key:  # a name, not a count
        return str(value)
    return count(real) if math.isclose(real, round(real)) else si(real)


def restyled(words: str) -> str:
    """Returns a note with its numbers in the format of the page: 49,152 becomes 49.2k, and 15% becomes 15 %."""
    words = re.sub(r"(?<=\d)%", " %", words)
    return re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d.,]*\d)", lambda found: _plain_count(found.group()), words)


def _plain_count(digits: str) -> str:
    return count(int(digits.replace(",", "")))


def _command(results: Results) -> Markup:
    """Returns the HTML of the command that repeats the comparison, and of a link that saves its results.json."""
    command = results.command
    line = (
        tag("div", copyable(command), class_="command")
        if command
        else tag("p", "The command was not recorded.", class_="gf-empty")
    )
    download = tag(
        "a",
        "Download results.json",
        href="#results",
        download="results.json",
        data_download="results",
        hidden=True,
        class_="download",
    )
    inside = tag(
        "p",
        "All of the data behind this page is inside it, as ",
        tag("code", "script#results"),
        ". ",
        download,
    )
    return join([tag("h3", "To repeat this"), line, inside])


def plain(value: Any) -> Any:
    """Returns the value as strict JSON data: a number that is not finite becomes None, other objects become text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)
