"""The arms of a comparison: their models and recipes, and the checks that comparing them is fair; used by `Design`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from glassformer import machine
from glassformer.config import ModelConfig
from glassformer.dynamics.qk_clip import refuse_clipping
from glassformer.errors import RequestError, check_whole, did_you_mean, shown
from glassformer.machine import available_cores
from glassformer.names.grammar import CHANGES, LONGEST, RECIPE
from glassformer.naming import at_size, own_value, preset, resize, split_recipe
from glassformer.naming.models import changed, split_changes
from glassformer.naming.resolve import resolve
from glassformer.runs.executor import Executor
from glassformer.runs.power import MOST_SEEDS
from glassformer.thresholds import WORTH_SAYING
from glassformer.training import Recipe
from glassformer.training.overrides import with_recipe
from glassformer.training.recipe import BUDGETS
from glassformer.training.request import fit, settings

Match = Literal["tokens", "flops", "minutes"]
MOST_ARMS = 1000
"""Largest number of models of one comparison"""
UNFAIR = 0.2
"""Largest relative difference between arms in parameters of the layers, for a design without `allow_unmatched`."""
SMALL = 1e10
"""Largest number of FLOPs of a training step for runs that are trained several at once by default: two threads make a
step of 8 x 128 tokens 1.47 (0.1m), 1.68 (1m), 1.83 (3m) and 1.88 (10m) times as fast as one does, two runs about 2."""
ROOM, WORKING, TRAINED = 4, 1 << 29, 16
"""Divisor of the memory, because other programs need some; bytes of the process of a run (.3 GiB at 1m, as measured);
bytes of each parameter with its gradient and the optimizer's state"""
ALIKE = {
    "tokens": "--tokens", "flops": "--flops", "minutes": "--minutes", "steps": "--steps", "seed": "--seeds",
    "context": "--context", "evaluation_tokens": "the same number", "objective": "--objective",
}  # fmt: skip
"""Fields of the recipe that must be the same for all arms, each with what to give to all (an option): losses are
compared under one budget, on the same text, for the same seeds."""


DEFAULTED = ("batch_size", "objective")
"""Fields of the recipe for which None, the value of an option left out, means the default"""


def check_seeds(seeds: object) -> int:
    """Returns the number of seeds as an int. Raises RequestError unless it is from 1 to MOST_SEEDS."""
    check_whole("seeds", seeds)
    number = int(seeds)  # type: ignore[call-overload]
    if number > MOST_SEEDS:
        message = f"seeds={seeds} is more than the {MOST_SEEDS:,} runs of a model that one comparison takes"
        raise RequestError(message, code="range", field="seeds", value=seeds, expected=f"at most {MOST_SEEDS:,}")
    return number


def check_planned(looks: Sequence[int]) -> None:
    """Raises RequestError unless each planned look, a number of seeds at which verdicts will be read, is an integer
    from 2 to MOST_SEEDS."""
    for look in looks:
        check_whole("looks", look, least=2)
        if look > MOST_SEEDS:
            message = f"looks={look} is more than the {MOST_SEEDS:,} seeds that one comparison takes"
            raise RequestError(message, code="range", field="looks", value=look, expected=f"at most {MOST_SEEDS:,}")


