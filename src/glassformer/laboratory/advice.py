"""The decision guide: options with their costs, the measured claims that support them, and the model composed of the
choices. Only stored results decide; the rules are data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rich.text import Text

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.figures.plain import plain
from glassformer.figures.terminal import Tabular, dim, ruled, size, unbroken
from glassformer.laboratory.composed import AdvisedModel, PlannedSize, compose
from glassformer.laboratory.evidence import known
from glassformer.laboratory.evidence.figure import FAILS, HOLDS, OPEN, Verdict
from glassformer.laboratory.evidence.stored import MEASURED, Stored, read
from glassformer.naming.models import changed, trial
from glassformer.naming.resolve import ModelLike, resolve
from glassformer.parts.core.heads import nearest_groups
from glassformer.typed import typed
from glassformer.units import count, quantity

Goal = Literal["chat", "long", "train", "fast", "simple", "balanced"]
About = Literal["loss", "parity", "speed", "memory", "length", "stability"]
"""Quantity that a claim speaks about. loss: a lower one; parity: an equal or lower loss; length: texts longer than
those of training."""
COUNTS: dict[Goal, tuple[About, ...]] = {
    "chat": ("memory", "speed", "loss", "parity"),
    "long": ("length", "memory", "loss", "parity"),
    "train": ("loss", "parity", "speed", "stability"),
    "fast": ("speed", "memory"),
    "simple": ("loss", "stability"),
    "balanced": ("loss", "parity", "speed", "memory", "length", "stability"),
}
"""Goal -> quantities that matter for it; claims about other quantities do not count."""
EVERY: tuple[Goal, Goal, Goal] = ("fast", "simple", "balanced")
MODEL = "llama-3-8b"


@dataclass(frozen=True)
class Rule:
    """Rule of evidence: if `claim`, a published sentence, has the measured `verdict`, it supports `option`, as to the
    quantity `about`."""

    claim: str
    verdict: Verdict
    option: str
    about: About


@dataclass(frozen=True)
class Question:
    """Question of the decision guide with its options, the simplest first: name -> change of the model's expression, in
    which {quarter} means a quarter of the model's heads."""

    asks: str
    goals: tuple[Goal, ...]
    options: Mapping[str, str]
    rules: tuple[Rule, ...]


QUESTIONS = (
    Question(
        "How many KV heads?",
        ("chat", "long", *EVERY),
        {"one for each": "+mha", "a quarter of the heads": "+gqa:{quarter}", "one for all": "+mqa"},
        (
            Rule("gqa-cache", HOLDS, "a quarter of the heads", "memory"),
            Rule("gqa-cache", HOLDS, "one for all", "memory"),
            Rule("shared-keys-cost-little", HOLDS, "one for all", "parity"),
            Rule("shared-keys-cost-little", FAILS, "one for each", "parity"),
            Rule("multi-query-decodes-faster", HOLDS, "one for all", "speed"),
        ),
    ),
    Question(
        "Does every token see all before it, or a window?",
        ("chat", "long", "fast", "balanced"),
        {"all": "+causal", "4,096": "+window:4096"},
        (
            Rule("window-cache", HOLDS, "4,096", "memory"),
            Rule("window-costs-little", HOLDS, "4,096", "parity"),
            Rule("window-costs-little", FAILS, "all", "parity"),
            Rule("window-is-faster", HOLDS, "4,096", "speed"),
        ),
    ),
    Question(
        "Which positions?",
        ("long", "train", *EVERY),
        {"learned": "+learned", "sinusoidal": "+sinusoidal", "rotary": "+rope", "ALiBi": "+alibi", "none": "+nope"},
        (
            Rule("alibi-extrapolates", HOLDS, "ALiBi", "length"),
            Rule("rope-extrapolates", HOLDS, "rotary", "length"),
            Rule("nope-extrapolates", HOLDS, "none", "length"),
            Rule("positions-order", HOLDS, "ALiBi", "length"),
            Rule("rotary-costs-little", HOLDS, "rotary", "speed"),
        ),
    ),
    Question(
        "Which network?",
        ("train", *EVERY),
        {"ReLU": "+relu", "GELU": "+gelu", "SwiGLU": "+swiglu", "8 experts, 2 for each token": "+moe:8:2"},
        (
            Rule("gelu-beats-relu", HOLDS, "GELU", "loss"),
            Rule("gelu-beats-relu", FAILS, "ReLU", "loss"),
            Rule("swiglu-beats-gelu", HOLDS, "SwiGLU", "loss"),
            Rule("swiglu-beats-gelu", FAILS, "GELU", "loss"),
            Rule("experts-beat-dense", HOLDS, "8 experts, 2 for each token", "loss"),
        ),
    ),
    Question(
        "Which norm?",
        ("train", *EVERY),
        {"RMSNorm": "+rmsnorm", "LayerNorm": "+layernorm"},
        (
            Rule("rmsnorm-loses-nothing", HOLDS, "RMSNorm", "parity"),
            Rule("rmsnorm-is-faster", HOLDS, "RMSNorm", "speed"),
            Rule("rmsnorm-loses-nothing", FAILS, "LayerNorm", "parity"),
        ),
    ),
    Question(
        "Softmax attention, or linear attention with a state of fixed size?",
        ("long", "fast", "balanced"),
        {"softmax": "+causal", "linear": "+linear_attention"},
        (
            Rule("linear-attention-state", HOLDS, "linear", "memory"),
            Rule("linear-attention-costs-loss", HOLDS, "softmax", "loss"),
            Rule("linear-attention-costs-loss", FAILS, "linear", "loss"),
        ),
    ),
    Question(
        "Attention and network one after the other, or side by side?",
        ("train", *EVERY),
        {"one after the other": "+pre", "side by side": "+parallel"},
        (
            Rule("parallel-loses-nothing", HOLDS, "side by side", "parity"),
            Rule("parallel-loses-nothing", FAILS, "one after the other", "parity"),
        ),
    ),
    Question(
        "Biases in the linear maps?",
        ("train", *EVERY),
        {"without": "+nobias", "with": "+bias"},
        (
            Rule("biases-can-go", HOLDS, "without", "parity"),
            Rule("biases-can-go", FAILS, "with", "parity"),
        ),
    ),
    Question(
        "Norms before the branches, or after the addition?",
        ("train", *EVERY),
        {"before": "+pre", "after": "+post"},
        (
            Rule("post-norm-needs-warmup", HOLDS, "before", "stability"),
            Rule("pre-norm-needs-no-warmup", HOLDS, "before", "stability"),
        ),
    ),
)
"""Questions of the guides' decision tree."""


