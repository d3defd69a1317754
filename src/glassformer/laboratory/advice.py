"""The decision guide: options with their costs, and what measured claims say of them. Nothing is advised that no stored
result has decided; the rules are data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from glassformer.errors import RequestError
from glassformer.laboratory.claims import known
from glassformer.laboratory.claims.figure import FAILS, HOLDS, OPEN, Verdict
from glassformer.laboratory.claims.stored import MEASURED, Stored, read
from glassformer.naming import preset
from glassformer.parts.core.heads import nearest_groups
from glassformer.planning import SPARE, WEIGHTS, plan

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


def advise(
    goal: Goal, context: int, memory: float, claims: str | Path | None = None, model: str = MODEL
) -> dict[str, Any]:
    """Options for a goal, as plain data: what each takes at `context` tokens, the formats of weights with which that
    fits `memory` bytes, and the evidence: stored results of claims in the folder `claims`, by default those that come
    with the library, with their verdicts.

    An option is supported where a stored result has the verdict of one of its rules; a question of which no claim has
    been decided says what would decide it. Raises RequestError for an unknown goal, a folder that
    is not there, and where nothing is planned."""
    if goal not in get_args(Goal):
        raise RequestError(code="unknown", field="goal", value=goal, expected=f"one of {', '.join(get_args(Goal))}")
    if context < 1:
        raise RequestError(code="range", field="context", value=context, expected="at least 1 token")
    if not memory > 0:
        raise RequestError(code="range", field="memory", value=memory, expected="a size such as 16GB")
    folder = MEASURED if claims is None else Path(claims)
    if not folder.is_dir():
        raise RequestError(
            f"--claims {folder} is no folder; leave it out for the results of the library, or measure with "
            f"glassformer claims --out {folder}",
            code="missing", field="claims", value=str(folder), expected="a folder",
        )  # fmt: skip
    asked = [question for question in QUESTIONS if goal in question.goals]
    return {
        "goal": goal, "context": context, "memory": memory, "model": model, "claims": str(folder),
        "questions": [_answered(question, model, context, memory, folder) for question in asked],
    }  # fmt: skip


def _answered(question: Question, model: str, context: int, memory: float, folder: Path) -> dict[str, Any]:
    found = {rule.claim: read(folder, rule.claim) for rule in question.rules}
    options = []
    for name, change in question.options.items():
        speaks = [rule.claim for rule in question.rules
                  if rule.option == name and (held := found[rule.claim]) and held.verdict == rule.verdict]  # fmt: skip
        change = change.format(quarter=_quarter(model)) if "{" in change else change
        options.append({"name": name, "change": change, **_costs(model + change, context, memory), "for": speaks})
    return {
        "asks": question.asks,
        "options": options,
        "evidence": [_evidence(name, held, folder) for name, held in found.items() if held is not None],
        "undecided": [_missing(name, held) for name, held in found.items() if held is None or held.verdict == OPEN],
    }


def _quarter(model: str) -> int:
    """The number of groups nearest to a quarter of the model's heads that divides them."""
    mixer: Any = next(iter(preset(model + "+mha").layers())).mixer
    return nearest_groups(mixer.n_heads, 8, 2) or mixer.n_heads


def _costs(expression: str, context: int, memory: float) -> dict[str, Any]:
    """Bytes of weights and state, and in which formats of weights both fit."""
    config = preset(f"{expression}+context={context}")
    plans = {weights: plan(config, context=context, weights=weights) for weights in WEIGHTS if weights != "float32"}
    state = next(iter(plans.values())).state_bytes
    taken = {weights: one.weight_bytes + state for weights, one in plans.items()}
    return {
        "state_bytes": state,
        "weight_bytes": {weights: one.weight_bytes for weights, one in plans.items()},
        "fits": [weights for weights, bytes_ in taken.items() if bytes_ <= SPARE * memory],
    }


def _evidence(name: str, held: Stored, folder: Path) -> dict[str, Any]:
    return {
        "claim": name, "statement": held.statement, "verdict": held.verdict, "words": held.words,
        "sure": held.outcome.sure, "measured": held.measured, "processor": held.machine.get("processor"),
        "link": str(folder / f"{name}.json"),
    }  # fmt: skip


def _missing(name: str, held: Stored | None) -> str:
    """What it would take to decide a claim."""
    if held is None:
        claim = known()[name]
        return f"{claim.statement} Not measured: `glassformer claims {name}`, {claim.minutes:g} min."
    seeds = [figure.needed for figure in held.outcome.figures if figure.judged and figure.needed]
    more = f"about {max(seeds)} seeds would decide it" if seeds else "more seeds alone would not decide it"
    return f"{held.statement} Undecided here: {more}."
