"""Verbs whose answer is text or vectors: generate, chat, embed, classify, index, ask.

A verb imports what computes inside its function, so that its help imports no torch.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

from glassformer.cli import waiting
from glassformer.cli.options import (
    AskOptions,
    ChatOptions,
    Count,
    Data,
    Field,
    Force,
    GenerateOptions,
    Json,
    ModelName,
    Texts,
    ToRead,
    no_prompt,
    of_field,
    standard_input,
)
from glassformer.options import LONGEST_PROMPT

Decoder = Annotated[
    str,
    ModelName(weights=True, text=True),
    Parameter(
        help="A model with weights: a run folder, a Hugging Face folder, a .gguf file, hf:owner/name, or smollm2 (if "
        "installed); +CHANGE modifies it, for example smollm2+window:256."
    ),
]
Encoder = Annotated[
    str,
    ModelName(weights=True, text=True),
    Parameter(
        help="An encoder with weights: minilm, a run, a Hugging Face or sentence-transformers folder, hf:owner/name."
    ),
]
Fields = Parameter(name="*", negative="")


def generate(
    model: Decoder,
    text: str | None = None,
    /,
    *,
    how: Annotated[GenerateOptions, Fields] = GenerateOptions(),
    json: Json = False,
) -> None:
    """Generate text from one or more prompts.

    Parameters
    ----------
    text
        Prompt, in quotes; the same as --prompt.
    """
    prompts = [*([] if text is None else [text]), *(how.prompt or [])]
    with standard_input():
        if not prompts and how.prompt_file is None and how.prompts is None and how.source is None:
            waiting.end()
            prompts = [sys.stdin.read(LONGEST_PROMPT + 1)]
            if not prompts[0]:
                raise no_prompt()
        from glassformer.cli.texts import write

        write(model, replace(how, prompt=prompts or None), json)


def chat(
    model: Decoder,
    text: str | None = None,
    /,
    *,
    how: Annotated[ChatOptions, Fields] = ChatOptions(),
    json: Json = False,
) -> None:
    """Talk with a model that has a chat template.

    Parameters
    ----------
    text
        First message, in quotes.
    """
    from glassformer.cli.conversation import converse

    with standard_input():
        converse(model, how, json, text)


def embed(
    model: Encoder,
    texts: Annotated[list[str] | None, Parameter(negative="")] = None,
    /,
    *,
    text: Texts = None,
    file: ToRead | None = None,
    out: str | None = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Turn texts into vectors, pooled and normalised as the model's folder says.

    Parameters
    ----------
    texts
        Texts, each in quotes.
    text
        Texts, each an option: --text "..." --text "...".
    file
        File of texts, one per line, or .jsonl with a field named text in each line.
    out
        File for the vectors: .npy (n, d) in fp32, or .jsonl; by default they are printed as JSON lines.
    """
    from glassformer import retrieval
    from glassformer.cli.show import call_and_show

    given = [*(texts or []), *(text or [])]
    call_and_show(retrieval.embed, model, given, file=file, out=out, force=force, as_json=json)


def classify(
    model: Encoder,
    texts: Annotated[list[str] | None, Parameter(negative="")] = None,
    /,
    *,
    text: Texts = None,
    file: ToRead | None = None,
    json: Json = False,
) -> None:
    """Name the class of each text by a model that was trained on labels.

    Parameters
    ----------
    texts
        Texts, each in quotes.
    text
        Texts, each an option: --text "..." --text "...".
    file
        File of texts, one per line, or .jsonl with a field named text in each line.
    """
    from glassformer import retrieval
    from glassformer.cli.show import call_and_show

    call_and_show(retrieval.classify, model, [*(texts or []), *(text or [])], file=file, as_json=json)


def index(
    data: Data,
    /,
    *,
    field: Field = None,
    out: str,
    encoder: Encoder = "minilm",
    passage_tokens: Count | None = None,
    json: Json = False,
) -> None:
    """Split texts into passages and embed them into an index for glassformer ask.

    Parameters
    ----------
    data
        Texts to index: a file, a folder, a Hugging Face dataset (hf:owner/name), or a built-in corpus (python-docs).
    out
        Folder of the index. Rerun the same command to resume.
    passage_tokens
        Largest number of tokens in a passage; by default the encoder's context.
    """
    from glassformer import retrieval
    from glassformer.cli.show import call_and_show

    call_and_show(retrieval.index, of_field(data, field), out, encoder, passage_tokens=passage_tokens, as_json=json)


def ask(
    question: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    index: ToRead,
    model: Decoder = "smollm2",
    k: Annotated[int, Parameter(name=["-k", "--k"])] = 4,
    encoder: str | None = None,
    how: Annotated[AskOptions, Fields] = AskOptions(),
    json: Json = False,
) -> None:
    """Answer a question from an index of your texts: print the passages found with their scores, then the answer.

    Parameters
    ----------
    question
        Question, in quotes.
    index
        Folder made by `glassformer index`.
    k
        Passages to retrieve.
    encoder
        Path of the index's encoder, if it has moved; by default the one given to `glassformer index`.
    """
    from glassformer.cli.answer import answer

    answer(question, index, model, k, encoder, how, json)
