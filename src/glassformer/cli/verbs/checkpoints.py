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
    command_line,
    text_of,
)

FOLDER = "inspection"
"""Folder of the page and the figures, without --out and --json."""


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
    from glassformer.cli.show import call_and_show
    from glassformer.laboratory.exporting import convert

    call_and_show(convert, source, out, to=to, dtype=dtype, as_json=json)


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
    from glassformer.cli.show import call_and_show
    from glassformer.laboratory.proof import check

    call_and_show(
        check, model, reference=reference, text=text, seed=seed, tolerance=tolerance, largest=largest, as_json=json
    )


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
    from glassformer import machine
    from glassformer.cli.show import call_and_show
    from glassformer.laboratory.inspection import inspect

    if text is not None or coord_check:
        machine.apply(machine.settings("cpu"))
        out = FOLDER if out is None and not json else out
    texts = {"text": text, "source": source, "against": against}
    words = {name: None if value is None else text_of(value, name) for name, value in texts.items()}
    call_and_show(
        inspect, model, **words, reading=reading, ablate=ablate, out=out, diff=diff, exports=exports, quality=quality,
        coord_check=coord_check, data=data, tokens=tokens, command=command_line(), as_json=json,
    )  # fmt: skip
