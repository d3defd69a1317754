"""Loading of models with their weights, `gf.load`: EXPR -> Loaded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from glassformer.architectures import PRESETS
from glassformer.conversion import checkpoints
from glassformer.conversion.originals import is_original
from glassformer.conversion.weights import spoilt_weights, warn_spoilt
from glassformer.errors import RequestError
from glassformer.loaded import Loaded
from glassformer.machine import WEIGHT_DTYPES, device_named, dtype_of
from glassformer.names import grammar
from glassformer.names.known import FAMILIES
from glassformer.names.places import has_params, is_folder, without_weights
from glassformer.naming.fastest import LARGE, Unpaid, unpaid
from glassformer.naming.models import changed, parse, preset
from glassformer.parts.precision import onednn_in_bf16
from glassformer.parts.quantized import QUANTIZED, no_bf16
from glassformer.progress import line_on_terminal
from glassformer.training import load_run
from glassformer.typed import typed


@typed
def load(
    expression: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: Any = None,
    quantize: str | None = None,
) -> Loaded:
    """Loads a model with its weights, config and tokenizer.

    Parameters
    ----------
    expression
        A run folder, a Hugging Face folder, a .gguf file, hf:owner/name, an installed model ("smollm2", "minilm"),
        nanoGPT's ckpt.pt, or a folder of Meta or Mistral with its params.json; with changes ("smollm2+window:256") the
        weights that still fit, and newly initialised ones elsewhere (`.fresh` names them). With fewer KV heads
        ("smollm2+gqa:1") each is the mean of those whose queries it now serves (Ainslie et al. 2023, 2305.13245); with
        more, heads are repeated (`.regrouped`).
    dtype
        Dtype of the weights, torch.bfloat16 or "bfloat16"; by default that of the file, and
        float32 for quantised weights.
    device
        Device of the weights, as torch names it.
    quantize
        "int8" or "int4" pack the matrices, "bf16" prepacks them for the CPU's bf16 matmuls, "keep" leaves those of a
        .gguf file packed; `dtype` is then that of all other weights. A model of packed weights can be neither trained
        nor saved.

    Returns
    -------
    Loaded
        `.model`, `.config`, `.tokenizer`; `.generate`, `.stream`, `.chat`, `.embed`.

    Raises
    ------
    RequestError
        For a name without weights, changes that do not fit, and files that are damaged or of an unknown kind.

    Examples
    --------
    >>> llm = gf.load("smollm2", quantize="int4")  # doctest: +SKIP
    >>> print(llm.generate("Once upon a time", max_new_tokens=20))  # doctest: +SKIP
    """
    dtype = None if dtype is None else dtype_of(dtype, known=WEIGHT_DTYPES)
    device = None if device is None else device_named(device)
    name, size, wanted = parse(expression)
    if name in PRESETS or name in FAMILIES:
        raise without_weights(name, str(expression) if grammar.exists(str(expression)) else "")
    if size:
        raise RequestError(
            f"{expression}: a checkpoint keeps its size; leave @{size} out", code="conflict", field="size", value=size
        )
    if wanted:
        preset(str(expression))  # reports errors before weights are read
    if quantize not in (None, "keep", *QUANTIZED):
        kinds = ", ".join(QUANTIZED)
        raise RequestError(
            f"quantize={quantize!r}: use {kinds}, keep for the packed weights of a .gguf file, or None",
            code="unknown", field="quantize", value=quantize,
        )  # fmt: skip
    if quantize == "keep" and wanted:
        raise RequestError(
            f"quantize='keep': packed weights cannot be changed; use {' or '.join(QUANTIZED)}",
            code="conflict", field="quantize", value=quantize,
        )  # fmt: skip
    if quantize == "bf16" and not onednn_in_bf16(torch.device(device or "cpu").type):
        raise no_bf16()
    path = checkpoints.locate(name)
    if quantize == "keep" and (path.is_dir() or is_original(path)):
        raise RequestError(
            f"quantize='keep' is for the packed weights of a .gguf file, and {path} is another checkpoint; "
            f"use {' or '.join(QUANTIZED)}",
            code="unsupported", field="quantize", value=quantize,
        )  # fmt: skip
    packing = quantize in QUANTIZED  # each matrix of a .gguf file is unpacked separately
    first, keep = None if packing else dtype, quantize == "keep" or (packing and not wanted)
    with line_on_terminal():
        if path.is_dir() and not is_folder(path) and not has_params(path):
            checkpoints.refuse_weights(path)
            loaded = load_run(path)
            warn_spoilt(path, spoilt_weights(loaded.model))
            loaded.model.to(device=device, dtype=first)
        else:
            loaded = checkpoints.read_checkpoint(path, first, device, keep)
        if wanted:
            loaded = checkpoints.adapt(loaded, changed(loaded.config, wanted))
        if packing:
            assert quantize is not None
            here = device is None or torch.device(device).type == "cpu"
            if here and loaded.config.num_params() >= LARGE and (words := unpaid(quantize)):
                warnings.warn(words, Unpaid)
            checkpoints.pack(loaded, quantize, dtype)
    return loaded
