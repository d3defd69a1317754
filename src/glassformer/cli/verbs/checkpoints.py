"""Verbs that take a model as it is: convert, check, inspect.

A verb imports what computes inside its function, so that its help imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from glassformer.cli.options import (
    Count,
    Data,
    Expression,
    Flag,
    Json,
    standard_input,
    whole,
)
from glassformer.errors import RequestError


def convert(
    source: str,
    out: str,
    /,
    *,
    to: Literal["hf", "gguf"] | None = None,
    dtype: Literal["float32", "float16", "bfloat16", "q8_0"] | None = None,
    json: Json = False,
) -> None:
    """Turn one checkpoint into another: a folder that transformers loads, or a GGUF that llama.cpp runs.

    Parameters
    ----------
    source
        A run, a Hugging Face folder, a .gguf file, hf:owner/name, or smollm2; changes may follow.
    out
        Folder or .gguf file to write.
    to
        Output format; by default gguf if OUT ends in .gguf, else hf.
    dtype
        dtype of weight matrices; by default unchanged (gguf: float16). q8_0 is for gguf only.
    """
    from glassformer.cli.checkpoints import convert_checkpoint

    convert_checkpoint(source, out, to, dtype, json)


def check(
    model: str,
    /,
    *,
    reference: str | None = None,
    text: str | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    largest: Count | None = None,
    json: Json = False,
) -> None:
    """Prove a model: cached equals uncached, saved equals loaded, and it equals the published implementation.

    On failure, every layer and site that differs although its input does not is named. Exit status 1 if a check fails.

    Parameters
    ----------
    model
        A run, a Hugging Face folder, a .gguf file, hf:owner/name, smollm2; or an expression, with random weights.
    reference
        Another folder, run or .gguf file to compare with; by default the checkpoint itself, read by transformers.
    text
        Text to run the model on; by default random tokens from --seed.
    tolerance
        Largest allowed difference, relative to the largest value; by default the rounding error of fp32.
    largest
        Size of weights (500M, 10G) above which checks that write the model to disk are skipped; by default a few
        gigabytes.
    """
    from glassformer.cli.checkpoints import show_check

    limits = {"tolerance": tolerance, "largest": whole(largest, "largest")}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    show_check(model, json, seed, reference=reference, text=text, **given)


def inspect(
    model: Expression,
    /,
    *,
    text: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    source: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    reading: Annotated[list[str] | None, Parameter(negative="")] = None,
    against: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    ablate: Annotated[list[str] | None, Parameter(negative="")] = None,
    out: str | None = None,
    diff: str | None = None,
    exports: Flag = False,
    quality: Flag = False,
    coord_check: Flag = False,
    data: Data | None = None,
    tokens: Count | None = None,
    json: Json = False,
) -> None:
    """Show what a model is made of and what it costs; with --text, look inside while it reads.

    Parameters
    ----------
    text
        Read this (@FILE: a file's text, -: standard input) and show attention, predictions by depth and surprise, here
        and on a page that opens offline.
    source
        With --text and an encoder-decoder, the source text for the encoder (@FILE or - too); adds cross-attention.
    reading
        With --text, an analysis to run, printed and drawn in the folder as NAME.png: attention_rollout, side_by_side,
        logit_attribution, head_ablation (of the last 256 tokens), activation_patching, head_scores, attention_sinks,
        massive_activations, token_similarity, position_picture, embedding_neighbours, expert_routing, or all.
        Repeatable.
    against
        For activation_patching: a text of the same number of tokens with another answer, instead of the built-in task.
    ablate
        With --text, a component to remove: layers.2, layers.2.mixer, layers.2.ffn, layers.2.heads.1,3; neurons and
        experts like heads. Repeatable.
    out
        Folder of the page (inspect.html) and the figures; by default `inspection`.
    diff
        Another expression: show the fields that differ.
    exports
        Show which tools can load the model, and which parts block the others.
    quality
        Perplexity of a checkpoint on held-out text: unchanged, and in bf16, 8 and 4 bits.
    coord_check
        Train the model at several widths for a few steps and compare how far activations move (see +mup).
    data
        Text for --quality; by default python-docs.
    tokens
        With --quality, number of tokens to measure on; by default 20k.
    """
    asked = {"--text": text is not None, "--quality": quality, "--exports": exports, "--coord-check": coord_check,
             "--diff": diff is not None}  # fmt: skip
    if sum(asked.values()) > 1:
        raise RequestError(
            f"give one of {' and '.join(name for name, given in asked.items() if given)} at a time",
            code="conflict", field=next(name for name, given in asked.items() if given)[2:],
        )  # fmt: skip
    for option, given in (
        ("--source", source), ("--reading", reading), ("--against", against), ("--ablate", ablate)
    ):  # fmt: skip
        if given is not None and text is None:
            raise RequestError(f"{option} is for --text: give what is to be read", code="missing", field="text")
    if not quality and (data is not None or tokens is not None):
        raise RequestError("--data and --tokens are for --quality", code="conflict", field="quality")
    if out is not None and text is None and not coord_check:
        raise RequestError(
            "--out is for --text and --coord-check: nothing else is written", code="conflict", field="out", value=out
        )
    if out == "":
        raise RequestError(
            "--out is empty; give a folder, or leave it out for the usual one", code="missing", field="out", value=out
        )
    if text is not None:
        from glassformer.cli.look import show_inspection

        with standard_input():
            show_inspection(
                model, text, out, json, readings=reading or (), against=against, ablate=ablate or (), source=source
            )
        return
    if coord_check:
        from glassformer.cli.laboratory import show_coord_check

        show_coord_check(model, out, json)
        return
    from glassformer.naming import preset

    if quality:
        from glassformer.cli.checkpoints import show_quality

        show_quality(model, data, whole(tokens, "tokens"), json)
        return
    if exports:
        from glassformer.cli.checkpoints import show_exports

        show_exports(model, preset(model), json)
        return
    from glassformer.cli.show import show_config

    show_config(model, preset(model), diff, preset(diff) if diff else None, json)
