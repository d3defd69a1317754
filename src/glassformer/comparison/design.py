"""`Design`: an experiment as a value, and as a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Self

import yaml

from glassformer.comparison.arms import (
    DesignArm,
    FixedFields,
    Match,
    arms,
    check_planned,
    check_seeds,
    common_context,
    fairness,
    given_budget,
    listing,
    recipe_defaults,
    recipe_fields,
    recipes,
    tokens_of_steps,
)
from glassformer.comparison.pretrained import check_begun
from glassformer.config import ModelConfig, read_tree
from glassformer.errors import RequestError, shown
from glassformer.files import SCHEMAS, check_schema, replace_text
from glassformer.naming.models import undone_by
from glassformer.naming.resolve import ModelLike
from glassformer.parts.core.base import PartConfig, part_classes, to_plain
from glassformer.parts.core.outside import naming_imports
from glassformer.runs.power import check_effect
from glassformer.runs.results import Budget
from glassformer.text import DataLike, Tokens, named_or_read
from glassformer.training import Recipe
from glassformer.training.pace import affordable
from glassformer.training.recipe import BUDGETS
from glassformer.training.sinks import check_sinks
from glassformer.units import count, quantity, share, whole_numbers

FILE = "design.yaml"
"""Name of the file with the design, in the output folder of an experiment"""
VERB = "compare"
TUNED_SEEDS = 3
"""Default number of seeds of a tuned comparison"""
LEAST_SEEDS = 2
"""Least number of seeds of a verdict: one seed gives no interval"""
STATED = ("context", "evaluation_tokens")
"""Fields of the recipe that a design keeps if they are given, also with the recipe's default value"""


