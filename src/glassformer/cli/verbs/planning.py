"""Verbs that need no weights: plan, presets, schema.

A verb imports what computes inside its function, so that its help imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from glassformer.cli.options import (
    Count,
    Flag,
    Json,
    Optimizer,
    count,
    whole,
)


def plan(
    models: Annotated[list[str], Parameter(negative="")],
    /,
    *,
    context: Annotated[Count | None, Parameter(converter=count)] = None,
    batch: int = 1,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    state_dtype: Literal["float32", "bfloat16", "int8"] | None = None,
    machine: Annotated[str | None, Parameter(name=["--machine", "--gpu"])] = None,
    nodes: int = 1,
    machines: str | None = None,
    price: str | None = None,
    explain: Flag = False,
    generate: Flag = False,
    train: Flag = False,
    tokens: Annotated[Count | None, Parameter(converter=count)] = None,
    optimizer: Optimizer = "adamw",
    recompute: Literal["none", "selective", "alternate", "full"] = "none",
    layout: str | None = None,
    weights: Literal["float32", "bfloat16", "int8", "int4"] | None = None,
    loss: Literal["chunked", "in_place", "fused", "whole"] = "chunked",
    find: Flag = False,
    finetune: str | None = None,
    here: Flag = False,
    again: Flag = False,
    out: str | None = None,
    json: Json = False,
) -> None:
    """What generating with these models takes: weights, decode state and FLOPs, exactly, before anything is built.

    Parameters
    ----------
    models
        Expressions: NAME[@SIZE][+CHANGE...].
    context
        Tokens of a sequence; by default all that the model is trained to read.
    batch
        Sequences at once.
    dtype
        Of products, and in generation of the weights.
    state_dtype
        What the state is kept in; by default as the weights.
    machine
        Accelerators, h100 or h100:8: how many sequences, and how long a context, fit; the time of a token, or with
        --train of a step, as an interval; and what it costs.
    nodes
        Of as many accelerators each as --machine says.
    machines
        A file of machines of your own, beside ours (planning/machines.yaml shows the fields).
    price
        Of an hour of one accelerator, 2.5USD; by default those of the machine's file.
    explain
        Show every figure with its formula: parameters by component, and what the FLOPs of training are spent on.
    generate
        Generation, as without --train.
    train
        A training step instead, of --batch sequences over all ranks: memory of one rank, and on a --machine its time.
    tokens
        With --train or --find on a --machine, those to train on, 15T: days, energy, and cost.
    recompute
        With --train, what the backward pass computes again.
    layout
        With --train, how ranks share the work: dp=8,tp=2,zero=3,micro=1,recompute=full.
    weights
        What weights are kept in, by default as --dtype says: packed in int8 or int4, products in --dtype. With --train
        float32, or bfloat16 with masters in float32 beside them.
    loss
        With --train, what the loss holds of logits: ours a chunk; in_place and fused those of all tokens once and
        twice in --dtype; whole as eager torch does, three times in float32 besides.
    find
        Search the layouts of a --machine, h100:8, that a training step fits, the fastest first; --tokens, --explain
        and --out are of the fastest.
    finetune
        A training step of adapters on every linear map, lora:16, all else frozen.
    here
        Measure this processor once, and plan a training step and a token of decoding on it.
    again
        With --here, measure anew.
    out
        A page to write: where parameters, memory and time go, every figure with its formula.
    """
    from glassformer.cli.costs import show_plan

    modes = {"generate": generate, "train": train or finetune is not None, "find": find, "here": here}
    flags = {
        "context": whole(context, "context"), "batch": batch, "dtype": dtype, "state_dtype": state_dtype,
        "machine": machine, "nodes": nodes, "machines": machines, "price": price, "explain": explain, "tokens": tokens,
        "optimizer": optimizer, "recompute": recompute, "layout": layout, "weights": weights, "loss": loss,
        "finetune": finetune, "again": again, "out": out,
    }  # fmt: skip
    show_plan(models, [mode for mode, asked in modes.items() if asked], flags, json)


def presets(*, json: Json = False) -> None:
    """List the published models, the sizes, and the changes."""
    from glassformer.cli.show import show_presets

    show_presets(json)


def schema(*, json: Json = False) -> None:
    """Print the JSON Schema of the config files, which is JSON with --json and without."""
    from json import dumps

    from glassformer.config import ModelConfig

    print(dumps(ModelConfig.json_schema(), indent=2))
