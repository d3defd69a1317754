"""The recommended model: the options that claims support, with its plan, ranked by effect and cost."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.laboratory.evidence.stored import Stored
from glassformer.naming.models import changed, trial
from glassformer.planning import SPARE, WEIGHTS, plan

LOSS = re.compile(r"loss of (?P<b>.+) less that of (?P<a>\S+?)(?P<share>, in shares of it)?")
"""Pattern of the name of a loss difference between two arms."""


class ChoiceOption(Protocol):
    """Interface of an option that `compose` reads."""

    @property
    def name(self) -> str: ...
    @property
    def change(self) -> str: ...
    @property
    def state_bytes(self) -> int: ...
    @property
    def weight_bytes(self) -> Mapping[str, int]: ...
    @property
    def flops(self) -> float: ...


class ChoiceOfOptions(Protocol):
    """Interface of a question of the decision guide, with its options, the simplest first."""

    @property
    def asks(self) -> str: ...
    @property
    def options(self) -> Sequence[ChoiceOption]: ...


@dataclass(frozen=True)
class PlannedSize:
    """Planned sizes and costs of a model in generation.

    Attributes
    ----------
    parameters : int
        Number of parameters.
    weight_bytes : dict of str to int
        Bytes of the weights by their format.
    state_bytes : int
        Bytes of the decode state.
    flops : float
        Forward FLOPs of a token.
    fits : tuple of str
        Formats of weights that fit the memory together with the decode state.
    """

    parameters: int
    weight_bytes: dict[str, int]
    state_bytes: int
    flops: float
    fits: tuple[str, ...]

    @classmethod
    def of(cls, config: ModelConfig, context: int, memory: float) -> PlannedSize:
        """Plans generation with a model, and returns its sizes and costs. Raises RequestError."""
        one = plan(config, context=context)
        taken = {name: math.ceil(one.parameters * size) for name, size in WEIGHTS.items() if name != "float32"}
        fits = tuple(name for name, size in taken.items() if size + one.state_bytes <= SPARE * memory)
        return cls(one.parameters, taken, one.state_bytes, one.flops, fits)


@dataclass(frozen=True)
class Priority:
    """A recommended option, which claims support, with its effect on the loss and its costs.

    Attributes
    ----------
    asks, option, change : str
        The question, the option, and the change of the expression that makes it.
    loss : float or None
        Measured change of the loss as a share of it, negative for a lower loss; None if no claim measured it.
    weights, state, flops : float
        Change of the bytes of weights, of the decode state and of the FLOPs of a token, as shares of those with the
        simplest option.
    fields : int
        Fields of the config in which it differs from the simplest option: the effort of the change.
    present : bool
        True if the model has it already.
    supported_by : tuple of str
        Claims that support it.
    """

    asks: str
    option: str
    change: str
    loss: float | None
    weights: float
    state: float
    flops: float
    fields: int
    present: bool
    supported_by: tuple[str, ...]


@dataclass(frozen=True)
class AdvisedModel:
    """The model that `advise` recommends.

    Attributes
    ----------
    expression : str
        The model with the changes that are advised.
    changes : tuple of str
        Changes that the model has not yet.
    left_out : dict of str to str
        Changes that do not go together with the others, with the refusal.
    before, after : PlannedSize
        Sizes and costs of the model without and with the changes.
    priorities : tuple of Priority
        Choices that claims support, those of the largest effect on the loss first, then those that save most.
    """

    expression: str
    changes: tuple[str, ...]
    left_out: dict[str, str]
    before: PlannedSize
    after: PlannedSize
    priorities: tuple[Priority, ...]


def compose(
    name: str,
    config: ModelConfig,
    chosen: Mapping[str, tuple[ChoiceOfOptions, ChoiceOption, Sequence[Stored]]],
    context: int,
    memory: float,
) -> AdvisedModel:
    """Makes the recommended model: applies the chosen options to the model one after the other. `chosen`: the question,
    the option and the claims that support it, by question."""
    made, changes, left_out, priorities = config, list[str](), dict[str, str](), list[Priority]()
    for question, option, claims in chosen.values():
        word = option.change.removeprefix("+")
        with trial():
            present = _same(changed(config, [word]), config)
        if not present:
            try:
                made = changed(made, [word])
                made.check()
                changes.append(option.change)
            except RequestError as problem:
                left_out[option.change] = str(problem)
        if claims and option.change not in left_out:
            priorities.append(_priority(question, option, claims, config, present))
    return AdvisedModel(
        name + "".join(changes),
        tuple(changes),
        left_out,
        PlannedSize.of(config.replace(context=context), context, memory),
        PlannedSize.of(made.replace(context=context), context, memory),
        tuple(sorted(priorities, key=lambda one: (one.loss or 0.0, one.state + one.weights + one.flops))),
    )


def _same(one: ModelConfig, other: ModelConfig) -> bool:
    return not one.resolved().diff(other.resolved())


def _priority(
    question: ChoiceOfOptions, option: ChoiceOption, claims: Sequence[Stored], config: ModelConfig, present: bool
) -> Priority:  # fmt: skip
    simplest = question.options[0]
    plain, own = (changed(config, [one.change.removeprefix("+")]).resolved() for one in (simplest, option))
    word, *others = [option.change.removeprefix("+"), *(one.change.removeprefix("+") for one in question.options)]
    others.remove(word)
    effects = [effect for held in claims if (effect := loss_effect(held, word, others)) is not None]
    return Priority(
        question.asks,
        option.name,
        option.change,
        min(effects, default=None),
        option.weight_bytes["bfloat16"] / simplest.weight_bytes["bfloat16"] - 1,
        option.state_bytes / simplest.state_bytes - 1 if simplest.state_bytes else 0.0,
        option.flops / simplest.flops - 1,
        len(plain.diff(own)),
        present,
        tuple(held.name for held in claims),
    )


def loss_effect(held: Stored, word: str, others: Sequence[str]) -> float | None:
    """Returns the change of the loss by an option, as a share of the loss, that a claim measured; None if the claim
    measured another quantity. `word` is the change of the expression that makes the option, `others` those of the
    other options: a claim may have any of them as its first or second arm."""
    losses = {figure.name: figure.value for figure in held.outcome.figures}
    for figure in held.outcome.figures:
        found = LOSS.fullmatch(figure.name)
        if found is None or not figure.judged:
            continue
        base = losses.get(f"loss of {found['a']}")
        share = figure.value if found["share"] else figure.value / base if base else None
        if share is not None and _has(found["b"], word):
            return share
        if share is not None and (_has(found["a"], word) or any(_has(found["b"], other) for other in others)):
            return -share
    return None


def _has(expression: str, word: str) -> bool:
    """Returns True if a model's expression contains a change, whatever the expression's size."""
    return word.partition(":")[0] in [change.partition(":")[0] for change in expression.split("+")[1:]]
