"""`gf.plan`: plans from models and options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast, overload

import torch

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.files import check_output, output
from glassformer.machine import dtype_of
from glassformer.naming.resolve import ModelLike, files_of, resolve
from glassformer.parallel.layout import RANKS, Layout
from glassformer.planning.machines import Cluster, Price, cluster
from glassformer.planning.memory import LOSSES, Loss
from glassformer.planning.planned import Plans, PrintedPlan
from glassformer.planning.plans import Plan, check_one_of, generation
from glassformer.planning.search import Search, find_layouts
from glassformer.planning.timed import Timed, timed
from glassformer.planning.training import TrainingPlan, check_workload, plan_training
from glassformer.training import Recipe
from glassformer.training.optimizers import OptimizerConfig
from glassformer.typed import typed
from glassformer.units import count, quantity

MASTERED = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Supported dtypes of stored weights in training."""
COMMON = {"context", "batch"}
PLACED = {*COMMON, "dtype", "machine", "nodes", "machines", "price", "explain", "out"}
TAKES = {
    "generate": {*PLACED, "state_dtype", "weights"},
    "train": {*PLACED, "tokens", "optimizer", "recompute", "layout", "micro_batch", "weights", "loss", "finetune"},
    "find": {*PLACED, "tokens", "optimizer"},
    "here": COMMON,
}
"""Options of each mode of `plan`; others are refused."""


class Options(TypedDict, total=False):
    """Options of `plan`, without the modes (generate, train, find, here); `TAKES` lists the options of each mode."""

    context: int | str | None
    batch: int
    dtype: torch.dtype | str
    state_dtype: torch.dtype | str | None
    machine: str | Cluster | None
    nodes: int
    machines: str | Path | None
    price: str | None
    explain: bool
    tokens: float | str | None
    optimizer: str
    recompute: str
    layout: Layout | str | None
    micro_batch: int | None
    weights: str | None
    loss: str
    out: str | Path | None
    force: bool
    command: str


@overload
def plan(model: ModelLike, *, train: Literal[True], **options: Unpack[Options]) -> TrainingPlan: ...
@overload
def plan(model: ModelLike, *, finetune: str, train: bool = ..., **options: Unpack[Options]) -> TrainingPlan: ...
@overload
def plan(model: ModelLike, *, find: Literal[True], train: bool = ..., **options: Unpack[Options]) -> Search: ...
@overload
def plan(model: ModelLike, *, here: Literal[True], **options: Unpack[Options]) -> Timed: ...
@overload
def plan(model: ModelLike, *, generate: bool = ..., **options: Unpack[Options]) -> Plan: ...
@overload
def plan(
    model: list[Any] | tuple[Any, ...] | Mapping[str, Any],
    *,
    generate: bool = ...,
    train: bool = ...,
    find: bool = ...,
    here: bool = ...,
    finetune: str | None = ...,
    **options: Unpack[Options],
) -> Plans[Any]: ...


