"""Loading a model as the options of generate, chat and ask say, and showing its text."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable

import torch

from glassformer import machine
from glassformer.cli.options import Drawing
from glassformer.conversion.weights import fold
from glassformer.errors import RequestError, WorkError, no_memory
from glassformer.figures.terminal import size
from glassformer.generation import Sampling
from glassformer.loaded import Loaded
from glassformer.naming.loading import load
from glassformer.parts.precision import onednn_in_bf16
from glassformer.parts.quantized import QUANTIZED, quantize

TOP_K = 40
STATE_DTYPES = {**machine.DTYPES, "int8": torch.int8}
LIMITS = {"n": (1, 1000), "beams": (1, 256), "logprobs": (0, 100), "max_new_tokens": (1, 1_000_000)}
INTERRUPTED = 130
"""The exit status of what Ctrl-C ended, as in a shell."""


def ready(asked: Drawing) -> Sampling:
    """Sets the process up as asked; RequestError for numbers that cannot be."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what cannot show a character shows another
    chosen = machine.settings(device_of(asked), threads=asked.threads, compile=asked.compile)
    machine.apply(chosen)
    if chosen.device != "cpu":
        say(f"on {chosen.device}")
    if asked.seed is None:
        torch.seed()
    for name, (low, high) in LIMITS.items():
        value = getattr(asked, name, None)
        if value is not None and not low <= value <= high:
            raise RequestError(
                f"{name}={value} must be from {low:,} to {high:,}", code="range", field=name, value=value
            )
    rules = {name: getattr(asked, name) for name in Sampling.model_fields if hasattr(asked, name)}
    if all(rules[name] is None for name in ("top_k", "top_p", "min_p", "typical_p")):
        rules["top_k"] = TOP_K
    rules["logit_bias"] = biases(asked.logit_bias or ())
    return Sampling(**rules)


def biases(given: Iterable[str]) -> dict[int, float]:
    found = {}
    for text in given:
        token, _, value = text.partition("=")
        try:
            found[int(token)] = float(value)
        except ValueError:
            raise RequestError(
                f"logit_bias={text!r}: write ID=VALUE, such as 42=-100", code="syntax", field="logit_bias", value=text
            ) from None
    return found


def state_dtype(asked: Drawing) -> torch.dtype | None:
    """Returns the dtype of the decode state; None for that of the weights."""
    return None if asked.state_dtype is None else STATE_DTYPES[asked.state_dtype]


def check_memory(loaded: Loaded, rows: int, max_len: int, dtype: torch.dtype | None, instead: str) -> None:
    """RequestError where so large a state does not fit, before it is made."""
    device = loaded.model.device
    wanted, free = loaded.model.init_state(rows, max_len, dtype, device="meta").nbytes, machine.free_memory(device)
    if free is not None and wanted > free:
        where = "this machine" if device.type == "cpu" else str(device)
        raise RequestError(
            f"the state of {max_len:,} tokens in {rows} row{'s' * (rows > 1)} takes {size(wanted)}, and {where} "
            f"has {size(free)} of memory free; {instead}",
            code="memory", field="context", value=max_len,
        )  # fmt: skip


def device_of(asked: Drawing) -> str:
    """The device asked for; `auto` stays on the CPU with what only that can do."""
    chosen = machine.device_named(asked.device)
    only_here = asked.quantize == "bf16" or (asked.compile and not machine.can_compile(chosen))
    return "cpu" if asked.device == "auto" and only_here else chosen


def fetch(expression: str, asked: Drawing) -> Loaded:
    dtype = asked.dtype or ("bfloat16" if asked.quantize in QUANTIZED else None)
    device = device_of(asked)
    try:
        loaded = load(expression, dtype=dtype and machine.DTYPES[dtype], device=device, quantize=asked.quantize)
    except RuntimeError as error:
        if device == "cpu" or not no_memory(error):
            raise
        raise WorkError(
            f"{expression} does not fit into the memory of {device}; use --device cpu", code="memory"
        ) from None
    half = asked.quantize is None and loaded.model.dtype == torch.bfloat16
    if half and not asked.compile and onednn_in_bf16(loaded.model.device.type):  # the same numbers, read sooner
        loaded.model = fold(loaded.model)
        quantize(loaded.model, "bf16")
    return loaded


def building() -> None:
    say("building the compiled step: about a minute, once; it is kept")


def say(text: str) -> None:
    print(text, file=sys.stderr)


def show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
