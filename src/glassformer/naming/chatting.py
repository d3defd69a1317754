"""Loading of a model with options of computation, and one turn of a chat."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Unpack

import torch

from glassformer import machine
from glassformer.conversion.weights import fold
from glassformer.errors import RequestError, WorkError, check_whole, no_memory
from glassformer.generation.session import Completion, Session
from glassformer.loaded import Loaded
from glassformer.model import STATE_DTYPES
from glassformer.naming.fastest import Unpaid, decided, unpaid
from glassformer.naming.loading import load
from glassformer.naming.resolve import ModelLike, resolve
from glassformer.options import AUTO, ModelKeywords, ModelOptions
from glassformer.parts.precision import onednn_in_bf16, packs_bf16
from glassformer.parts.quantized import QUANTIZED, quantize
from glassformer.text.chat_template import Message
from glassformer.text.messages import as_messages
from glassformer.typed import typed


@typed
def chat(
    model: ModelLike,
    messages: str | Sequence[Message],
    *,
    system: str | None = None,
    context: int | None = None,
    **options: Unpack[ModelKeywords],
) -> Completion:
    """Returns the model's answer to the messages of a chat.

    Parameters
    ----------
    model : str, Path, Model or Loaded
        A model with a chat template.
    messages : str or sequence of mappings
        Such as {"role": "user", "content": "Hello"}; a text is one message of the user.
    system : str, optional
        System message, placed first.
    context : int, optional
        Largest number of tokens of the chat with its answer; by default the model's context.
    **options
        How the answer is generated, as for `Loaded.generate`, and how the model is run: quantize, dtype, state_dtype,
        device, threads, compile (`ModelOptions`).

    Returns
    -------
    Completion
        The answer; append {"role": "assistant", "content": answer.text} to continue the chat.

    Raises
    ------
    RequestError
        For a model without weights or without a chat template, and for messages that its template refuses.

    Examples
    --------
    >>> gf.chat("smollm2", [{"role": "user", "content": "Hello"}], max_new_tokens=20).text  # doctest: +SKIP
    """
    run, rest = split(options)
    loaded = loaded_as(model, run)
    first = [{"role": "system", "content": system}] if system else []
    with Session(loaded, slots=1, context=context, kept=0, dtype=state_dtype(run), compiled=run.compile) as session:
        return session.submit([*first, *as_messages(messages)], **rest).result()


def split(options: Mapping[str, Any]) -> tuple[ModelOptions, dict[str, Any]]:
    """Returns (options of computation, all other options as a dict)."""
    names = {one.name for one in fields(ModelOptions)}
    run = ModelOptions(**{name: value for name, value in options.items() if name in names})
    return run, {name: value for name, value in options.items() if name not in names}


def state_dtype(options: ModelOptions) -> torch.dtype | None:
    """Returns the dtype of the decode state; None if it is the weights' dtype. Raises RequestError."""
    named = options.state_dtype
    return None if named is None else machine.dtype_of(named, "state_dtype", STATE_DTYPES)


def device_of(options: ModelOptions) -> str:
    """Returns the name of the device in the options; for `auto`, of the best device that supports them."""
    chosen = machine.device_named(options.device)
    only_here = options.quantize == "bf16" or (options.compile and not machine.can_compile(chosen))
    return "cpu" if options.device == "auto" and only_here else chosen


def slow_choice(options: ModelOptions) -> str:
    """Returns a sentence about options that are slower than others on this machine, "" if they are not."""
    if device_of(options) != "cpu":
        return ""
    if options.quantize == "keep":
        return "quantize=keep unpacks each matrix at every use: several times slower than int8, int4 or no quantize"
    kind = None if options.quantize == AUTO else options.quantize
    if kind is None and options.dtype == "bfloat16":
        kind = "bf16"
    return "" if kind is None or options.compile else unpaid(kind)


def loaded_as(model: ModelLike, options: ModelOptions) -> Loaded:
    """Returns a model ready to run with these options; a built or loaded model stays on its device for device=auto.

    Raises RequestError if it cannot be loaded this way, WorkError if the device has too little memory."""
    device = device_of(options)
    if options.threads is not None:
        check_whole("threads", options.threads)
        machine.apply(machine.settings(device, threads=options.threads, compile=options.compile))
    if not isinstance(model, str | Path):
        if options.quantize not in (None, AUTO):
            raise RequestError(
                "quantize is decided when a model is loaded; give its name, or gf.load(..., quantize=...)",
                code="conflict", field="quantize", value=options.quantize,
            )  # fmt: skip
        return resolve(model, weights=True, dtype=options.dtype, device=None if options.device == "auto" else device)
    options, words = decided(model, options, device)
    if words:
        warnings.warn(words)
    dtype, kind = options.dtype or ("bfloat16" if options.quantize in QUANTIZED else None), options.quantize
    if kind == "bf16" and onednn_in_bf16(device) and not packs_bf16(device):
        kind = None  # plain weights in bf16 are faster here
    try:
        with warnings.catch_warnings():
            if options.compile:  # the measured step is not compiled
                warnings.simplefilter("ignore", Unpaid)
            loaded = load(model, dtype=dtype, device=device, quantize=kind)
    except RuntimeError as error:
        if device == "cpu" or not no_memory(error):
            raise
        raise WorkError(f"{model} does not fit into the memory of {device}; use --device cpu", code="memory") from None
    half = options.quantize is None and loaded.model.dtype == torch.bfloat16
    if half and not options.compile and packs_bf16(loaded.model.device.type):  # equal numbers, with faster prefill
        loaded.model = fold(loaded.model)
        quantize(loaded.model, "bf16")
    return loaded
