"""Prompts that quote untrusted texts: a special token spelled in a quotation stays text."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from glassformer.errors import RequestError
from glassformer.text.chat_template import ChatTemplate, Message
from glassformer.text.subword import FileTokenizer
from glassformer.text.vocabulary import Tokenizer

MARK = f"\u2063{secrets.token_hex(8)}\u2063"
"""Separator inside a quoted special token, drawn for each process: a text cannot spell it in advance."""


def quoted(tokenizer: Tokenizer, value: Any) -> Any:
    """Returns `value`, a text or a tree of texts, with `MARK` inside each special token of the tokenizer that a text
    spells."""
    if isinstance(value, Mapping):
        return {key: quoted(tokenizer, one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [quoted(tokenizer, one) for one in value]
    if not isinstance(value, str) or not isinstance(tokenizer, FileTokenizer):
        return value
    for special in tokenizer.spelled_specials:
        value = value.replace(special, special[0] + MARK + special[1:])
    return value


def quoting_ids(tokenizer: Tokenizer, text: str, add_specials: bool) -> list[int]:
    """Returns the ids of a text with quotations: special tokens are parsed, except those with `MARK` inside.

    With `add_specials`, the special tokens that the tokenizer's file adds to a text are included."""
    if not isinstance(tokenizer, FileTokenizer):
        return tokenizer.encode(text).tolist()
    first, *rest = text.split(MARK)
    ids = tokenizer.encode(first, parse_specials=True, add_specials=add_specials).tolist()
    for piece in rest:
        ids += tokenizer.encode(piece, parse_specials=True).tolist()
    return ids


def as_messages(given: str | Sequence[Message]) -> list[Message]:
    """Returns a chat as a list of messages; a text becomes one message of the user. Raises RequestError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, Sequence) or not given or any(not isinstance(one, Mapping) for one in given):
        raise RequestError(
            code="type", field="messages", value=given,
            expected='a text, or messages such as [{"role": "user", "content": "Hello"}]',
        )  # fmt: skip
    return [*given]


def chat_ids(tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the ids of a chat rendered by its template; special tokens spelled in messages stay text."""
    return chat_prompt(tokenizer, template, messages)[1]


def chat_prompt(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **variables: Any
) -> tuple[str, list[int]]:
    """Returns a chat rendered by its template, as (text, ids); `variables` are further values for the template, such as
    tools. Raises RequestError."""
    try:
        given, others = quoted(tokenizer, list(messages)), quoted(tokenizer, variables)
    except RecursionError:
        raise RequestError("messages are nested too deeply", code="range", field="messages") from None
    text = template.render(given, **others)
    return text.replace(MARK, ""), quoting_ids(tokenizer, text, add_specials=False)