@dataclass(frozen=True, kw_only=True)
class Design:
    """An experiment: the models, the text, the budget, and how the models are judged.

    A design is checked when it is made, as far as this needs neither the text nor the machine. `Design.of` makes one
    from models and options; `save` writes it to a file.

    Parameters
    ----------
    arms
        The models with their names and their changes of the recipe.
    data
        Name of the text, as `gf.train` takes it. None if the text is in memory; it is then given to `gf.compare`.
    tokens
        Budget of each run in tokens; one of `tokens`, `minutes`, `flops`, `steps` is given.
    minutes
        Budget of each run in minutes of training.
    flops
        Budget of each run in training FLOPs.
    steps
        Budget of each run: the tokens of this many steps of the common batch size and context.
    match
        Quantity that is equal between arms; by default that of the budget. With "flops" and a budget in tokens, every
        arm gets the FLOPs of the first.
    seeds
        Runs of each model.
    looks
        Numbers of seeds at which verdicts will be read; the error rate of 5 % holds for all of them together.
    power
        Difference to detect, as a fraction of the first arm's loss: a pilot then estimates the seeds and hours it
        takes. None for a verdict.
    tune
        Choose a learning rate for each arm first, on seeds that are not used for the verdict.
    within
        Limit of a tuned comparison in minutes; None for no limit.
    tokenizer
        "auto", "byte", "char", "word:SIZE", "bpe:SIZE", or a tokenizer.json.
    allow_unmatched
        Compare models of different size.
    pretrained
        Start every arm from the weights of the checkpoint that its expression names, with the expression's changes.
    loss_alone
        Measure only the loss of the trained models, which is enough for trials of learning rates and for scaling laws.
    log_to
        Names of services, such as "tensorboard", that receive the numbers of each training step.
    recipe
        Fields of the recipe of all arms, without the budget.

    Raises
    ------
    RequestError
        If the experiment is wrong or unfair.

    Examples
    --------
    >>> design = gf.Design.of(["gpt2@1m", "llama@1m"], "python-docs", tokens="200k", seeds=3)
    >>> design.replace(seeds=5).seeds
    5
    """

    arms: tuple[DesignArm, ...]
    data: str | None = None
    tokens: int | None = None
    minutes: float | None = None
    flops: float | None = None
    steps: int | None = None
    match: Match | None = None
    seeds: int = 1
    looks: tuple[int, ...] = ()
    power: float | None = None
    tune: bool = False
    within: float | None = None
    tokenizer: str = "auto"
    allow_unmatched: bool = False
    pretrained: bool = False
    loss_alone: bool = False
    log_to: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        models: Sequence[ModelLike | DesignArm] | Mapping[str, ModelLike],
        data: str | Path | None = None,
        *,
        recipe: Recipe | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Makes a design from models, and from the fields of `Design` and of `Recipe` by name.

        Parameters
        ----------
        models
            Expressions, paths, configs, models or arms; or a mapping from names to models. An expression may change
            the recipe of its arm: `gpt2@1m+recipe.warmup=0.1`.
        data
            Name of the text.
        recipe
            Fields of the recipe of all arms, as a `Recipe` or a mapping.
        **options
            Fields of the design and of the recipe. Counts may be text, as in `tokens="200k"`; `seeds` is 1 by default,
            and 3 with `tune`.

        Returns
        -------
        Design
            The experiment.

        Raises
        ------
        RequestError
            If the experiment is wrong or unfair.

        Examples
        --------
        >>> gf.Design.of({"mine": gf.preset("gpt2@1m"), "base": "llama@1m"}, "python-docs", tokens=200_000).seeds
        1
        """
        given = recipe_fields(recipe, options)
        own = {name: given.pop(name) for name in list(given) if name in OWN}
        if own.get("seeds") is None:
            own["seeds"] = TUNED_SEEDS if own.get("tune") else 1
        return cls(arms=tuple(arms(models).values()), data=data, recipe=given, **own)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        """Converts fields from text, and checks the experiment."""
        if wrong := next((name for name in BUDGETS if name in self.recipe), None):
            message = f"recipe has {wrong}, which is a field of the design; give {wrong} as a keyword"
            raise RequestError(message, code="conflict", field=wrong, value=self.recipe[wrong])
        for name, value in {
            "arms": tuple(arms(self.arms).values()),
            "data": str(self.data) if isinstance(self.data, Path) else self.data,
            "recipe": FixedFields(_changed(self.recipe)),
            **{name: _read(name, getattr(self, name)) for name in READERS},
        }.items():
            object.__setattr__(self, name, value)
        for name, kinds in TYPES.items():
            if not isinstance(value := getattr(self, name), kinds) or (isinstance(value, bool) and bool not in kinds):
                expected = " or ".join(kind.__name__ for kind in kinds)
                raise RequestError(code="type", field=name, value=value, expected=expected)
        assert self.configs is not None  # refuses a name that names no model
        check_sinks(self.log_to)
        check_seeds(self.seeds)
        check_planned(self.looks)
        if self.match not in (None, "tokens", "flops", "minutes"):
            raise RequestError(code="unknown", field="match", value=self.match, expected="tokens, flops or minutes")
        if self.power is not None:
            check_effect(self.power, len(self.arms))
        self._check_tuning()
        if self.pretrained:
            check_begun([arm.model for arm in self.arms], self.tokenizer)
        self.plans(self.configs, vocab_size=1)
        assert self.notes is not None  # refuses sizes that are too far apart
        objective = self.common.objective
        counted = self.steps is not None or "flops" in (self.match, given_budget(self.amounts))
        if counted and not objective.continues:
            raise RequestError(
                f"objective={objective.kind} gives a model pairs or rows, whose tokens and FLOPs are not those of "
                "contexts; give the budget of a comparison in --tokens or --minutes",
                code="conflict", field="objective", value=objective.kind, expected="--tokens",
            )  # fmt: skip

    def _check_tuning(self) -> None:
        if not self.tune:
            if self.within is not None:
                message = "--within is for --tune, which is not given"
                raise RequestError(message, code="conflict", field="within", value=self.within, expected="--tune too")
            return
        if self.power is not None:
            message = "--power is for a comparison without --tune; tune first, then compare at the chosen rates"
            raise RequestError(message, code="conflict", field="power", value=self.power, expected="no --tune")
        if self.pretrained:
            message = "--pretrained is for a comparison without --tune; give the rate in --lr"
            raise RequestError(message, code="conflict", field="pretrained", value=True, expected="no --tune")
        if (given := self.recipe.get("learning_rate")) is not None:
            message = f"--lr {given} fixes the learning rate that --tune looks for; give one of them"
            raise RequestError(message, code="conflict", field="learning_rate", value=given, expected="left out")
        for arm in self.arms:
            if (own := arm.recipe.get("learning_rate")) is not None:
                raise RequestError(
                    f"{arm.name} sets its own learning rate, which --tune would choose: leave +recipe.learning_rate "
                    "out",
                    code="conflict", field="recipe.learning_rate", value=own, expected="left out",
                )  # fmt: skip
        if self.seeds < LEAST_SEEDS:
            message = f"seeds={self.seeds} gives no verdict; --tune needs --seeds {LEAST_SEEDS} or more, by default 3"
            raise RequestError(
                message, code="range", field="seeds", value=self.seeds, expected=f"at least {LEAST_SEEDS}"
            )
        if self.within is not None and not 0 < self.within < math.inf:
            raise RequestError(code="range", field="within", value=self.within, expected="a number of minutes above 0")

    def replace(self, **changes: Any) -> Self:
        """Returns the design with some fields changed.

        Parameters
        ----------
        **changes
            Fields of the design and of the recipe. A mapping or `Recipe` named `recipe` changes only the fields that it
            sets.

        Returns
        -------
        Design
            The changed design.

        Raises
        ------
        RequestError
            If the experiment is wrong or unfair.

        Examples
        --------
        >>> design.replace(seeds=2, batch_size=8).recipe["batch_size"]
        8
        """
        changes = recipe_fields(changes.pop("recipe", None), changes)
        own = {name: changes.pop(name) for name in list(changes) if name in OWN or name in ("arms", "data")}
        return replace(self, **own, recipe={**self.recipe, **changes})

    # What follows from the fields

    @cached_property
    def named(self) -> dict[str, DesignArm]:
        """Arms by name, {name: arm}."""
        return {arm.name: arm for arm in self.arms}

    @property
    def parts(self) -> tuple[type[PartConfig], ...]:
        """Config classes of the parts (attention, FFN, optimizer, ...) of all models and recipes, each class once."""
        plans = self.plans(self.configs, vocab_size=1)
        return tuple(dict.fromkeys(chain(*map(part_classes, (*self.configs.values(), *plans.values())))))

    @cached_property
    def configs(self) -> dict[str, ModelConfig]:
        """Configs of the models, {arm name: config}, before the vocabulary size of the text replaces that of the
        preset."""
        return {arm.name: arm.config for arm in self.arms}

    @cached_property
    def context(self) -> int:
        """Context length of all arms, in tokens."""
        return common_context(self.named, self.recipe.get("context"))

    @property
    def first_seed(self) -> int:
        """Seed of the first run of each arm; later runs have the seeds that follow."""
        return self.recipe.get("seed", 0)

    @cached_property
    def amounts(self) -> dict[str, Any]:
        """Budget as {quantity: amount}, with None for the two of tokens, minutes and flops that are not given; a budget
        in steps is converted to tokens."""
        tokens = tokens_of_steps(self.steps, self.tokens, self.recipe.get("batch_size"), self.context)
        return {"tokens": tokens, "minutes": self.minutes, "flops": self.flops}

    @property
    def equal(self) -> Match | None:
        """Quantity that is equal between arms: `match`, or minutes for such a budget; None means the budget's."""
        return self.match or ("minutes" if self.minutes is not None else None)

    @cached_property
    def notes(self) -> list[str]:
        """Sentences for the report on size differences between the arms, and on changes in an arm's expression that a
        later change of the same expression reverses. Raises RequestError if the sizes are too far apart."""
        texts = {name: arm.model for name, arm in self.named.items() if isinstance(arm.model, str)}
        undone = [f"{name}: {sentence}." for name, text in texts.items() for sentence in undone_by(text)]
        return fairness(self.named, self.allow_unmatched, self.equal) + undone

    @cached_property
    def all_fields(self) -> dict[str, Any]:
        """All fields of the arms' common recipe, {field: value}, with the defaults, the budget and the context. If not
        given, the tokens of an evaluation are those that a short run affords, the same for all arms."""
        usual, tokens = recipe_defaults(), self.amounts.get("tokens")
        if isinstance(tokens, int):
            usual["evaluation_tokens"] = affordable(tokens, usual["evaluation_tokens"])
        return {**usual, **self.recipe, **self.amounts, "context": self.context}

    @cached_property
    def common(self) -> Recipe:
        """Recipe that all arms share, with the budget as it was given (steps as tokens): not yet turned into FLOPs that
        are equal between arms, and without the changes of the recipe in an arm's expression."""
        return Recipe.of(**self.all_fields)

    @property
    def budget(self) -> Budget:
        """Record of the budget for results.json: matched quantity, amount, seeds, batch size and context."""
        common = self.common
        return Budget(
            match=self.match or given_budget(self.amounts),
            tokens=common.tokens, minutes=common.minutes, flops=common.flops, seeds=self.seeds,
            batch_size=common.batch_size, context=common.context,
        )  # fmt: skip

    def plans(self, configs: Mapping[str, ModelConfig], vocab_size: int, **changes: Any) -> dict[str, Recipe]:
        """Returns the recipe of each arm.

        Parameters
        ----------
        configs
            Config of each arm's model, {arm name: config}.
        vocab_size
            Size of the text's vocabulary.
        **changes
            Fields of the recipe of all arms.

        Returns
        -------
        dict of str to Recipe
            Recipes, {arm name: recipe}, with the budget that makes the arms equal in `match`.

        Raises
        ------
        RequestError
            For wrong fields.

        Examples
        --------
        >>> {name: recipe.tokens for name, recipe in design.plans(design.configs, vocab_size=256).items()}
        {'gpt2@1m': 200000, 'llama@1m': 200000}
        """
        return recipes(self.named, configs, {**self.all_fields, **changes}, self.match, vocab_size)

    # Files

    def to_dict(self) -> dict[str, Any]:
        """Returns the design as plain values, without defaults.

        Returns
        -------
        dict
            The content of design.yaml.

        Examples
        --------
        >>> design.to_dict()["models"]
        ['gpt2@1m', 'llama@1m']
        """
        tree: dict[str, Any] = {
            "schema": SCHEMAS["design"],
            "verb": VERB,
            "models": listing(self.arms),
            "data": self.data,
        }
        for one in fields(self):
            if one.name in OWN and (value := getattr(self, one.name)) != one.default:
                tree[one.name] = list(value) if isinstance(value, tuple) else value
        return tree | {name: to_plain(value) for name, value in self.recipe.items()}

    def save(self, folder: str | Path) -> None:
        """Writes design.yaml.

        Parameters
        ----------
        folder
            Folder of the file.

        Examples
        --------
        >>> design.save(".")
        """
        replace_text(Path(folder) / FILE, to_yaml(self.to_dict()))

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any], where: str = "") -> Self:
        """Makes a design from plain values.

        Parameters
        ----------
        tree
            The content of design.yaml.
        where
            Name of the file, for messages.

        Returns
        -------
        Design
            The design.

        Raises
        ------
        RequestError
            For unknown fields, and if the experiment is wrong or unfair.

        Examples
        --------
        >>> gf.Design.from_dict(design.to_dict()) == design
        True
        """
        return from_tree(tree, VERB, where, cls.of)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Reads a design.yaml.

        Parameters
        ----------
        path
            The file.

        Returns
        -------
        Design
            The design.

        Raises
        ------
        RequestError
            For a file that is missing or damaged, and if the experiment is wrong or unfair.

        Examples
        --------
        >>> gf.Design.from_file("design.yaml") == design
        True
        """
        tree = read_tree(path)
        with naming_imports(Path(path).parent):
            return cls.from_dict(tree, str(path))


def design_of(
    kind: type[Any], given: Any, data: DataLike | None, asked: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Any, Tokens | None]:
    """Returns the design, of the class `kind`, for a call such as `compare(given, data)`, and its tokens if `data` is
    in memory, else None.

    If `given` holds models, `kind.of` makes the design from them; if it is a design already, it is changed by `data`.
    The fields are those of `options` and those of `asked` that are not None. Raises RequestError for an invalid
    design."""
    options = {**options, **{name: value for name, value in asked.items() if value is not None}}
    if not isinstance(given, kind):
        name, text = named_or_read(data, options.get("tokenizer"))
        return kind.of(given, name, **options), text
    name, text = named_or_read(data, options.get("tokenizer", given.tokenizer))
    options |= {} if data is None else {"data": name}
    return given.replace(**options) if options else given, text


def _read(name: str, value: Any) -> Any:
    """Returns the value of the design's field `name` in its stored form: text converted to its value, lists as tuples.
    Raises RequestError for an invalid value."""
    if isinstance(value, str):
        value = READERS[name](value, field=name)
    if name not in ("looks", "log_to"):
        return value
    if not isinstance(value, list | tuple | None):
        raise RequestError(code="type", field=name, value=value, expected="a list")
    return tuple(value or ())


def _changed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {field: value} of the given fields of a recipe that differ from the defaults, and of those of `STATED` if
    they are not None. Raises RequestError for a field that a recipe does not have."""
    given = {name: value for name, value in given.items() if value is not None or name not in STATED}
    made, usual = Recipe.of(**{**given, "steps": 1}), recipe_defaults()
    return {name: value for name in given if (value := getattr(made, name)) != usual[name] or name in STATED}


