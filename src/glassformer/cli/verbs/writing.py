"""Verbs whose answer is text or vectors: generate, chat, embed, index, ask.

A verb imports what computes inside its function, so that its help imports no torch.
"""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from glassformer.cli.options import (
    Asking,
    Chatting,
    Data,
    Json,
    Writing,
    count,
    standard_input,
    whole,
)


def generate(
    model: str,
    /,
    *,
    how: Annotated[Writing, Parameter(name="*")] = Writing(),  # noqa: B008  # frozen
    json: Json = False,
) -> None:
    """Write on from a prompt with a trained model, or from several at once.

    Parameters
    ----------
    model
        A run, a Hugging Face folder, a .gguf file, hf:owner/name, or smollm2; changes may follow (smollm2+window:256).
    """
    from glassformer.cli.generate import write

    with standard_input():
        write(model, how, json)


def chat(
    model: str,
    /,
    *,
    how: Annotated[Chatting, Parameter(name="*")] = Chatting(),  # noqa: B008  # frozen
    json: Json = False,
) -> None:
    """Talk with a model that has a chat template.

    Parameters
    ----------
    model
        A Hugging Face folder, a .gguf file, hf:owner/name, or smollm2.
    """
    from glassformer.cli.chat import converse

    with standard_input():
        converse(model, how, json)


def embed(
    model: str,
    /,
    *,
    text: Annotated[list[str] | None, Parameter(negative="")] = None,
    file: str | None = None,
    out: str | None = None,
    json: Json = False,
) -> None:
    """Turn texts into vectors, pooled and normalised as the model's folder says.

    Parameters
    ----------
    model
        An encoder with weights: minilm, a run, a Hugging Face or sentence-transformers folder, hf:owner/name.
    text
        Texts, each an option: --text "..." --text "...".
    file
        File with one text per line, or a .jsonl file with a field `text`.
    out
        File for the vectors: .npy (n, d) in fp32, or .jsonl; by default they are printed as JSON lines.
    """
    from glassformer.cli.vectors import embed_texts

    embed_texts(model, text or [], file, out, json)


def index(
    data: Data,
    /,
    *,
    out: str,
    encoder: str = "minilm",
    passage_tokens: Annotated[int | None, Parameter(converter=count)] = None,
    json: Json = False,
) -> None:
    """Cut texts into passages and embed them, for ask; the same command resumes an interrupted index.

    Parameters
    ----------
    out
        The folder of the index.
    encoder
        An encoder with weights: minilm, a run, a Hugging Face or sentence-transformers folder, hf:owner/name.
    passage_tokens
        Largest number of tokens in a passage; by default the encoder's context.
    """
    from glassformer.cli.retrieval import index_data

    index_data(data, out, encoder, whole(passage_tokens, "passage_tokens"), json)


def ask(
    question: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    index: str,
    model: str = "smollm2",
    k: Annotated[int, Parameter(name=["-k", "--k"])] = 4,
    encoder: str | None = None,
    how: Annotated[Asking, Parameter(name="*")] = Asking(),  # noqa: B008  # frozen
    json: Json = False,
) -> None:
    """Answer a question from an index: the sources with their scores, then the answer as it is written.

    Parameters
    ----------
    index
        A folder that `glassformer index` made.
    model
        Model that answers: a Hugging Face folder, a run, a .gguf file, hf:owner/name, or smollm2.
    k
        Passages to retrieve.
    encoder
        Path of the index's encoder, if it has moved; by default the one given to `glassformer index`.
    """
    from glassformer.cli.retrieval import answer

    answer(question, index, model, k, encoder, how, json)