def recipe_fields(recipe: Recipe | Mapping[str, Any] | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {field: value} of `recipe`, a mapping or a `Recipe` (only its fields that were set), updated by `fields`,
    in which None for a field of DEFAULTED counts as not given. Raises RequestError if `recipe` is of another type or
    has a field that `Recipe` does not."""
    if isinstance(recipe, Recipe):
        given = {name: getattr(recipe, name) for name in recipe.model_fields_set}
    elif recipe is None or isinstance(recipe, Mapping):
        given = dict(recipe or {})
    else:
        raise RequestError(code="type", field="recipe", value=recipe, expected="a Recipe, or a mapping of its fields")
    if wrong := next((name for name in given if name not in Recipe.model_fields), None):
        near = did_you_mean(str(wrong), Recipe.model_fields)
        message = f"recipe has no field {shown(wrong)}{near}; fields of a design are keywords"
        raise RequestError(message, code="unknown", field=shown(wrong), value=given[wrong])
    return {**given, **{name: value for name, value in fields.items() if name not in DEFAULTED or value is not None}}


def recipe_defaults() -> dict[str, Any]:
    """Returns {field: default value} of the recipe's fields, without those of the budget."""
    names = set(Recipe.model_fields) - set(BUDGETS)
    return {name: Recipe.model_fields[name].get_default() for name in names}


class FixedFields(dict[Any, Any]):
    """Immutable, hashable mapping."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return FixedFields, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("the fields of a design do not change; `replace` returns a design with others")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


@dataclass(frozen=True)
class DesignArm:
    """A model of an experiment, with the changes of the common recipe that apply to it."""

    name: str
    model: str | ModelConfig
    """Expression without changes of the recipe, or a config"""
    recipe: Mapping[str, str] = field(default_factory=dict)
    """Changes of the recipe for this arm: field -> value as text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", FixedFields(self.recipe))

    @classmethod
    def of(cls, name: str | None, model: Any, unnamed: str = "model") -> DesignArm:
        """Makes an arm from a model in any form in which a caller or a file gives it: an expression, path, config,
        model, mapping of fields, or arm, which is returned as it is. Without `name`, an expression is its own name, and
        any other model is called `unnamed`. Raises RequestError for an invalid model or name."""
        if isinstance(model, DesignArm):
            return model
        changes: dict[str, str] = {}
        if isinstance(model, Mapping):
            tree = dict(model)
            if tree.keys() <= {"model", "recipe"} and isinstance(tree.get("recipe", {}), Mapping):
                changes = {str(key): str(value) for key, value in tree.get("recipe", {}).items()}
                model = tree.get("model")
            if isinstance(model, Mapping):
                model = ModelConfig.from_dict(model, name or unnamed)
        if not isinstance(model, str | Path):
            return cls(name or unnamed, resolve(model), changes)
        expression, own = split_recipe(str(model))
        return cls(name or str(model), expression, {**own, **changes})

    @cached_property
    def config(self) -> ModelConfig:
        """Config of the arm's model, with the vocabulary size of its preset, which the size of the text's vocabulary
        replaces later. Raises RequestError for an invalid expression."""
        return self.model if isinstance(self.model, ModelConfig) else preset(self.model)

    def own(self, name: str) -> Any:
        """Returns the value that the arm's expression sets for the config field `name`; None if it does not set the
        field, and for an arm without an expression."""
        return own_value(self.model, self.config, name) if isinstance(self.model, str) else None

    def changed(self, changes: Sequence[str]) -> DesignArm:
        """Returns the arm with further changes of its model and recipe, such as "rope" or "recipe.warmup=0.1", which
        are also added to its name. Raises RequestError for an unknown change."""
        more = "+".join(["", *changes])
        model: str | ModelConfig
        if isinstance(self.model, str):
            model, own = split_recipe(self.model + more)
        else:
            kept, own = split_changes([one for change in changes for one in CHANGES.split(change)])
            model = changed(self.model, kept)
        return DesignArm(self.name + more, model, {**self.recipe, **own})

    def at_size(self, size: str) -> DesignArm:
        """Returns the arm with its model at a size, which is inserted in its name: gpt2+rope at 1m is gpt2@1m+rope.
        Raises RequestError if the expression has its own size."""
        name = at_size(self.name, size)
        if isinstance(self.model, str):
            return DesignArm(name, at_size(self.model, size), self.recipe)
        return DesignArm(name, changed(resize(self.model, size), ()), self.recipe)

    @property
    def told(self) -> Any:
        """The arm's model with its own changes of the recipe, in the form that a file holds: an expression, or a tree
        of plain values."""
        if isinstance(self.model, str):
            whole = "+".join([self.model, *(f"{RECIPE}.{key}={value}" for key, value in self.recipe.items())])
            recipe_last = sorted(CHANGES.split(self.name), key=lambda change: change.startswith(f"{RECIPE}."))
            return self.name if "+".join(recipe_last) == whole else whole
        tree = self.model.to_dict()
        return {"model": tree, "recipe": dict(self.recipe)} if self.recipe else tree

    @property
    def entry(self) -> Any:
        """The arm in the form that a file holds: its expression if that is also its name, otherwise {name: its
        expression or tree}."""
        return self.told if self.told == self.name else {self.name: self.told}


def one_arm(model: Any, unnamed: str) -> DesignArm:
    """Returns the arm of `model`, a model or a mapping {its name: model}; a model without a name is called `unnamed`.
    Raises RequestError for an invalid model or name."""
    named = model if isinstance(model, Mapping) and len(model) == 1 else [DesignArm.of(None, model, unnamed)]
    (arm,) = arms(named).values()
    return arm


def listing(arms: Sequence[DesignArm]) -> list[Any] | dict[str, Any]:
    """Returns the arms' models as a design.yaml holds them: a list of expressions if each is its arm's name, otherwise
    {name: model}."""
    listed, names = [arm.told for arm in arms], [arm.name for arm in arms]
    return listed if listed == names else dict(zip(names, listed, strict=True))


def arms(models: Any) -> dict[str, DesignArm]:
    """Makes the arms from a sequence of models or a mapping from names to models; returns {name: arm}. Raises
    RequestError for an empty list, for two models with one name, and if an arm changes a field of the recipe that is in
    ALIKE."""
    if not isinstance(models, Mapping | Sequence) or isinstance(models, str):
        message = f"models is a {type(models).__name__}; give a list of models, or a mapping from names to models"
        raise RequestError(message, code="type", field="models", value=type(models).__name__, expected="a list")
    if not models:
        raise RequestError(
            "compare needs at least one model, such as gpt2@10m llama@10m", code="missing", field="models"
        )
    if len(models) > MOST_ARMS:
        raise RequestError(code="range", field="models", value=len(models), expected=f"at most {MOST_ARMS} models")
    named = models.items() if isinstance(models, Mapping) else ((None, model) for model in models)
    found: dict[str, DesignArm] = {}
    for number, (name, model) in enumerate(named, 1):
        if name is not None and (not isinstance(name, str) or not name or len(name) > LONGEST):
            raise RequestError(code="type", field="models", value=name, expected=f"names of 1 to {LONGEST} characters")
        arm = DesignArm.of(name, model, f"model {number}")
        if arm.name in found:
            raise RequestError(
                f"{arm.name} is named twice; for several runs of one model use --seeds",
                code="conflict", field="models", value=arm.name,
            )  # fmt: skip
        if shared := [name for name in arm.recipe if name in ALIKE]:
            name = shared[0]
            raise RequestError(
                f"+recipe.{name}={arm.recipe[name]}: one arm cannot have {name} for itself; give {ALIKE[name]} to all",
                code="conflict", field=f"recipe.{name}", value=arm.recipe[name],
            )  # fmt: skip
        found[arm.name] = arm
    return found


def common_context(arms: Mapping[str, DesignArm], given: int | None) -> int:
    """Returns the context length of all arms in tokens: `given`; if None, the length that all expressions set, if it is
    the same; otherwise the recipe's default. Raises RequestError if an expression sets a different length."""
    own = {name: arm.own("context") for name, arm in arms.items()}
    default = next(iter(own.values())) if len(set(own.values())) == 1 else None
    context = next(c for c in (given, default, Recipe.model_fields["context"].default) if c is not None)
    for name, its in own.items():
        if its not in (None, context):
            raise RequestError(
                f"{name}: one arm cannot have context={its} for itself; give {ALIKE['context']} to all, without it",
                code="conflict", field="context", value=its,
            )  # fmt: skip
    return context


def tokens_of_steps(steps: int | None, tokens: int | None, batch_size: int | None, context: int) -> int | None:
    """Returns the budget in tokens: `tokens`, or `steps` times the common batch size (None for the default) and
    context; None if neither is given. Raises RequestError if both are given."""
    if steps is None:
        return tokens
    check_whole("steps", steps)
    if tokens is not None:
        raise RequestError(
            f"give one budget; tokens={tokens} and steps={steps} given",
            code="conflict", field="steps", value=steps, expected="one of tokens, flops, minutes, steps",
        )  # fmt: skip
    return steps * (batch_size or Recipe.model_fields["batch_size"].default) * context


def given_budget(amounts: Mapping[str, Any]) -> Match:
    """Returns the name of the budget that a design gives: the first of tokens, flops and minutes whose amount is not
    None."""
    names: tuple[Match, ...] = ("tokens", "flops", "minutes")
    return next(name for name in names if amounts[name] is not None)


def fairness(arms: Mapping[str, DesignArm], allow_unmatched: bool, match: Match | None = None) -> list[str]:
    """Checks that the arms are of equal size, and returns notes, sentences on the differences that are allowed. Raises
    RequestError if the numbers of parameters in the layers differ by more than UNFAIR. Two cases are exempt:
    `allow_unmatched`, and a budget in minutes, in which a larger model pays for its size with fewer steps.

    Parameters of the layers are compared, as in scaling laws, because those of the vocabulary depend on the text.
    Experts count with the parameters that are active for one token, which determine the cost; a note gives the
    total."""
    sizes = {name: arm.config.active_params(embeddings=False) for name, arm in arms.items()}
    small, large = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    apart = sizes[large] / sizes[small] - 1
    if apart > UNFAIR and not allow_unmatched and match != "minutes":
        raise RequestError(
            f"{large} has {sizes[large]:,} parameters in its layers and {small} {sizes[small]:,}, {apart:.0%} apart: a "
            f"difference in loss would be a difference in size; {_equal(arms[large], sizes[small])}; or give a budget "
            "in --minutes, in which size costs steps, or --allow-unmatched",
            code="conflict", field="allow_unmatched",
        )  # fmt: skip
    notes = [
        f"The layers of {name} hold {held:,} parameters; a token meets {sizes[name]:,}."
        for name, arm in arms.items()
        if (held := arm.config.num_params(embeddings=False)) > sizes[name]
    ]
    if apart > WORTH_SAYING:
        notes.append(f"The layers of {large} have {apart:.0%} more parameters than those of {small}.")
    if apart > UNFAIR and match == "minutes":
        each = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        notes.append(
            f"Time is equal and size is not: a verdict is of what a model learns in that time on this machine, not of "
            f"its parameters. Parameters in the layers, those that a token meets: {each}."
        )
    return notes


def _equal(arm: DesignArm, wanted: int) -> str:
    """Returns advice, for an error message, on how to give the arm's model about `wanted` active parameters in its
    layers: a width `hidden` of its FFN if that is enough, otherwise one size for all arms."""
    model = arm.model
    if not isinstance(model, str):
        return "give both the same size"
    try:
        near, far = (preset(f"{model}+hidden={width}").active_params(embeddings=False) for width in (64, 128))
        width = 64 + round((wanted - near) * 64 / (far - near) / 8) * 8
        if abs(preset(f"{model}+hidden={width}").active_params(embeddings=False) / wanted - 1) <= WORTH_SAYING:
            return f"{arm.name}+hidden={width} has the same size"
    except (RequestError, ZeroDivisionError):
        pass
    return "give both the same @SIZE"


def likeness(
    arms: Mapping[str, DesignArm], configs: Mapping[str, ModelConfig], plans: Mapping[str, Recipe]
) -> list[str]:
    """Returns notes for the report: on arms with a recipe that differs from the common one, and on arms with equal
    models and equal recipes."""
    notes = []
    own: dict[str, list[str]] = {}  # arms by what their recipes change
    for name, config in configs.items():
        if overrides := arms[name].recipe:
            told = "(" + ", ".join(f"{field}={value}" for field, value in overrides.items()) + ")"
            twins = [other for other, its in configs.items() if its == config and plans[other] != plans[name]]
            if twins:
                but = f"it is the model of {' and '.join(twins)}, so what differs is the recipe"
                notes.append(f"{name} is trained by its own recipe {told}: {but}.")
            else:
                own.setdefault(told, []).append(name)
    for told, names in own.items():
        trained = "is trained by its own recipe" if len(names) == 1 else "are trained by their own recipe"
        notes.append(f"{', '.join(names)} {trained} {told}.")
    for name in configs:
        same = [other for other in configs if (configs[other], plans[other]) == (configs[name], plans[name])]
        if len(same) > 1 and same[0] == name:
            notes.append(
                f"{' and '.join(same)} are the same model, trained alike: what differs between them is chance."
            )
    return notes


def spending(configs: Mapping[str, ModelConfig], plans: Mapping[str, Recipe], match: str) -> dict[str, float]:
    """Returns {arm: amount of the matched quantity `match`, tokens or training FLOPs, that its run will spend in whole
    steps}; {} for a budget in minutes."""
    spent = {}
    for name, config in configs.items():
        plan = plans[name]
        if (steps := plan.num_steps(config)) is not None:
            each = 3.0 * config.flops(plan.context) if match == "flops" else 1
            spent[name] = steps * plan.tokens_per_step * each
    return spent


def threads_of(executor: Executor, asked: int | None, match: Match | None) -> int | None:
    """Returns the number of threads of each run: `asked`, or by default, if several runs are trained at once, an equal
    share of the cores. Raises RequestError if such runs on one machine have a budget in minutes, which they would have
    to share."""
    if executor.workers is None or executor.workers == 1:
        return asked
    if match == "minutes" and executor.shared:
        message = f"--workers {executor.workers}: runs side by side slow each other, so minutes cannot be their budget"
        raise RequestError(message, code="conflict", field="workers", value=executor.workers, expected="--tokens")
    return asked or max(1, available_cores() // executor.workers)


def at_once(
    models: Mapping[str, tuple[ModelConfig, Recipe]], runs: int, how: machine.Settings, cores: int,
    memory: int | None, before: tuple[int | None, bool] | None = None,
) -> tuple[int, int | None]:  # fmt: skip
    """Returns (number of runs that are trained at once, threads of each, None for the default) for an executor without
    a number of workers. There are several on a CPU if the step of every model is at most `SMALL`, the budget is not in
    minutes, and neither options nor OMP_NUM_THREADS give a number of threads: at most one for each core, and for each
    share of `memory`, the bytes of this machine.

    before    (threads of the earlier runs in the folder, True if they shared a device); threads decide the bits of a
              run, so later runs have the same number on any machine"""
    plans = [plan for _, plan in models.values()]
    if any(plan.threads is not None for plan in plans):
        return 1, None
    step = max(3.0 * config.flops(plan.context) * plan.tokens_per_step for config, plan in models.values())
    threads, several = before or (None, runs > 1 and step <= SMALL and not how.fixed)
    if how.device != "cpu" or not several or any(plan.minutes is not None for plan in plans):
        return 1, threads
    each = WORKING + TRAINED * max(config.num_params() for config, _ in models.values())
    room = cores if memory is None else memory // (ROOM * each)
    workers = max(1, min(cores // (threads or 1), runs, room))
    return workers, threads or (cores // workers if workers > 1 else None)


def unequal(spent: dict[str, float], match: str) -> list[str]:
    """Returns a note if the arms spend noticeably different amounts, `spent` {arm: amount}, of the matched quantity
    (tokens, FLOPs or minutes), because every run ends with a whole step; otherwise []."""
    if not spent or not min(spent.values()):
        return []
    least, most = min(spent, key=spent.__getitem__), max(spent, key=spent.__getitem__)
    apart = spent[most] / spent[least] - 1
    if apart <= WORTH_SAYING:
        return []
    unit = {"flops": "training FLOPs", "minutes": "time"}.get(match, match)
    return [f"Runs end with a whole step, so {most} spends {apart:.0%} more {unit} than {least}."]


def recipes(
    arms: Mapping[str, DesignArm],
    configs: Mapping[str, ModelConfig],
    recipe: Mapping[str, Any],
    match: Match | None,
    vocab_size: int,
) -> dict[str, Recipe]:
    """Returns {arm: its recipe} under one budget, with the peak learning rate filled in.

    `recipe` holds the common fields, with one of tokens, flops and minutes; `match` is the quantity that is equal
    between arms, by default the budget's. With `flops` and a budget in tokens, all arms get the FLOPs that the first
    spends on these tokens. Changes of the recipe in an arm's expression apply to that arm only. Raises RequestError if
    a recipe is wrong or does not suit the model of its arm."""
    given = [name for name in ("tokens", "flops", "minutes") if recipe.get(name) is not None]
    if len(given) != 1:
        raise RequestError(
            f"give one budget: --tokens, --flops, --minutes or --steps; {' and '.join(given) or 'none'} given",
            code="conflict", field="budget", value=given,
        )  # fmt: skip
    budget: dict[str, Any] = {given[0]: recipe[given[0]]}
    match = given[0] if match is None else match  # type: ignore[assignment]
    if match == "flops" and given == ["tokens"]:
        Recipe.of(tokens=recipe["tokens"])  # checked under the given name, in case the value is wrong
        name, config = next(iter(configs.items()))
        first = fit(config, vocab_size, recipe["context"], arms[name].own("vocab_size"))
        budget = {"flops": 3.0 * first.flops(recipe["context"]) * recipe["tokens"]}
    elif match != given[0]:
        raise RequestError(
            f"--match {match} needs --{match}; --{given[0]} was given", code="conflict", field="match", value=match
        )
    rest = {name: value for name, value in recipe.items() if name not in ("tokens", "flops", "minutes")}
    made = {}
    for name, config in configs.items():
        common = Recipe.of(**{**rest, **budget})
        try:
            plan = with_recipe(common, arms[name].recipe)
            refuse_clipping(config, plan.qk_clip)
            plan.optimizer.check(config)
        except RequestError as error:
            raise error.of(name) from None
        made[name] = plan.replace(learning_rate=plan.peak_learning_rate(config))
    return made


def compiled_alike(
    configs: Mapping[str, ModelConfig], plans: Mapping[str, Recipe], before: bool | None
) -> tuple[dict[str, Recipe], machine.Settings]:
    """Returns the recipes {arm: recipe} with their field `compile` decided, and the machine settings to report. All
    arms compile or none does: as the earlier runs (`before`) did, otherwise if compiling shortens the run of at least
    one arm. An arm whose expression sets `compile` keeps its value."""
    plans = {name: plan.replace(compile=before) if plan.compile is None else plan for name, plan in plans.items()}
    made = [settings(config, plans[name]) for name, config in configs.items()]
    how = next((one for one in made if one.compile), made[0])
    return {n: plan.replace(compile=how.compile) if plan.compile is None else plan for n, plan in plans.items()}, how
