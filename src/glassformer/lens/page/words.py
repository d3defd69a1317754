"""Texts of tokens: within a text, in isolation, and with every character visible."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glassformer.lens.inspected import Inspected
    from glassformer.text import Tokenizer

REPLACEMENT = "\ufffd"
"""Character that a tokenizer gives for bytes that are not a whole character."""
LONGEST_CHARACTER = 8
"""Largest number of tokens that share a character: UTF-8 has at most four bytes in one, and a token may start with the
end of another character."""
LONGEST_WORD = 60
JOINER = "\u200d"  # invisible, and part of many an emoji


def speller(tokenizer: Tokenizer | None) -> Callable[[int], str]:
    """Returns a function from a token id to the token's text as it appears inside a longer text; for a token without
    text, its name or its id."""
    if tokenizer is None:
        return str
    names = {i: name for name, i in getattr(tokenizer, "ids", dict)().items()}

    def spell(token: int) -> str:
        if token >= tokenizer.vocab_size:  # the model has more rows than the tokenizer has tokens
            return f"<{token}>"
        alone = tokenizer.decode([token])
        second = tokenizer.decode([token, token])[len(alone) :]  # a first token may lose its space
        return second or alone or names.get(token) or f"<{token}>"

    return spell


def spelled_text(tokens: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """Returns the text of each token as it appears in the whole text. A character split over several tokens belongs to
    the last of them, and the others are empty."""
    spell = speller(tokenizer)
    words = [spell(token) for token in tokens]
    if tokenizer is None:
        return words
    first = 0
    while first < len(words):
        whole = None
        if REPLACEMENT in words[first]:
            for last in range(first + 1, min(first + LONGEST_CHARACTER, len(words))):
                if any(token >= tokenizer.vocab_size for token in tokens[first : last + 1]):
                    break
                whole = tokenizer.decode(list(tokens[first : last + 1]))
                if REPLACEMENT not in whole:
                    words[first : last + 1] = [""] * (last - first) + [whole]
                    first = last
                    break
        first += 1
    return words


def visible(word: str) -> str:
    """Returns the word with everything visible: white space as symbols, except the one space before a word or between
    two; controls, reversals of direction and other characters without a glyph by code point; truncated if long."""
    if not word:
        return "⋯"
    shown = "".join(_SIGNS.get(sign) or _seen(sign) for sign in word[:LONGEST_WORD])
    shown = _BARE.sub(lambda spaces: "␣" * len(spaces[0]), shown)
    if unicodedata.category(shown[0]) in ("Mn", "Me"):
        shown = f"◌{shown}"  # a mark without its letter would combine with the preceding character
    return shown if len(word) <= LONGEST_WORD else f"{shown}…"


_SIGNS = {"\n": "↵", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
_BARE = re.compile(" {2,}| $")
_BLANK = "\u115f\u1160\u2800\u3164\uffa0"  # letters and symbols without a glyph


def _seen(sign: str) -> str:
    kind = unicodedata.category(sign)
    hidden = kind in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs") and sign not in (JOINER, " ")
    return f"⟨U+{ord(sign):04X}⟩" if hidden or sign in _BLANK else sign


def likely(seen: Inspected) -> str:
    """Returns a sentence on the most likely token after the last one; empty for a bidirectional model."""
    if not seen.causal or not seen.words:
        return ""
    found = seen.predictions(len(seen.words) - 1)[-1]
    if not found or not math.isfinite(found[0][2]):
        return ""
    last = visible(seen.words[-1]).strip() or visible(seen.words[-1])
    return f"After ‘{last}’ the most likely next token is ‘{visible(found[0][0])}’ ({100 * found[0][2]:.0f} %)"
