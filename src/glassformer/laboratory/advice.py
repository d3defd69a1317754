"""The decision guide: options with their costs, and what measured claims say of them. Nothing is advised that no stored
result has decided; the rules are data."""

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
from glassformer.laboratory.evidence import known
from glassformer.laboratory.evidence.figure import FAILS, HOLDS, OPEN, Verdict
from glassformer.laboratory.evidence.stored import MEASURED, Stored, read
from glassformer.naming.models import changed
from glassformer.naming.resolve import ModelLike, resolve
from glassformer.parts.core.heads import nearest_groups
from glassformer.planning import SPARE, WEIGHTS, plan
from glassformer.typed import typed
from glassformer.units import count, quantity

Goal = Literal["chat", "long", "train"]
"""To answer from a cache; to read texts longer than those of training; to train from scratch."""
MODEL = "llama-3-8b"


@dataclass(frozen=True)
class Rule:
    """Where a claim has this verdict, it speaks for an option."""

    claim: str
    verdict: Verdict
    option: str


@dataclass(frozen=True)
class Question:
    """What has to be chosen. An option is a change of a model's expression, in which {quarter} stands for a quarter of
    its heads."""

    asks: str
    goals: tuple[Goal, ...]
    options: Mapping[str, str]
    rules: tuple[Rule, ...]


QUESTIONS = (
    Question(
        "How many KV heads?",
        ("chat", "long"),
        {"one for each": "+mha", "a quarter of the heads": "+gqa:{quarter}", "one for all": "+mqa"},
        (
            Rule("gqa-cache", HOLDS, "a quarter of the heads"),
            Rule("gqa-cache", HOLDS, "one for all"),
            Rule("shared-keys-cost-little", HOLDS, "one for all"),
            Rule("shared-keys-cost-little", FAILS, "one for each"),
            Rule("multi-query-decodes-faster", HOLDS, "one for all"),
        ),
    ),
    Question(
        "Does every token see all before it, or a window?",
        ("chat", "long"),
        {"all": "+causal", "4,096": "+window:4096"},
        (
            Rule("window-cache", HOLDS, "4,096"),
            Rule("window-costs-little", HOLDS, "4,096"),
            Rule("window-costs-little", FAILS, "all"),
            Rule("window-is-faster", HOLDS, "4,096"),
        ),
    ),
    Question(
        "Which positions?",
        ("long", "train"),
        {"rotary": "+rope", "ALiBi": "+alibi", "none": "+nope"},
        (
            Rule("alibi-extrapolates", HOLDS, "ALiBi"),
            Rule("rope-extrapolates", HOLDS, "rotary"),
            Rule("nope-extrapolates", HOLDS, "none"),
            Rule("rotary-costs-little", HOLDS, "rotary"),
        ),
    ),
    Question(
        "Which network?",
        ("train",),
        {"ReLU": "+relu", "GELU": "+gelu", "SwiGLU": "+swiglu", "8 experts, 2 for each token": "+moe:8:2"},
        (
            Rule("gelu-beats-relu", HOLDS, "GELU"),
            Rule("gelu-beats-relu", FAILS, "ReLU"),
            Rule("swiglu-beats-gelu", HOLDS, "SwiGLU"),
            Rule("swiglu-beats-gelu", FAILS, "GELU"),
            Rule("experts-beat-dense", HOLDS, "8 experts, 2 for each token"),
        ),
    ),
    Question(
        "Which norm?",
        ("train",),
        {"LayerNorm": "+layernorm", "RMSNorm": "+rmsnorm"},
        (
            Rule("rmsnorm-loses-nothing", HOLDS, "RMSNorm"),
            Rule("rmsnorm-is-faster", HOLDS, "RMSNorm"),
            Rule("rmsnorm-loses-nothing", FAILS, "LayerNorm"),
        ),
    ),
    Question(
        "Softmax attention, or linear attention with a state of fixed size?",
        ("long",),
        {"softmax": "+causal", "linear": "+linear_attention"},
        (
            Rule("linear-attention-state", HOLDS, "linear"),
            Rule("linear-attention-costs-loss", HOLDS, "softmax"),
            Rule("linear-attention-costs-loss", FAILS, "linear"),
        ),
    ),
    Question(
        "Attention and network one after the other, or side by side?",
        ("train",),
        {"one after the other": "+pre", "side by side": "+parallel"},
        (
            Rule("parallel-loses-nothing", HOLDS, "side by side"),
            Rule("parallel-loses-nothing", FAILS, "one after the other"),
        ),
    ),
    Question(
        "Biases in the linear maps?",
        ("train",),
        {"with": "+bias", "without": "+nobias"},
        (Rule("biases-can-go", HOLDS, "without"), Rule("biases-can-go", FAILS, "with")),
    ),
    Question(
        "Norms before the branches, or after the addition?",
        ("train",),
        {"before": "+pre", "after": "+post"},
        (Rule("post-norm-needs-warmup", HOLDS, "before"), Rule("pre-norm-needs-no-warmup", HOLDS, "before")),
    ),
)
"""What the guides choose by a tree of needs."""


