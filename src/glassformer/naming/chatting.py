"""One turn of a chat with whatever names a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from glassformer.generation.session import Completion
from glassformer.naming.resolve import ModelLike, resolve
from glassformer.options import GenerationKeywords
from glassformer.text.chat_template import Message


def chat(model: ModelLike, messages: Sequence[Message], **options: Unpack[GenerationKeywords]) -> Completion:
    """Returns the model's answer to the messages of a chat.

    Parameters
    ----------
    model
        A model with a chat template, as `gf.load` takes it, or a loaded one.
    messages
        Mappings such as {"role": "user", "content": "Hello"}.
    **options
        As for `Loaded.generate`.

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
    >>> import glassformer as gf
    >>> gf.chat("smollm2", [{"role": "user", "content": "Hello"}], max_new_tokens=20).text  # doctest: +SKIP
    """
    return resolve(model, weights=True).chat(messages, **options)
