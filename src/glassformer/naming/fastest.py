"""Choice of the precision of weights for decoding on this machine, from the seconds that a token takes in each.

The seconds are measured once for a processor, on a small model whose weights come from memory, and kept in
`precision.json` in the cache folder. Precisions are those whose cost in quality was measured (`COST`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from glassformer.config import ModelConfig
from glassformer.conversion import checkpoints
from glassformer.conversion.gguf import is_on_grid_of_4_bits
from glassformer.errors import RequestError
from glassformer.files import remember, remembered
from glassformer.generation.steps import decode
from glassformer.machine import thread_cache
from glassformer.machine.threads import at_most
from glassformer.naming.models import parse, preset, trial
from glassformer.options import AUTO, ModelOptions
from glassformer.parts import few_rows
from glassformer.parts.precision import packs_bf16
from glassformer.parts.quantized import quantize

Options = TypeVar("Options", bound=ModelOptions)
FILE = "precision.json"
COST = {"float32": 0.0, "bf16": 0.0, "int8": 0.0036, "int4": 0.0018}
"""Relative rise of the perplexity in each precision, the most exact first: SmolLM2-135M, with a head of 8 bits for int4
(docs/benchmarks/quality.md). The file of that model has 4 bits, so the figure of int4 holds only for such files."""
MEASURED = frozenset({"attention", "glu", "mlp"})
"""Kinds of mixers and feed-forward networks of the sample model, whose times hold for models of these."""
LARGE = 100_000_000
"""Least number of parameters of a model whose precision is chosen: the cost in quality of smaller ones was not
measured, and they are fast in any precision."""
PAYS = 0.9
"""A less exact precision is chosen if a token takes less than this fraction of the time."""
SAMPLE = "llama@10m+d_model=512+heads=8+hidden=1536+layers=2+vocab_size=512+context=64"
ROUNDS = 5
OTHER_BYTES = 1 << 26
"""Bytes that are read between two steps, so that weights come from memory."""


class Unpaid(UserWarning):
    """Warning that weights in fewer bits save no time on this processor."""


def seconds(measure: Callable[[], dict[str, float]] | None = None) -> Mapping[str, float]:
    """Returns the seconds of a token of the sample model in each precision on this processor, measured on the first
    call for a machine and then kept; empty if the clock is too coarse."""
    key = f"{thread_cache.here()}, {few_rows.kernel() or 'torch'}, bf16 {'packed' if packs_bf16() else 'plain'}"
    found = remembered(FILE, key)
    if not _are_seconds(found):
        found = (measure or measured)()
        if not _are_seconds(found):
            return {}
        remember(FILE, key, found)
    return dict(found)


def _are_seconds(found: Any) -> bool:
    return isinstance(found, dict) and found.keys() == COST.keys() and all(
        isinstance(one, float) and 0 < one < 1e3 for one in found.values()
    )  # fmt: skip


def measured() -> dict[str, float]:
    """Measures the seconds of a token of the sample model in each precision: the best of some rounds in turn, by one
    thread and its own clock, since other processes may use the cores."""
    with trial(), torch.random.fork_rng(devices=[]):
        plain = preset(SAMPLE).build(seed=0).eval().requires_grad_(False)
    models = {"float32": plain, "bf16": copy.deepcopy(plain).bfloat16()}
    if packs_bf16():
        quantize(models["bf16"], "bf16")
    for kind in ("int8", "int4"):
        models[kind] = quantize(copy.deepcopy(plain), kind).to(torch.bfloat16)  # type: ignore[assignment]
    best: dict[str, float] = {}
    other, tokens = torch.ones(OTHER_BYTES // 4), torch.zeros(1, 1, dtype=torch.long)
    with torch.inference_mode(), at_most(1):
        states = {kind: model.init_state(1, ROUNDS + 1) for kind, model in models.items()}
        for round in range(ROUNDS + 1):
            for kind, model in models.items():
                other.sum()
                began = time.thread_time()
                decode(model, tokens, states[kind])
                took = time.thread_time() - began
                if round:  # the first builds what the step needs
                    best[kind] = min(best.get(kind, took), took)
    return best


def fastest(config: ModelConfig, most_exact: str | None = None, four_bits: bool = False) -> str | None:
    """Returns the precision of weights with which a model decodes fastest on this CPU: bf16, int8, int4, or None for
    weights as they are stored.

    most_exact   the most exact precision to consider; None for all
    four_bits    True if the weights of the file are on the grid of int4 (`is_on_grid_of_4_bits`); otherwise int8 is
                 the least exact precision to consider, unless `most_exact` is int4

    A less exact one is chosen only if it saves time, and for models of `LARGE` parameters and more, of `MEASURED`
    parts, that generate text, without an encoder."""
    parts = {part.kind for layer in config.layers() for part in (layer.mixer, layer.ffn) if part is not None}
    known = config.writes and config.encoder is None and parts <= MEASURED
    if config.num_params() < LARGE or not known or not (taken := seconds()):
        return most_exact
    order = [one for one in COST if four_bits or one != "int4" or most_exact == "int4"]
    chosen = most_exact or order[0]
    for kind in order[order.index(chosen) + 1 :]:
        if taken[kind] < PAYS * taken[chosen]:
            chosen = kind
    return None if chosen == order[0] else chosen


def decided(
    expression: str | Path, options: Options, device: str, limit: Callable[[ModelConfig], str | None] | None = None
) -> tuple[Options, str]:
    """Returns the options with the precision of weights decided, and a sentence about a precision that was chosen,
    empty for weights as they are stored and for a precision that was asked for.

    If it is `auto`, a dtype, a compiled step or another device than the CPU keeps weights as they are stored.
    `limit(config)`: the most exact precision to consider, as in `fastest`, because more exact weights do not fit into
    memory."""
    if options.quantize != AUTO:
        return options, ""
    asked = replace(options, quantize=None)
    if device != "cpu" or options.dtype is not None or options.compile:
        return asked, ""
    try:
        with trial():
            config = preset(expression)
    except RequestError:  # loading says it
        return asked, ""
    most_exact = limit(config) if limit else None
    kind = fastest(config, most_exact, has_four_bits(expression))
    if kind is None:
        return asked, ""
    found = replace(asked, **how(kind))
    return found, reason(kind, found.quantize or str(found.dtype), kind == most_exact)


def has_four_bits(expression: str | Path) -> bool:
    """Returns True if an expression names a GGUF without changes whose weights are on the grid of int4."""
    name, _, changes = parse(expression)
    if changes or name.startswith("hf:"):  # a question may not start a download
        return False
    try:
        path = checkpoints.locate(name)
    except RequestError:  # loading says it
        return False
    return path.suffix == ".gguf" and is_on_grid_of_4_bits(path)


def how(kind: str | None) -> dict[str, Any]:
    """Returns the options quantize and dtype with which weights are loaded in a precision."""
    if kind == "bf16" and not packs_bf16():
        return {"quantize": None, "dtype": "bfloat16"}
    return {"quantize": kind}


def reason(kind: str, name: str, too_large: bool) -> str:
    """Returns a sentence about a precision that was chosen: for its speed, or because weights in more bits are too
    large for the memory. `name`: the option that asks for it."""
    if too_large:
        gain = "more exact ones do not fit into the free memory"
    else:
        taken = seconds()
        gain = f"{taken['float32'] / taken[kind]:.1f} times as fast here as float32"
        gain += f", at {COST[kind]:.1%} more perplexity of SmolLM2" if COST[kind] else ""
    return f"weights in {name}: {gain}; --quantize none takes them as they are stored"


def unpaid(kind: str) -> str:
    """Returns a sentence if a token takes as long on this processor with weights in fewer bits as with those in bf16 or
    float32; otherwise an empty text."""
    if not (taken := seconds()):
        return ""
    others = {one: taken[one] for one in ("float32", "bf16") if one != kind}
    best = min(others, key=lambda one: others[one])
    ratio = taken[kind] / others[best]
    if ratio < PAYS:
        return ""
    name = "bfloat16" if kind == "bf16" else kind
    return f"{name} saves memory and no time on this processor: a token takes {ratio:.2f} times as long as in {best}"