@dataclass(frozen=True)
class AdviceOption:
    """An option of a question, its costs, and the claims whose verdict supports it."""

    name: str
    change: str
    """Change of the expression, with its sign."""
    state_bytes: int
    weight_bytes: Mapping[str, int]
    """Bytes of the weights by their format."""
    fits: tuple[str, ...]
    """Formats of weights that fit the memory together with the decode state."""
    supported_by: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the option as plain values; `for` has the claims."""
        told = plain(self)
        return told | {"for": told.pop("supported_by")}


@dataclass(frozen=True)
class ClaimEvidence:
    """A stored result of a claim."""

    claim: str
    statement: str
    verdict: Verdict
    words: str
    """The verdict with the size that it was shown at."""
    sure: str
    measured: str
    """Date."""
    processor: str | None
    link: str
    """The file."""


@dataclass(frozen=True)
class AdviceQuestion:
    """A question with its options, the evidence for them, and what would decide the open claims."""

    asks: str
    options: tuple[AdviceOption, ...]
    evidence: tuple[ClaimEvidence, ...]
    undecided: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the question as plain values."""
        return {**plain(self), "options": [one.to_dict() for one in self.options]}


@dataclass(frozen=True)
class Advice(Tabular):
    """Options for a goal: costs, the measured claims that support each, and what is not known.

    Attributes
    ----------
    goal : str
        "chat", "long" or "train".
    context : int
        Tokens that are kept.
    memory : float
        Bytes of memory.
    model : str
        The model that the options change.
    claims : str
        Folder of the stored results.
    questions : tuple of AdviceQuestion
        Questions of this goal.

    Examples
    --------
    >>> found = gf.advise("llama@1m", goal="chat")
    >>> found.questions[0].options[2].change
    '+mqa'
    """

    goal: Goal
    context: int
    memory: float
    model: str
    claims: str
    questions: tuple[AdviceQuestion, ...]

    def lines(self) -> Iterator[Any]:
        """Yields each question with its options, evidence, and what is not known."""
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
    """Lists options for a goal: what each costs, which measured claims support it, and what is not known.

    An option is supported if a stored result has the verdict of one of its rules.

    Parameters
    ----------
    model
        The model that the options change: an expression, a path, a config or a model.
    goal
        "chat": to answer from a cache; "long": to read texts longer than those of training; "train": to train from
        scratch.
    context
        Tokens that are kept, as 8192 or "8k".
    memory
        Memory of the machine, in bytes or as "16GB"; weights and the decode state have to fit.
    claims
        Folder of measured claims, as `claims` leaves it; by default those of the library.

    Returns
    -------
    Advice
        Questions with options, costs and evidence.

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
            f"--claims {folder} is no folder; leave it out for the results of the library, or measure with "
            f"glassformer claims --out {folder}",
            code="missing", field="claims", value=str(folder), expected="a folder",
        )  # fmt: skip
    config = resolve(model)
    named = str(model) if isinstance(model, str | Path) else "this model"
    answers = [_answered(one, config, tokens, room, folder) for one in QUESTIONS if goal in one.goals]
    return Advice(goal, tokens, room, named, str(folder), tuple(answers))


def _answered(question: Question, config: ModelConfig, context: int, memory: float, folder: Path) -> AdviceQuestion:
    found = {rule.claim: read(folder, rule.claim) for rule in question.rules}
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
    """The number of groups nearest to a quarter of the model's heads that divides them."""
    mixer: Any = next(iter(changed(config, ["mha"]).layers())).mixer
    return nearest_groups(mixer.n_heads, 8, 2) or mixer.n_heads


def _option(
    name: str, change: str, config: ModelConfig, context: int, memory: float, supported: tuple[str, ...]
) -> AdviceOption:  # fmt: skip
    """An option with bytes of weights and state, and the formats of weights in which both fit."""
    made = changed(config, [change.removeprefix("+"), f"context={context}"])
    plans = {weights: plan(made, context=context, weights=weights) for weights in WEIGHTS if weights != "float32"}
    state = next(iter(plans.values())).state_bytes
    bytes_ = {weights: one.weight_bytes for weights, one in plans.items()}
    fits = tuple(weights for weights, taken in bytes_.items() if taken + state <= SPARE * memory)
    return AdviceOption(name, change, state, bytes_, fits, supported)


def _evidence(name: str, held: Stored, folder: Path) -> ClaimEvidence:
    return ClaimEvidence(
        claim=name, statement=held.statement, verdict=held.verdict, words=held.words, sure=held.outcome.sure,
        measured=held.measured, processor=held.machine.get("processor"), link=str(folder / f"{name}.json"),
    )  # fmt: skip


def _missing(name: str, held: Stored | None) -> str:
    """What it would take to decide a claim."""
    if held is None:
        claim = known()[name]
        return f"{claim.statement} Not measured: `glassformer claims {name}`, {claim.minutes:g} min."
    seeds = [figure.needed for figure in held.outcome.figures if figure.judged and figure.needed]
    more = f"about {max(seeds)} seeds would decide it" if seeds else "more seeds alone would not decide it"
    return f"{held.statement} Undecided here: {more}."