@dataclass(frozen=True)
class AdviceOption:
    """An option of a question (a change of the model), its costs, and the claims whose verdicts support it."""

    name: str
    change: str
    """Change of the expression, with its leading "+"."""
    state_bytes: int
    weight_bytes: Mapping[str, int]
    """Bytes of the weights by dtype."""
    fits: tuple[str, ...]
    """dtypes of weights that fit the memory together with the decode state."""
    supported_by: tuple[str, ...]
    flops: float
    """Forward FLOPs per token."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the option as a dict of plain values, whose key `for` has the claims that support it."""
        told = plain(self)
        return told | {"for": told.pop("supported_by")}


@dataclass(frozen=True)
class ClaimEvidence:
    """Stored result of one claim, cited as evidence for an option."""

    claim: str
    statement: str
    verdict: Verdict
    words: str
    """The verdict with the model size at which it was measured."""
    sure: str
    measured: str
    """Date of the measurement."""
    processor: str | None
    link: str
    """Link to the file of the result."""


@dataclass(frozen=True)
class AdviceQuestion:
    """A question of the decision guide with its options, the evidence for them, and the measurements that would decide
    the open claims."""

    asks: str
    options: tuple[AdviceOption, ...]
    evidence: tuple[ClaimEvidence, ...]
    undecided: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the question as plain values."""
        return {**plain(self), "options": [one.to_dict() for one in self.options]}


@dataclass(frozen=True)
class Advice(Tabular):
    """Options for a goal, each with its costs and the measured claims that support it, and the claims still undecided.

    Attributes
    ----------
    goal : str
        "chat", "long", "train", "fast", "simple" or "balanced".
    context : int
        Tokens that the decode state holds.
    memory : float
        Bytes of memory.
    model : str
        The model that the options change.
    claims : str
        Folder of the stored results.
    questions : tuple of AdviceQuestion
        Questions of this goal.
    advised : AdvisedModel
        The model with the recommended options, its plan, and those options ranked by effect and cost.

    Examples
    --------
    >>> found = gf.advise("gpt2@1m", goal="balanced")
    >>> found.questions[0].options[2].change
    '+mqa'
    >>> found.advised.expression.startswith("gpt2@1m+")
    True
    """

    goal: Goal
    context: int
    memory: float
    model: str
    claims: str
    questions: tuple[AdviceQuestion, ...]
    advised: AdvisedModel

    def lines(self) -> Iterator[Any]:
        """Yields each question with its options, the evidence, and the undecided claims."""
        yield Text(f"{self.model}, {self.context:,} tokens, {size(self.memory)} of memory: {self.goal}", style="bold")
        evidence = unbroken(f"evidence: {self.claims}")
        evidence.stylize("dim")
        yield evidence
        for question in self.questions:
            yield Text(f"\n{question.asks}", style="bold")
            table = ruled()
            for heading in ("option", "change", "weights, bf16", "state", "fits with weights in", "what speaks for it"):
                table.add_column(heading)
            for one in question.options:
                weights, state, fits = size(one.weight_bytes["bfloat16"]), size(one.state_bytes), ", ".join(one.fits)
                supported = ", ".join(one.supported_by) or "nothing that is measured"
                table.add_row(one.name, one.change, weights, state, fits or "none", supported)
            yield table
            for held in question.evidence:
                of = f"{held.sure}; {held.measured}, {held.processor}"
                yield f"  {held.claim}: {held.statement} {held.words} ({of})"
            yield from (dim(f"  not known: {words}") for words in question.undecided)
        yield from self._end()

    def _end(self) -> Iterator[Any]:
        """Yields the last part of the text: the recommended model, its plan, and its options ranked by effect and
        cost."""
        made = self.advised
        yield Text("\nThe model for this goal", style="bold")
        yield unbroken(made.expression)
        table = ruled()
        for heading in ("", "parameters", "weights, bf16", "state", "FLOPs of a token", "fits with weights in"):
            table.add_column(heading)
        for name, one in (("as it is", made.before), ("as advised", made.after)):
            table.add_row(
                name, f"{one.parameters:,}", size(one.weight_bytes["bfloat16"]), size(one.state_bytes),
                f"{one.flops:.4g}", ", ".join(one.fits) or "none",
            )  # fmt: skip
        yield table
        yield from (dim(f"left out {change}: {why}") for change, why in made.left_out.items())
        ranked = ruled("Priorities, by measured effect, then by what they save against the simplest option")
        for heading in ("", "choice", "change", "loss", "weights", "state", "FLOPs", "fields", "here", "evidence"):
            ranked.add_column(heading, overflow="fold")
        for rank, of in enumerate(made.priorities, 1):
            shares = (share_words(of.loss), *map(share_words, (of.weights, of.state, of.flops)))
            here = "has it" if of.present else "to change"
            ranked.add_row(str(rank), of.option, of.change, *shares, str(of.fields), here, ", ".join(of.supported_by))
        yield ranked

    def to_dict(self) -> dict[str, Any]:
        return {**plain(self), "questions": [one.to_dict() for one in self.questions]}

    def records(self) -> list[dict[str, Any]]:
        """Returns a row for each option."""
        return [{"question": each.asks, **one.to_dict()} for each in self.questions for one in each.options]


@typed
def advise(
    model: ModelLike = MODEL,
    *,
    goal: Goal,
    context: int | str = 8192,
    memory: float | str = "16GB",
    claims: str | Path | None = None,
) -> Advice:
    """Returns options for a goal, each with its costs and the measured claims that support it, and a recommended model.

    An option is supported if a stored result has the verdict of one of its rules. The model takes the option with most
    of the claims that count for the goal, and keeps its own if none has more; for "simple", the simplest one if no
    claim counts.

    Parameters
    ----------
    model
        The model that the options change: an expression, a path, a config or a model.
    goal
        "chat": to answer from a cache; "long": to read texts longer than those of training; "train": to train from
        scratch; "fast": to compute and keep little; "simple": plain parts, unless a claim speaks for another;
        "balanced": all of it.
    context
        Tokens that the decode state holds, as 8192 or "8k".
    memory
        Memory of the machine, in bytes or as "16GB"; weights and the decode state have to fit.
    claims
        Folder of measured claims, as `claims` leaves it; by default those of the library.

    Returns
    -------
    Advice
        Questions with options, costs and evidence, and the recommended model.

    Raises
    ------
    RequestError
        For an unknown goal, a missing folder, and a model that an option does not fit.

    Examples
    --------
    >>> found = gf.advise("llama@1m", goal="chat", context="2k", memory="1GB")
    >>> found.questions[0].options[2].change
    '+mqa'
    """
    if goal not in get_args(Goal):
        raise RequestError(code="unknown", field="goal", value=goal, expected=f"one of {', '.join(get_args(Goal))}")
    tokens, room = count(context, "context"), quantity(memory, "B", "memory")
    if tokens < 1:
        raise RequestError(code="range", field="context", value=context, expected="at least 1 token")
    if not room > 0:
        raise RequestError(code="range", field="memory", value=memory, expected="a size such as 16GB")
    folder = MEASURED if claims is None else Path(claims)
    if not folder.is_dir():
        raise RequestError(
            f"--claims {folder} is not a folder; leave it out for the results of the library, or measure with "
            f"glassformer claims --out {folder}",
            code="missing", field="claims", value=str(folder), expected="a folder",
        )  # fmt: skip
    config = resolve(model)
    named = str(model) if isinstance(model, str | Path) else "this model"
    asked = [one for one in QUESTIONS if goal in one.goals]
    found = {rule.claim: read(folder, rule.claim) for one in asked for rule in one.rules}
    answers = [_answered(one, config, tokens, room, folder, found) for one in asked]
    chosen = {
        one.asks: (answer, option, _counting(one, option.name, goal, found))
        for one, answer in zip(asked, answers, strict=True)
        for option in [_chosen(one, answer, goal, found, config)]
        if option is not None
    }
    made = compose("MODEL" if named == "this model" else named, config, chosen, tokens, room)
    return Advice(goal, tokens, room, named, str(folder), tuple(answers), made)


def _counting(question: Question, option: str, goal: Goal, found: Mapping[str, Stored | None]) -> list[Stored]:
    """Returns the stored results of claims that support an option and concern a quantity that matters for the goal."""
    return [
        held for rule in question.rules
        if rule.option == option and rule.about in COUNTS[goal]
        and (held := found[rule.claim]) is not None and held.verdict == rule.verdict
    ]  # fmt: skip


def _chosen(
    question: Question, answer: AdviceQuestion, goal: Goal, found: Mapping[str, Stored | None], config: ModelConfig
) -> AdviceOption | None:
    """Returns the option with most results that count for the goal; of equal ones the model's own, or for the goal
    "fast" the one with the smallest state. If no result counts: None, or for the goal "simple" the simplest option."""
    votes = {one.name: len(_counting(question, one.name, goal, found)) for one in answer.options}
    most = max(votes.values())
    if most == 0:
        return answer.options[0] if goal == "simple" else None
    best = [one for one in answer.options if votes[one.name] == most]
    if goal == "fast":
        return min(best, key=lambda one: one.state_bytes)
    own = (one for one in best if changed(config, [one.change.removeprefix("+")]) == config)
    return next(own, best[0])


def share_words(value: float | None) -> str:
    """Formats a relative change in percent, as `-1.5%`; `not known` for None."""
    return "not known" if value is None else "same" if abs(value) < 5e-5 else f"{value:+.1%}"


def _answered(
    question: Question, config: ModelConfig, context: int, memory: float, folder: Path,
    stored: Mapping[str, Stored | None],
) -> AdviceQuestion:  # fmt: skip
    found = {rule.claim: stored[rule.claim] for rule in question.rules}
    options = []
    for name, change in question.options.items():
        supported = tuple(
            rule.claim for rule in question.rules
            if rule.option == name and (held := found[rule.claim]) and held.verdict == rule.verdict
        )  # fmt: skip
        change = change.format(quarter=_quarter(config)) if "{" in change else change
        options.append(_option(name, change, config, context, memory, supported))
    return AdviceQuestion(
        question.asks, tuple(options),
        tuple(_evidence(name, held, folder) for name, held in found.items() if held is not None),
        tuple(_missing(name, held) for name, held in found.items() if held is None or held.verdict == OPEN),
    )  # fmt: skip


def _quarter(config: ModelConfig) -> int:
    """Returns the divisor of the model's number of heads that is nearest to a quarter of that number."""
    mixer: Any = next(iter(changed(config, ["mha"]).layers())).mixer
    return nearest_groups(mixer.n_heads, 8, 2) or mixer.n_heads


