"""Verbs for one model or checkpoint: convert, check, inspect.

A verb imports what computes inside its function, so that its help imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from glassformer.cli.options import (
    ChoiceName,
    Count,
    Data,
    Expression,
    Flag,
    Force,
    Json,
    Named,
    NamedWithWeights,
    Text,
    command_line,
    text_of,
)
from glassformer.errors import RequestError
from glassformer.names.checks import check_ablated, check_reading, names_a_model

FOLDER = "inspection"
"""Default folder of the page and the figures of inspect; with --json it is not written by default."""


def convert(
    source: NamedWithWeights,
    out: str,
    /,
    *,
    to: Literal["hf", "gguf"] | None = None,
    dtype: Literal["float32", "float16", "bfloat16", "q8_0"] | None = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Turn one checkpoint into another: a folder that transformers loads, or a GGUF that llama.cpp runs.

    Parameters
    ----------
    source
        Checkpoint to convert: a run folder, a Hugging Face folder, a .gguf file, hf:owner/name, smollm2, nanoGPT's
        ckpt.pt, or a folder of Meta or Mistral (params.json); +CHANGE modifies it, for example RUN+gqa:1.
    out
        Folder or .gguf file to write. Files that glassformer wrote there before are replaced, and the output names
        them.
    to
        Output format; by default gguf if OUT ends in .gguf, else hf.
    dtype
        dtype of weight matrices; by default unchanged (gguf: float16). q8_0 is for gguf only.
    """
    from glassformer.cli.show import call_and_show
    from glassformer.laboratory.exporting import convert

    call_and_show(convert, source, out, to=to, dtype=dtype, force=force, as_json=json)


def check(
    model: Named,
    /,
    *,
    reference: NamedWithWeights | None = None,
    text: str | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    largest: Count | None = None,
    json: Json = False,
) -> None:
    """Verify a model numerically: decoding with and without cache, save and load, the published implementation.

    On failure, report each part whose output differs while its input agrees. Exit status 1 if a check fails.

    Parameters
    ----------
    model
        Checkpoint to verify (a run folder, a Hugging Face folder, a .gguf file, hf:owner/name or smollm2), or a model
        expression such as llama@10m, with random weights.
    reference
        Another folder, run or .gguf file to compare with; by default the checkpoint itself, read by transformers.
    text
        Text to run the model on; by default random tokens from --seed.
    seed
        Seed of random tokens and random weights.
    tolerance
        Largest allowed difference, as a share of the largest expected value; by default 1e-5.
    largest
        Size of the weights in bytes, for example 10G, above which checks that write the model to disk are skipped; by
        default 4G.
    """
    from glassformer.cli.show import call_and_show
    from glassformer.laboratory.proof import check

    call_and_show(
        check, model, reference=reference, text=text, seed=seed, tolerance=tolerance, largest=largest, as_json=json
    )


def inspect(
    model: Expression,
    prompt: str | None = None,
    /,
    *,
    text: Text = None,
    source: Text = None,
    reading: Annotated[list[Annotated[str, ChoiceName(check_reading)]] | None, Parameter(negative="")] = None,
    against: Text = None,
    ablate: Annotated[list[str] | None, Parameter(negative="")] = None,
    out: str | None = None,
    diff: Named | None = None,
    exports: Flag = False,
    quality: Flag = False,
    coord_check: Flag = False,
    force: Force = False,
    data: Data | None = None,
    tokens: Count | None = None,
    json: Json = False,
) -> None:
    """Show the parts and the costs of a model; with --text, the activations inside it on that text.

    Parameters
    ----------
    model
        Checkpoint, or model expression NAME[@SIZE][+CHANGE...] with random weights, for example llama@10m.
    prompt
        Input text, in quotes; the same as --text.
    text
        Input text (@FILE: text of a file, -: standard input). Shows attention maps, predictions of each layer (logit
        lens) and the surprisal of each token, in the terminal and on an offline page.
    source
        With --text and an encoder-decoder, the source text for the encoder (@FILE or - too); adds cross-attention.
    reading
        Analysis to run with --text, printed and saved as NAME.png in --out; repeatable, or all. Names:
        attention_rollout, side_by_side (attention of all heads), logit_attribution, head_ablation (last 256 tokens),
        activation_patching, head_scores, meaning_scores (heads that read subjects, antecedents, commas),
        attention_distance, attention_sinks, massive_activations, token_similarity, position_picture (position
        embeddings), embedding_neighbours, expert_routing.
    against
        Corrupted prompt for activation_patching: as long as --text in tokens, with another answer. By default
        a built-in task.
    ablate
        Component to remove with --text: layers.2, layers.2.mixer, layers.2.ffn, layers.2.heads.1,3, layers.2.neurons.7
        or layers.2.experts.0. Repeatable.
    out
        Folder of the page (inspect.html) and the figures; by default `inspection`.
    diff
        Another expression: show the fields that differ.
    exports
        List the export targets that can hold the model and, for the others, the parts that block them.
    quality
        Perplexity of a checkpoint on held-out text: unchanged, and in bf16, 8 and 4 bits.
    coord_check
        Train the model at several widths for a few steps and compare how far activations move (see +mup).
    data
        Text for --quality; by default python-docs.
    tokens
        With --quality, number of tokens to measure on; by default 20k.
    """
    if ablate and prompt is None and text is None:
        raise RequestError("ablate is for text: give the text to read", code="missing", field="text")
    if ablate:
        check_ablated(ablate, model)

    from glassformer import machine
    from glassformer.cli.show import call_and_show
    from glassformer.laboratory.inspection import inspect

    if prompt is not None and text is not None:
        raise RequestError(
            "the text is given twice; leave --text or the other one out", code="conflict", field="text", value=text
        )
    if prompt is not None and names_a_model(prompt):
        raise RequestError(
            f"{prompt} is the name of a model: give --diff {prompt} to see what differs, or --text {prompt}",
            code="conflict", field="text", value=prompt, expected="--diff or --text",
        )  # fmt: skip
    text = prompt if text is None else text
    if text is not None or coord_check:
        machine.apply(machine.settings("cpu"))
        out = FOLDER if out is None and not json else out
    texts = {"text": text, "source": source, "against": against}
    words = {name: None if value is None else text_of(value, name) for name, value in texts.items()}
    call_and_show(
        inspect, model, **words, reading=reading, ablate=ablate, out=out, diff=diff, exports=exports, quality=quality,
        coord_check=coord_check, force=force, data=data, tokens=tokens, command=command_line(), as_json=json,
    )  # fmt: skip