def from_tree(tree: object, verb: str, where: str, make: Callable[..., Any]) -> Any:
    """Returns `make(**fields)` for the fields of a design.yaml, whose content is `tree`. Raises RequestError, which
    names the file `where`, for wrong fields and for a design of another verb than `verb`."""
    file = f"{where}: " if where else ""
    if not isinstance(tree, Mapping) or not all(isinstance(name, str) for name in tree):
        raise RequestError(
            f"{file}a design is a mapping of fields, and this is {type(tree).__name__}",
            code="type", field="design", value=type(tree).__name__,
        )  # fmt: skip
    rest = dict(tree)
    check_schema("design", rest.pop("schema", SCHEMAS["design"]), where or FILE)
    if (found := rest.pop("verb", VERB)) != verb:
        message = f"{file}verb={shown(found)}: a design of {verb} is needed"
        raise RequestError(message, code="unknown", field="verb", value=found, expected=verb)
    try:
        return make(**rest)
    except RequestError as error:
        raise error.of(where) if where else error from None
    except TypeError as error:
        raise RequestError(f"{file}{error}", code="missing", field="design") from None


def to_yaml(tree: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True)


OWN = frozenset(one.name for one in fields(Design)) - {"arms", "data", "recipe"}
"""Fields of a design other than the models, the data and the recipe"""
READERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("tokens", "steps"), count),
    **dict.fromkeys(("flops", "minutes", "within"), quantity),
    "power": share, "looks": whole_numbers, "log_to": lambda text, field: [text],
}  # fmt: skip
"""Functions (text, field) that return the value of a design's field given as text, by field"""
TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("tokens", "steps"), (int, type(None))),
    **dict.fromkeys(("minutes", "flops", "within"), (int, float, type(None))),
    **dict.fromkeys(("tune", "allow_unmatched", "pretrained", "loss_alone"), (bool,)),
    "tokenizer": (str,),
    "data": (str, type(None)),
}
"""Types that a design's field may have, by field, for the fields that nothing else checks"""