@typed
def plan(
    model: ModelLike | list[ModelLike] | tuple[ModelLike, ...] | Mapping[str, ModelLike],
    *,
    generate: bool = False,
    train: bool = False,
    find: bool = False,
    here: bool = False,
    context: int | str | None = None,
    batch: int = 1,
    dtype: torch.dtype | str = "bfloat16",
    state_dtype: torch.dtype | str | None = None,
    machine: str | Cluster | None = None,
    nodes: int = 1,
    machines: str | Path | None = None,
    price: str | None = None,
    explain: bool = False,
    tokens: float | str | None = None,
    optimizer: str = "adamw",
    recompute: str = "none",
    layout: Layout | str | None = None,
    micro_batch: int | None = None,
    weights: str | None = None,
    loss: str = "chunked",
    finetune: str | None = None,
    out: str | Path | None = None,
    force: bool = False,
    command: str = "",
) -> Any:
    """Counts weights, decode state and FLOPs of a model, exactly, without building it; plans its training.

    Parameters
    ----------
    model
        An expression, a path, a config or a model; or several of them, as a list or as a mapping from names.
    generate
        Plan generation (the default); a model that cannot generate is then refused.
    train
        Plan a training step of `batch` sequences over all ranks: memory of one rank and, with `machine`, the time.
    find
        Search the layouts whose training step fits `machine`, fastest first.
    here
        Build the model and time a few training steps and decoding steps on this machine.
    context
        Tokens of a sequence, 4096 or "4k"; by default the context that the model is trained for, for several models the
        shortest of theirs.
    batch
        Sequences in one batch; in training, of all ranks.
    dtype
        Compute dtype; when generating, also the dtype of the weights.
    state_dtype
        dtype of the decode state; by default that of the weights.
    machine
        Accelerators, "h100" or "h100:8". Adds what fits, times as intervals, and prices.
    nodes
        Number of nodes, each with the accelerators of `machine`.
    machines
        File with more machines, in the format of planning/machines.yaml.
    price
        Price of one accelerator-hour, "2.5USD"; by default that of the machine's file.
    explain
        Print every figure with its formula.
    tokens
        Training tokens, 15e12 or "15T". With `machine`, adds days, energy and cost.
    optimizer
        Optimizer of training: adamw, muon, lion, adafactor or sgd.
    recompute
        Activations that the backward pass recomputes: "none", "selective", "alternate" or "full".
    layout
        Parallel layout, "dp=8,tp=2,zero=3,micro=1,recompute=full"; by default ZeRO stage 3 over all accelerators.
    micro_batch
        Sequences of one forward pass of a rank, as in `gf.train`; by default all of a rank. The same as micro=N in
        `layout`.
    weights
        dtype of stored weights; by default `dtype`. "int8" and "int4" compute in `dtype`. In training: "float32", or
        "bfloat16" with float32 master weights.
    loss
        How logits are materialised in training: "chunked"; "in_place" (once, in `dtype`); "fused" (twice); "whole"
        (eager torch: also three fp32 copies).
    finetune
        Plan a training step of adapters on every linear layer, "lora:16", with all other weights frozen.
    out
        HTML page to write.
    force
        Replace a file that this program did not write. A config that is read is never replaced.
    command
        Command that the page shows for copying.

    Returns
    -------
    Plan, TrainingPlan, Search, Timed or Plans
        A plan of generation; with `train` or `finetune` of a training step; with `find` the layouts; with `here` the
        measured times. `Plans` for several models.

    Raises
    ------
    RequestError
        If a value is out of range, an option is not one of the mode's, a layout does not divide or has other ranks than
        there are accelerators, a machine is unknown, or a price has no currency.

    Examples
    --------
    >>> import glassformer as gf
    >>> cost = gf.plan("llama-2-70b", batch=8, weights="int4")
    >>> cost.weight_bytes, cost.state_bytes_per_token
    (34488324096, 327680.0)
    >>> gf.plan("llama-7b", train=True, machine="h100:8", batch=8).fits
    True
    """
    asked = locals()
    mode = _mode(generate, train or finetune is not None, find, here)
    check_options(mode, {name: asked[name] for name in set().union(*TAKES.values())})
    named = _named(model)
    on = None if machine is None else _on(machine, nodes, machines, price)
    if on is None:
        _refuse_unplaced(
            {"price": price, "machines": machines, "tokens": tokens, "nodes": None if nodes == 1 else nodes}
        )
    step = _Step(batch, dtype_of(dtype), Recipe.of(tokens=1, optimizer=optimizer).optimizer, on, _tokens(tokens))
    state = None if state_dtype is None else dtype_of(state_dtype, "state_dtype")
    length = None if context is None else count(context, "context")
    if length is None:
        length = min(config.context for config in named.values())
    for config in named.values():
        check_workload(config, batch, length)

    def planned(name: str, config: ModelConfig) -> PrintedPlan:
        if mode == "find":
            return step.search(name, config, length)
        if mode == "train":
            return step.plan(config, length, layout, recompute, micro_batch, weights, loss, finetune)
        if generate and not config.writes:
            message = f"{name} is bidirectional and generates no text; leave out generate, or plan its training"
            raise RequestError(message, code="conflict", field="generate", value=name)
        return generation(config, batch, length, step.dtype, state, weights, on)

    sources = files_of(*_models(model)) if out is not None else []
    if out is not None:
        check_output(out, force=force, sources=sources)
    shortened = {name: one.context for name, one in named.items() if one.context > length and context is None}

    def whole(made: Mapping[str, PrintedPlan]) -> Any:
        several = isinstance(model, Mapping | list | tuple)
        result = Plans(tuple(made.values()), length, shortened) if several else next(iter(made.values()))
        return replace(result, command=command)

    result = timed(named, length, batch, whole) if mode == "here" else whole({
        name: replace(planned(name, config), name=name, explain=explain) for name, config in named.items()
    })  # fmt: skip
    if out is not None:
        with output(out, force=force, sources=sources):
            result.report(out)
    return result


def _mode(generate: bool, train: bool, find: bool, here: bool) -> str:
    """Returns the requested mode: "generate", "train", "find" or "here". Raises RequestError for two modes, except that
    `find` may be given with `train`."""
    asked = [name for name, value in zip(TAKES, (generate, train, find, here), strict=True) if value]
    if len(asked) > 1 and asked != ["train", "find"]:
        message = f"give one of {' and '.join(asked)} at a time"
        raise RequestError(message, code="conflict", field=asked[0], value=asked)
    return asked[-1] if asked else "generate"