def _option(
    name: str, change: str, config: ModelConfig, context: int, memory: float, supported: tuple[str, ...]
) -> AdviceOption:  # fmt: skip
    """Makes an option: the changed model's bytes of weights and state, and the dtypes of weights with which both fit
    `memory`."""
    with trial():
        figures = PlannedSize.of(changed(config, [change.removeprefix("+"), f"context={context}"]), context, memory)
    return AdviceOption(name, change, figures.state_bytes, figures.weight_bytes, figures.fits, supported, figures.flops)


def _evidence(name: str, held: Stored, folder: Path) -> ClaimEvidence:
    return ClaimEvidence(
        claim=name, statement=held.statement, verdict=held.verdict, words=held.words, sure=held.outcome.sure,
        measured=held.measured, processor=held.machine.get("processor"), link=str(folder / f"{name}.json"),
    )  # fmt: skip


def _missing(name: str, held: Stored | None) -> str:
    """Returns, as text, the reason why a claim has no verdict, and the measurement that would give one."""
    if held is None:
        claim = known()[name]
        return f"{claim.statement} Not measured: `glassformer claims {name}`, {claim.minutes:g} min."
    seeds = [figure.needed for figure in held.outcome.figures if figure.judged and figure.needed]
    more = f"about {max(seeds)} seeds would decide it" if seeds else "more seeds would not decide it"
    return f"{held.statement} Undecided here: {more}."
