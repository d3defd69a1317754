"""Checks that several processes can share a run."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.parallel import context, experts
from glassformer.parallel.launch import ProcessPlace
from glassformer.parallel.layout import Layout
from glassformer.parallel.tensor import check as check_owners
from glassformer.training.objectives import NextTokenConfig
from glassformer.training.recipe import Recipe

PLANNED = ("micro", "recompute")
"""Layout options that `plan` counts and training does not support yet."""


def layout_of(asked: Layout | str | None, world: int) -> Layout:
    """Returns the requested division of work between processes, by default FSDP over all. Raises RequestError if it is
    not for `world` processes."""
    layout = Layout.of(asked) if isinstance(asked, str) else asked
    if layout is None:
        return Layout(dp=world, zero=3 if world > 1 else 0)
    if layout.ranks != world:
        started = "1 process was" if world == 1 else f"{world} processes were"
        raise RequestError(
            f"the layout {layout} is of {layout.ranks} ranks, and {started} started; use --processes {layout.ranks}, "
            f"or a layout of {world}",
            code="conflict", field="layout", value=str(layout), expected=f"{world} ranks",
        )  # fmt: skip
    return layout


def check_shared(config: ModelConfig, recipe: Recipe, layout: Layout, out: str | Path | None) -> None:
    """Raises RequestError if the ranks of this layout cannot share the run."""
    _check_words(layout)
    experts.check(config, layout)
    if layout.ranks == 1:
        return
    if out is None:
        raise _no("out", None, "several processes meet in a run's folder; name one (--out RUN)", "a run folder")
    if layout.zero in (1, 2):
        instead = f"use fsdp={layout.dp}, or replicate={layout.dp}"
        raise _no("zero", layout.zero, f"zero={layout.zero} is planned and not trained; {instead}", "3")
    check_owners(config, layout.tp)
    context.check(config, layout.cp)
    _check_stages(config, recipe, layout)
    if recipe.watch is not None and layout.cp > 1:
        what = f"cp={layout.cp}: watch records attention patterns, and each rank has only the rows of its tokens"
        raise _no("watch", recipe.watch, f"{what}; leave --watch out, or use fsdp={layout.ranks}", "None")
    _check_atoms(recipe, layout)
    if layout.dp > 1 and config.reparam is not None and config.reparam.counts_passes:
        what = f"reparam={config.reparam.kind} follows its weights with every pass, and each process makes fewer"
        raise _no("reparam", config.reparam.kind, f"{what}; use one process", "None")
    if recipe.qk_clip is not None:
        what = f"qk_clip={recipe.qk_clip:g} shrinks heads by the largest score of a step, which no single rank sees"
        raise _no("qk_clip", recipe.qk_clip, f"{what}; leave it out, or use one process", "None")
    if not recipe.optimizer.by_value and (layout.fsdp > 1 or layout.tp > 1):
        what = f"optimizer={recipe.optimizer.kind} moves whole matrices, and {layout} divides them"
        raise _no("optimizer", recipe.optimizer.kind, f"{what}; use adamw, or replicate={layout.ranks}", "adamw")
    if recipe.device.startswith("mps"):
        raise _no("device", recipe.device, "device=mps is one device, for one process; use cpu", "cpu")


def _check_words(layout: Layout) -> None:
    """Raises RequestError for layout options that have no effect here, or are not supported yet."""
    for word in PLANNED:
        if getattr(layout, word) != type(layout).model_fields[word].default:
            what = f"{word}={getattr(layout, word)} is planned (glassformer plan --layout) and not trained yet"
            raise _no(word, getattr(layout, word), f"{what}; leave it out", "nothing")
    for word, beside in {"interleave": "pp", "sp": "tp"}.items():
        if getattr(layout, word) > 1 - (word == "sp") and getattr(layout, beside) == 1:
            what = f"{word}={int(getattr(layout, word))} divides what {beside} divides"
            raise _no(word, getattr(layout, word), f"{what}; give {beside}=2 or more", f"{beside}=2")
    if layout.dp % layout.replicate:
        what = f"replicate={layout.replicate} does not divide the {layout.dp} ranks that share the batch"
        raise _no("replicate", layout.replicate, what, f"a divisor of {layout.dp}")


def _check_stages(config: ModelConfig, recipe: Recipe, layout: Layout) -> None:
    """Raises RequestError if the run cannot be divided into pipeline stages: these need next-token batches in equal
    microbatches."""
    if layout.pp == 1:
        return
    from glassformer.parallel.stages import refuse_unstaged

    refuse_unstaged(config.outline(), layout.pp * layout.interleave)
    if layout.fsdp > 1 or layout.tp > 1 or layout.cp > 1:
        what = f"{layout}: stages keep their weights whole"
        raise _no("pp", layout.pp, f"{what}; use pp={layout.pp},replicate={layout.dp}", "replicate with it")
    if recipe.objective != NextTokenConfig():
        raise _no("objective", recipe.objective.kind, f"pp={layout.pp} trains only on next tokens", "next_token")
    for word, value in {"watch": recipe.watch, "qk_clip": recipe.qk_clip}.items():
        if value is not None:
            raise _no(word, value, f"pp={layout.pp}: {word} reads a whole model, which no rank has", "None")
    each = recipe.atoms // layout.dp
    if each < layout.pp or (layout.interleave > 1 and each % layout.pp):
        micro = max(1, recipe.batch_size // (layout.dp * layout.pp))
        what = f"pp={layout.pp} stages need at least that number of micro-batches, and a rank has {each}"
        raise _no("micro_batch", recipe.micro_batch, f"{what}; use micro_batch={micro}", str(micro))


def _check_atoms(recipe: Recipe, layout: Layout) -> None:
    """Raises RequestError unless the ranks can divide the microbatches (atoms) of a step equally; warns if their
    gradients cannot be added in the order of one process, a binary tree."""
    dp, atoms = layout.dp, recipe.atoms
    if recipe.batch_size % dp:
        near = max(dp, recipe.batch_size // dp * dp)
        raise _no("batch_size", recipe.batch_size, f"{dp} ranks cannot share batch_size={recipe.batch_size}; {near} "
                  "would do", str(near))  # fmt: skip
    if atoms % dp:
        most = recipe.batch_size // dp
        micro = next(size for size in range(min(most, recipe.micro_batch or most), 0, -1) if most % size == 0)
        given = "micro_batch is not given" if recipe.micro_batch is None else f"micro_batch={recipe.micro_batch}"
        pieces = "1 piece" if atoms == 1 else f"{atoms} pieces"
        what = f"{given}, which makes {pieces} of a step for {dp} ranks"
        raise _no("micro_batch", recipe.micro_batch, f"{what}; use micro_batch={micro}", str(micro))
    copies = layout.dp // layout.fsdp
    part = atoms // copies
    if dp & (dp - 1) or (copies > 1 and part & (part - 1)):
        warnings.warn(
            f"{atoms} pieces of a step on {dp} ranks do not form a tree of powers of two: the run is the same each "
            "time, and equal to that of one process within rounding, not bit for bit"
        )


def _no(field: str, value: Any, message: str, expected: str) -> RequestError:
    return RequestError(message, code="conflict", field=field, value=value, expected=expected)


def own_device(place: ProcessPlace | None, device: str) -> str:
    """Returns this rank's device, on CUDA a separate GPU. Raises RequestError if two ranks would share one."""
    if place is None or not device.startswith("cuda"):
        return device
    there = torch.cuda.device_count()
    if there == 1 and place.machine > 1 and "SLURM_STEP_GPUS" in os.environ:  # SLURM shows each task only its own GPU
        return "cuda:0"
    if place.machine > there:
        raise _no("processes", place.machine, f"{place.machine} processes on a machine with {there} GPUs would share "
                  f"one; use {there}", str(there))  # fmt: skip
    return f"cuda:{place.local}"
