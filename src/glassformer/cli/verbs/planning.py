"""Verbs that need no weights: plan, presets, explain, tokens, schema.

A verb imports what computes inside its function, so that its help imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from glassformer.cli.options import (
    ChoiceName,
    Count,
    Data,
    Flag,
    Force,
    Json,
    Named,
    Optimizer,
    command_line,
    text_of,
)
from glassformer.names.checks import check_machine, check_tokenizers


def plan(
    models: Annotated[list[Named], Parameter(negative="")],
    /,
    *,
    context: Count | None = None,
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
    tokens: Count | None = None,
    optimizer: Optimizer = "adamw",
    recompute: Literal["none", "selective", "alternate", "full"] = "none",
    layout: str | None = None,
    micro_batch: int | None = None,
    weights: Literal["float32", "bfloat16", "int8", "int4"] | None = None,
    loss: Literal["chunked", "in_place", "fused", "whole"] = "chunked",
    find: Flag = False,
    finetune: str | None = None,
    here: Flag = False,
    out: str | None = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Compute parameters, FLOPs, memory and cache of models exactly; with --machine, also time and cost.

    Parameters
    ----------
    models
        Model expressions NAME[@SIZE][+CHANGE...], for example llama-3-8b qwen3-8b+window:4096.
    context
        Tokens of a sequence; by default the context that the model is trained for, for several models the shortest of
        theirs.
    batch
        Sequences in one batch.
    dtype
        Compute dtype; when generating, also the dtype of the weights.
    state_dtype
        dtype of the decode state; by default that of the weights.
    machine
        Accelerators of a node, for example h100 or h100:8. Adds the largest batch and context that fit, the range of
        the time per token (per step with --train), and its cost.
    nodes
        Number of nodes, each with the accelerators of --machine.
    machines
        File with more machines, in the format of planning/machines.yaml.
    price
        Price per accelerator-hour, for example 2.5USD; by default that of the machine.
    explain
        Show every figure with its formula: parameters by component and by matrix of a layer, training FLOPs by
        operation.
    generate
        Plan decoding; this is the mode without --train, --find and --here.
    train
        Plan a training step of --batch sequences over all ranks: memory of one rank and, with --machine, the time.
    tokens
        Training tokens, for example 15T. With --machine, and --train or --find, adds days, energy and cost.
    recompute
        With --train, activations that the backward pass recomputes.
    layout
        With --train, the parallel layout: dp=8,tp=2,zero=3,micro=1,recompute=full.
    micro_batch
        With --train, sequences of one forward pass of a rank; by default all of a rank.
    weights
        dtype of stored weights; by default --dtype. int8 and int4 compute in --dtype. With --train: float32, or
        bfloat16 with float32 master weights.
    loss
        Logits held in memory with --train. chunked: one chunk; in_place: one copy in --dtype; fused: two copies in
        --dtype; whole: as fused, and three more in fp32, like eager torch.
    find
        Search the layouts whose training step fits --machine, fastest first; --tokens, --explain and --out describe the
        fastest.
    finetune
        Adapters on every linear layer, lora:RANK: plan a training step of them, with all other weights frozen.
    here
        Build each model and time a few training steps and decoding steps of it on this machine.
    out
        HTML page to write: parameters, memory and time by component and by matrix of a layer, every figure with its
        formula.
    """
    if machine is not None and machines is None:
        check_machine(machine)

    from glassformer import planning
    from glassformer.cli.show import show

    planned = planning.plan(
        models, generate=generate, train=train, find=find, here=here, context=context, batch=batch,
        dtype=dtype, state_dtype=state_dtype, machine=machine, nodes=nodes, machines=machines, price=price,
        explain=explain, tokens=tokens, optimizer=optimizer, recompute=recompute, layout=layout,
        micro_batch=micro_batch, weights=weights, loss=loss, finetune=finetune, out=out, force=force,
        command=command_line(),
    )  # fmt: skip
    show(planned, json)


def presets(word: str | None = None, /, *, json: Json = False) -> None:
    """List the names, sizes and changes that a model expression is made of.

    Parameters
    ----------
    word
        Show only names and changes that contain it, for example: glassformer presets rope
    """
    from glassformer.cli.show import show
    from glassformer.naming.catalogue import PresetCatalogue

    show(PresetCatalogue.of(word), json)


def explain(word: str, /, *, guide: Flag = False, json: Json = False) -> None:
    """Explain a word: what it is for, its formula, models that have it, its cost, what was measured.

    Parameters
    ----------
    word
        A word of the grammar (rope, gqa), a topic (attention, softmax, flops), or a term of the glossary.
    guide
        Show the values that guides to the transformer print next to those of a worked example.
    """
    from glassformer.names.explained import check_explained

    check_explained(word)

    from glassformer.cli.show import show
    from glassformer.laboratory import explaining

    show(explaining.explain(word, guide=guide), json)


def tokens(
    text: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    tokenizers: Annotated[
        str, ChoiceName(lambda names: check_tokenizers(names.split(","))), Parameter(name="--with")
    ] = "byte,char,word,bpe:4096",
    data: Data = "python-docs",
    out: str | None = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Cut a text into tokens by several tokenizers: pieces, ids, unknown tokens, bytes per token.

    Parameters
    ----------
    text
        The text; @FILE reads a file, - standard input.
    tokenizers
        Tokenizers, separated by commas: byte, char, word:SIZE, bpe:SIZE, a tokenizer.json, or a model that has one,
        such as smollm2 or a run folder. char, word and bpe are trained on --data.
    out
        HTML page to write: pieces and ids by each tokenizer, and the loop of generation.
    """
    from glassformer.cli.show import show
    from glassformer.laboratory import tokenized

    found = tokenized.tokens(text_of(text, "text"), tokenizers, data=data, out=out, force=force, command=command_line())
    show(found, json)


def schema(*, json: Json = False) -> None:
    """Print the JSON Schema of the config files."""
    from json import dumps

    from glassformer.config import ModelConfig

    print(dumps(ModelConfig.json_schema(), indent=2))
