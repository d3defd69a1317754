"""Arms, budgets and recipes of a comparison, and how far it is fair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from glassformer import machine
from glassformer.config import ModelConfig
from glassformer.dynamics.qk_clip import refuse_clipping
from glassformer.errors import RequestError, check_whole
from glassformer.machine import available_cores
from glassformer.naming import own_value, preset, split_recipe
from glassformer.runs.executor import Executor
from glassformer.runs.power import MOST_SEEDS
from glassformer.thresholds import WORTH_SAYING
from glassformer.training import Recipe
from glassformer.training.overrides import with_recipe
from glassformer.training.recipe import BUDGETS
from glassformer.training.request import fit, settings

Match = Literal["tokens", "flops", "minutes"]
UNFAIR = 0.2
"""Largest relative difference in parameters of the layers without `allow_unmatched`."""
ALIKE = {
    "tokens": "--tokens", "flops": "--flops", "minutes": "--minutes", "steps": "--steps", "seed": "--seeds",
    "context": "--context", "evaluation_tokens": "as many", "objective": "--objective",
}  # fmt: skip
"""Fields of the recipe that must be the same for all arms, and the option that sets them: losses are compared under
one budget, on the same text, seed by seed."""


def check_seeds(seeds: object) -> int:
    """The number of seeds as an int. Raises RequestError unless it is from 1 to MOST_SEEDS."""
    check_whole("seeds", seeds)
    number = int(seeds)  # type: ignore[call-overload]
    if number > MOST_SEEDS:
        message = f"seeds={seeds} is more than the {MOST_SEEDS:,} runs of a model that one comparison takes"
        raise RequestError(message, code="range", field="seeds", value=seeds, expected=f"at most {MOST_SEEDS:,}")
    return number


def recipe_defaults() -> dict[str, Any]:
    """The recipe without its budget, at its defaults."""
    names = set(Recipe.model_fields) - set(BUDGETS)
    return {name: Recipe.model_fields[name].get_default() for name in names}


def arms(expressions: Sequence[str]) -> dict[str, ModelConfig]:
    """Expression -> config, without changes of the recipe. Raises RequestError for an empty list, a repeated
    expression, one that names no model, and a change of a field in ALIKE."""
    if not expressions:
        raise RequestError(
            "compare needs at least one model, such as gpt2@10m llama@10m", code="missing", field="models"
        )
    found: dict[str, ModelConfig] = {}
    for expression in expressions:
        if expression in found:
            raise RequestError(
                f"{expression} is named twice; for several runs of one model use --seeds",
                code="conflict", field="models", value=expression,
            )  # fmt: skip
        model, wishes = split_recipe(expression)
        if shared := [field for field in wishes if field in ALIKE]:
            field = shared[0]
            raise RequestError(
                f"+recipe.{field}={wishes[field]}: one arm cannot have {field} for itself; give {ALIKE[field]} to all",
                code="conflict", field=f"recipe.{field}", value=wishes[field],
            )  # fmt: skip
        found[expression] = preset(model)
    return found


def common_context(configs: dict[str, ModelConfig], given: int | None) -> int:
    """The context of all arms: as given, else as every expression sets it, else the recipe's default. Raises
    RequestError for an expression that sets another."""
    own = {name: own_value(name, config, "context") for name, config in configs.items()}
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
    """The budget in tokens: as given, or of so many `steps` of the common batch size and context. Raises RequestError
    where both are given."""
    if steps is None:
        return tokens
    check_whole("steps", steps)
    if tokens is not None:
        raise RequestError(
            f"give one budget; tokens={tokens} and steps={steps} given",
            code="conflict", field="steps", value=steps, expected="one of tokens, flops, minutes, steps",
        )  # fmt: skip
    return steps * (batch_size or Recipe.model_fields["batch_size"].default) * context


def given_budget(amounts: dict[str, Any]) -> Match:
    """The name of the one that is given."""
    names: tuple[Match, ...] = ("tokens", "flops", "minutes")
    return next(name for name in names if amounts[name] is not None)


def fairness(configs: dict[str, ModelConfig], allow_unmatched: bool, match: Match | None = None) -> list[str]:
    """Notes on how far the arms are from equal in size; raises RequestError where they are too far apart, unless what
    is equal is time: a larger model then pays for its size with the steps that it does not take.

    Compared are the parameters of the layers, as in scaling laws: those of the vocabulary depend on the text. Of
    experts those count that a token meets, which are what it costs; what the others hold is said."""
    sizes = {name: config.active_params(embeddings=False) for name, config in configs.items()}
    small, large = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    apart = sizes[large] / sizes[small] - 1
    if apart > UNFAIR and not allow_unmatched and match != "minutes":
        raise RequestError(
            f"{large} has {sizes[large]:,} parameters in its layers and {small} {sizes[small]:,}, {apart:.0%} apart: a "
            f"difference in loss would be a difference in size; {_equal(large, sizes[small])}; or give a budget "
            "in --minutes, in which size costs steps, or --allow-unmatched",
            code="conflict", field="allow_unmatched",
        )  # fmt: skip
    notes = [
        f"The layers of {name} hold {held:,} parameters, of which a token meets {sizes[name]:,}."
        for name, config in configs.items()
        if (held := config.num_params(embeddings=False)) > sizes[name]
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


def _equal(name: str, wanted: int) -> str:
    """What makes a model, too large, about as large as `wanted`, in words: narrower networks, where that does."""
    model, _ = split_recipe(name)
    try:
        near, far = (preset(f"{model}+hidden={width}").active_params(embeddings=False) for width in (64, 128))
        width = 64 + round((wanted - near) * 64 / (far - near) / 8) * 8
        if abs(preset(f"{model}+hidden={width}").active_params(embeddings=False) / wanted - 1) <= WORTH_SAYING:
            return f"{name}+hidden={width} has as many"
    except (RequestError, ZeroDivisionError):
        pass
    return "give both the same @SIZE"


def likeness(configs: dict[str, ModelConfig], plans: dict[str, Recipe]) -> list[str]:
    """Notes on arms with a recipe of their own, and on arms that are the same model with the same recipe."""
    notes = []
    own: dict[str, list[str]] = {}  # arms by what their recipes change
    for name, config in configs.items():
        if wishes := split_recipe(name)[1]:
            told = "(" + ", ".join(f"{field}={value}" for field, value in wishes.items()) + ")"
            twins = [other for other, its in configs.items() if its == config and plans[other] != plans[name]]
            if twins:
                but = f"it is the model of {' and '.join(twins)}, so what differs is the recipe"
                notes.append(f"{name} is trained by a recipe of its own {told}: {but}.")
            else:
                own.setdefault(told, []).append(name)
    for told, names in own.items():
        trained = "is trained by a recipe of its own" if len(names) == 1 else "are trained by a recipe of their own"
        notes.append(f"{', '.join(names)} {trained} {told}.")
    for name in configs:
        same = [other for other in configs if (configs[other], plans[other]) == (configs[name], plans[name])]
        if len(same) > 1 and same[0] == name:
            notes.append(
                f"{' and '.join(same)} are the same model, trained alike: what differs between them is chance."
            )
    return notes


def spending(configs: dict[str, ModelConfig], plans: dict[str, Recipe], match: str) -> dict[str, float]:
    """Amount of the matched quantity that each arm will spend, in whole steps; empty for a budget in minutes."""
    spent = {}
    for name, config in configs.items():
        plan = plans[name]
        if (steps := plan.num_steps(config)) is not None:
            each = 3.0 * config.flops(plan.context) if match == "flops" else 1
            spent[name] = steps * plan.tokens_per_step * each
    return spent


def threads_of(executor: Executor, asked: int | None, match: Match | None) -> int | None:
    """Of each run: as asked for; where several are at work at once, each has its share of the cores. Raises
    RequestError where they would have to share the time that is to be equal."""
    if executor.workers == 1:
        return asked
    if match == "minutes" and executor.shared:
        message = f"--workers {executor.workers}: runs side by side slow each other, so minutes are no budget for them"
        raise RequestError(message, code="conflict", field="workers", value=executor.workers, expected="--tokens")
    return asked or max(1, available_cores() // executor.workers)


def unequal(spent: dict[str, float], match: str) -> list[str]:
    """A note if arms spend different amounts of the matched quantity, because every run ends with a whole step."""
    if not spent or not min(spent.values()):
        return []
    least, most = min(spent, key=spent.__getitem__), max(spent, key=spent.__getitem__)
    apart = spent[most] / spent[least] - 1
    if apart <= WORTH_SAYING:
        return []
    unit = {"flops": "training FLOPs", "minutes": "time"}.get(match, match)
    return [f"Runs end with a whole step, so {most} spends {apart:.0%} more {unit} than {least}."]


def recipes(
    configs: dict[str, ModelConfig],
    recipe: dict[str, Any],
    match: Match | None,
    vocab_size: int,
) -> dict[str, Recipe]:
    """The recipe of each arm under one budget.

    `match` says what is equal: tokens, training FLOPs, or minutes. With `flops` and a budget in tokens, the first arm
    takes the tokens and the others as many FLOPs as it spends. What an EXPR changes of the recipe is for its arm
    alone. Raises RequestError where a recipe is wrong, or is not for the model of its arm."""
    given = [name for name in ("tokens", "flops", "minutes") if recipe.get(name) is not None]
    if len(given) != 1:
        raise RequestError(
            f"give one budget: --tokens, --flops, --minutes or --steps; {' and '.join(given) or 'none'} given",
            code="conflict", field="budget", value=given,
        )  # fmt: skip
    budget: dict[str, Any] = {given[0]: recipe[given[0]]}
    match = given[0] if match is None else match  # type: ignore[assignment]
    if match == "flops" and given == ["tokens"]:
        Recipe.of(tokens=recipe["tokens"])  # named as it was given, should it be wrong
        name, config = next(iter(configs.items()))
        first = fit(config, vocab_size, recipe["context"], own_value(name, config, "vocab_size"))
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
            plan = with_recipe(common, split_recipe(name)[1])
            refuse_clipping(config, plan.qk_clip)
            plan.optimizer.check(config)
        except RequestError as error:
            raise error.of(name) from None
        made[name] = plan.vary(learning_rate=plan.peak_learning_rate(config))
    return made


def compiled_alike(
    configs: dict[str, ModelConfig], plans: dict[str, Recipe], before: bool | None
) -> tuple[dict[str, Recipe], machine.Settings]:
    """The recipes with `compile` decided, and the settings to report. All arms compile or none does: as the runs
    `before` did, else if it pays for at least one arm. An arm whose expression sets `compile` keeps its value."""
    plans = {name: plan.vary(compile=before) if plan.compile is None else plan for name, plan in plans.items()}
    made = [settings(config, plans[name]) for name, config in configs.items()]
    how = next((one for one in made if one.compile), made[0])
    return {n: plan.vary(compile=how.compile) if plan.compile is None else plan for n, plan in plans.items()}, how
