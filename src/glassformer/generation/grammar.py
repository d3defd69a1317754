"""Texts that must match a JSON schema, a regular expression or a grammar, token by token, by llguidance.

Grammars     compiles, with bounds, for one tokenizer
Grammar      a compiled description
Constraint   the tokens that may follow in one text
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from glassformer.errors import RequestError, WorkError, printable
from glassformer.text.spelling import Spelling

__all__ = ["Constraint", "Grammar", "Grammars"]

Kind = Literal["json_schema", "regex", "lark", "gbnf"]
LONGEST = 1 << 18
"""Largest number of characters of a description."""
DEEPEST = 64
"""Largest nesting of a JSON schema."""
KEPT = 64
"""Number of compiled descriptions that are kept."""
LIMITS: dict[str, Any] = {
    "max_items_in_row": 500, "initial_lexer_fuel": 500_000, "step_lexer_fuel": 100_000, "step_max_items": 20_000,
    "max_lexer_states": 50_000, "max_grammar_size": 50_000, "verbose_errors": False,
}  # fmt: skip
"""Bounds of llguidance on compiling and on each step."""
SPACING: Any = {
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False,
    "coerce_one_of": False,
}  # fmt: skip
"""Options of llguidance for JSON on one line, as `json.dumps` writes it, so that white space cannot fill an answer."""


class Constraint:
    """Tokens that may follow in one text."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> Bool[Tensor, "v"]:
        """Returns a mask (v,), True for each token that may follow. Raises WorkError past the bounds of a step."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise WorkError("the grammar takes too long at this point of the text", code="failed")
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool))

    def take(self, token: int) -> bool:
        """Takes the next token; returns True if no other may follow. Raises WorkError for one that is not allowed."""
        if not self._matcher.consume_token(token):
            raise WorkError("a token that the grammar excludes was drawn", code="failed")
        if self._matcher.is_stopped():
            return True
        return self._matcher.is_accepting() and not bool(self.allowed().any())


class Grammar:
    """Compiled description of the texts that an answer may be."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def start(self) -> Constraint:
        """Returns the constraint on a new text."""
        return Constraint(self._matcher.deep_copy(), self._vocab_size)


class Grammars:
    """Compiler of descriptions for the tokens of one model; the last `KEPT` results are kept.

    Parameters
    ----------
    spelling
        Bytes of the tokens.
    vocab_size
        Number of logits, at least the number of tokens.
    ends
        Tokens at which a text may end.
    """

    def __init__(self, spelling: Spelling, vocab_size: int, ends: Collection[int]) -> None:
        self._spelling, self._vocab_size, self._ends = spelling, vocab_size, sorted(ends)
        self._tokens: Any = None
        self._kept: OrderedDict[tuple[Kind, str], Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, kind: Kind, text: str, field: str = "grammar") -> Grammar:
        """Returns the compiled form of a description.

        Parameters
        ----------
        kind
            json_schema, regex, lark or gbnf (llama.cpp's form).
        text
            The description; a JSON schema as JSON.
        field
            Name of the description in messages.

        Raises
        ------
        RequestError
            For a description that is wrong, too large, or not enforced in full; without llguidance.
        """
        assert kind in get_args(Kind)
        if len(text) > LONGEST:
            raise RequestError(
                f"{field} has {len(text):,} characters; at most {LONGEST:,} are compiled",
                code="range", field=field, value=len(text), expected=f"at most {LONGEST:,} characters",
            )  # fmt: skip
        with self._lock:
            if (found := self._kept.get((kind, text))) is None:
                found = self._kept[kind, text] = Grammar(self._compiled(kind, text, field), self._vocab_size)
            self._kept.move_to_end((kind, text))
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return found

    def _compiled(self, kind: Kind, text: str, field: str) -> Any:
        try:
            import llguidance as guidance
        except ImportError:
            raise RequestError(
                "constrained answers need llguidance; pip install 'glassformer[serve]'",
                code="missing", field=field,
            ) from None  # fmt: skip
        if self._tokens is None:
            self._tokens = guidance.LLTokenizer(
                guidance.TokenizerWrapper(_Tokens(self._spelling, self._vocab_size, self._ends)),
                eos_token=self._ends or [self._vocab_size],
            )
        try:
            if kind == "json_schema":
                source = guidance.LLMatcher.grammar_from_json_schema(checked(text, field), overrides=SPACING)
            elif kind == "regex":
                source = guidance.LLMatcher.grammar_from_regex(text)
            else:
                source = guidance.gbnf_to_lark.gbnf_to_lark(text) if kind == "gbnf" else text
                source = guidance.LLMatcher.grammar_from_lark(source)
        except RequestError:
            raise
        except Exception as problem:  # the converter of GBNF raises errors of many types
            raise refusal(field, str(problem)) from None
        matcher = guidance.LLMatcher(self._tokens, source, log_level=0, limits=guidance.LLParserLimits(**LIMITS))
        if matcher.is_error():
            raise refusal(field, matcher.get_error())
        if warnings := matcher.get_grammar_warnings():
            raise refusal(field, "; ".join(map(str, warnings)))
        try:
            if not Constraint(matcher.deep_copy(), self._vocab_size).allowed().any():
                raise refusal(field, "no text matches it, or only the empty one")
        except WorkError:
            raise refusal(field, "it is too complex") from None
        return matcher


class _Tokens:
    """Vocabulary in the form that llguidance reads; for a model without an end token it has one more, never drawn."""

    def __init__(self, spelling: Spelling, vocab_size: int, ends: list[int]) -> None:
        self._tokenizer = spelling.tokenizer
        known = self._tokenizer.vocab_size
        self.tokens = [(spelling.bytes(i) if i < known else b"") or b"\xff[%d]" % i for i in range(vocab_size)]
        self.special_token_ids = [i for i, raw in enumerate(self.tokens) if raw.startswith(b"\xff[")]
        if not ends:
            self.special_token_ids.append(len(self.tokens))
            self.tokens.append(b"\xff[end]")
        self.eos_token_id, self.bos_token_id = ends[0] if ends else vocab_size, None

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("a text is expected")
        return self._tokenizer.encode(text).tolist()


def checked(text: str, field: str) -> str:
    """Returns a JSON schema, as JSON, without its settings for llguidance.

    Raises RequestError unless it is an object of bounded nesting, ValueError for text that is not JSON."""
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise RequestError(f"{field} must be an object", code="type", field=field, expected="an object")
    schema.pop("x-guidance", None)
    level: list[Any] = [schema]
    depth = 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise refusal(field, f"it is nested more than {DEEPEST} deep")
        level = [
            one
            for parent in level
            for one in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(one, dict | list)
        ]
    return json.dumps(schema)


def refusal(field: str, why: str) -> RequestError:
    """Returns the error that the grammar or JSON schema in the field `field` cannot be enforced, for the reason
    `why`."""
    line = printable(" ".join(why.split()))[:300]
    return RequestError(f"{field} cannot be enforced: {line}", code="unsupported", field=field)