def check_options(mode: str, options: Mapping[str, Any]) -> None:
    """Raises RequestError for a given option of `plan` that its mode does not take."""
    defaults = {name: one.default for name, one in inspect.signature(plan).parameters.items()}
    given = {name: value for name, value in options.items() if str(value).removeprefix("torch.") != str(defaults[name])}
    wrong = sorted(set(given) - TAKES[mode], key=list(options).index)
    if wrong:
        takers = [other for other, taken in TAKES.items() if taken >= set(wrong)]
        are = "is" if len(wrong) == 1 else "are"
        remedy = f", but for {' and '.join(takers)}" if takers else "; leave it out"
        raise RequestError(
            f"{' and '.join(wrong)} {are} not for a plan of mode {mode}{remedy}",
            code="conflict", field=wrong[0], value=given[wrong[0]], expected="left out",
        )  # fmt: skip


def _models(model: Any) -> list[ModelLike]:
    return list(model.values() if isinstance(model, Mapping) else model if isinstance(model, list | tuple) else [model])


def _named(model: Any) -> dict[str, ModelConfig]:
    """Returns {name: config} for one model or for a collection of models. Raises RequestError for an empty
    collection."""
    if isinstance(model, Mapping):
        named = dict(model)
    else:
        numbered = enumerate(_models(model), 1)
        named = {str(one) if isinstance(one, str | Path) else f"model {i}": one for i, one in numbered}
    if not named:
        raise RequestError("plan needs at least one model, such as llama-7b", code="missing", field="models")
    return {str(name): resolve(one) for name, one in named.items()}


def _refuse_unplaced(options: Mapping[str, object]) -> None:
    """Raises RequestError for a given option that has no effect unless a machine is given."""
    field = next((name for name, value in options.items() if value is not None), None)
    if field is not None:
        expected = "left out without a machine, such as h100:8"
        raise RequestError(code="conflict", field=field, value=options[field], expected=expected)


@dataclass(frozen=True)
class _Step:
    """Options of `plan` that are common to the plan of a training step and to the search for layouts."""

    batch: int
    dtype: torch.dtype
    optimizer: OptimizerConfig
    on: Cluster | None
    tokens: float | None

    def plan(
        self,
        config: ModelConfig,
        context: int,
        layout: Layout | str | None,
        recompute: str,
        micro_batch: int | None,
        weights: str | None,
        loss: str,
        finetune: str | None,
    ) -> TrainingPlan:
        on = self.on
        default = Layout(dp=on.count, zero=3) if on is not None and on.count > 1 else Layout()
        shared = (Layout.of(layout) if isinstance(layout, str) else layout or default).in_microbatches(micro_batch)
        if recompute != "none":
            shared = shared.recomputing(recompute)
        kept = weights or "float32"
        check_one_of("weights", kept, MASTERED)
        check_one_of("loss", loss, LOSSES)
        if finetune is not None and kept != "float32":
            expected = "left out with finetune, whose frozen weights are kept in dtype"
            raise RequestError(code="conflict", field="weights", value=weights, expected=expected)
        planned = plan_training(
            config, self.batch, context, self.dtype, self.optimizer, shared, MASTERED[kept],
            on.machine.device if on is not None else "cpu", cast(Loss, loss), _rank(finetune),
        )  # fmt: skip
        return planned.placed(on, self.tokens)

    def search(self, name: str, config: ModelConfig, context: int) -> Search:
        if self.on is None:
            message = "find searches the layouts of a machine, such as h100:8"
            raise RequestError(message, code="missing", field="machine")
        found = find_layouts(config, self.batch, context, self.dtype, self.optimizer, self.on)
        fitting = (replace(one.placed(self.on, self.tokens), name=name) for one in found.fitting)
        return replace(found, fitting=tuple(fitting))


def _rank(finetune: str | None) -> int:
    """Returns the rank of adapters: 16 for "lora:16", 0 for None."""
    if finetune is None:
        return 0
    kind, _, rank = finetune.partition(":")
    if kind != "lora" or not (rank.isascii() and rank.isdecimal() and 0 < len(rank) < 6 and int(rank)):
        raise RequestError(code="range", field="finetune", value=finetune, expected="lora:RANK, such as lora:16")
    return int(rank)


def _tokens(asked: float | str | None) -> float | None:
    """Returns the number of training tokens, given as a number or as text such as "15T"; None if not given."""
    tokens = None if asked is None else quantity(asked, field="tokens")
    if tokens is not None and tokens < 1:
        raise RequestError(code="range", field="tokens", value=asked, expected="a number of tokens from 1 up")
    return tokens


def _on(machine: str | Cluster, nodes: int, own: str | Path | None, price: str | None) -> Cluster:
    on = cluster(machine, nodes, own) if isinstance(machine, str) else machine
    if on.count > RANKS:
        expected = f"{RANKS:,} accelerators at most, with the nodes"
        raise RequestError(code="range", field="machine", value=machine, expected=expected)
    return on if price is None else replace(on, machine=on.machine.replace(price=Price.of(price)))
