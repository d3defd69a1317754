"""Text of a growing sequence of tokens: whole characters, without any part of a stop string."""

from __future__ import annotations

import copy
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, Protocol

from glassformer.options import check_stops
from glassformer.text import Tokenizer

__all__ = ["GrowingText", "Detokenizer", "Stops"]

CODE_POINT_BITS = 21
REPLACEMENT = "\ufffd"  # text that a tokenizer gives bytes which are not a character, or not yet
WINDOW = 16  # largest number of tokens decoded at once, except in a run of byte tokens
CONTEXT = 4  # tokens kept before the next: an unfinished character has at most three, and the first token of a text
# may be decoded otherwise than the rest


class Stops:
    """Search for the first stop string that is complete in a growing text; of several that end together, the longest.

    `matched` is the string found, None before. The automaton of Aho and Corasick 1975 (10.1145/360825.360855): time
    linear in the lengths of strings and text. Raises RequestError for an empty string, more than 10,000 strings, or
    more than a million characters.
    """

    def __init__(self, strings: str | Sequence[str]) -> None:
        strings = check_stops(strings)
        # A node is a prefix of a stop string, node 0 the empty one. An edge is (node, character) in one number.
        self._edges: dict[int, int] = {}
        self._depth = array("i", [0])  # length of each node's prefix
        self._fail = array("i", [0])  # node of each prefix's longest proper suffix
        self._found = array("i", [0])  # length of the longest stop string that ends each prefix, 0 for none
        self._grow(strings)
        self._reset()

    def _reset(self) -> None:
        self._node = 0  # longest prefix of a stop string that ends the text so far
        self._held = deque[str]()  # characters of that prefix
        self.matched: str | None = None

    def fresh(self) -> Stops:
        """Returns a search for the same strings in a new text."""
        other = copy.copy(self)
        other._reset()
        return other

    def _grow(self, strings: list[str]) -> None:
        """Builds the automaton, prefixes by length, because a node fails to a shorter one, which must be complete."""
        depth, paths = 0, [(string, 0) for string in strings]
        while paths:
            longer = []
            for string, parent in paths:
                edge = parent << CODE_POINT_BITS | ord(string[depth])
                node = self._edges.get(edge)
                if node is None:
                    node = len(self._depth)
                    fail = self._step(self._fail[parent], string[depth]) if parent else 0
                    self._edges[edge] = node
                    self._depth.append(depth + 1)
                    self._fail.append(fail)
                    self._found.append(self._found[fail])
                if len(string) == depth + 1:
                    self._found[node] = depth + 1
                else:
                    longer.append((string, node))
            depth, paths = depth + 1, longer

    def _step(self, node: int, character: str) -> int:
        code, edges = ord(character), self._edges
        while node and (node << CODE_POINT_BITS | code) not in edges:
            node = self._fail[node]
        return edges.get(node << CODE_POINT_BITS | code, 0)

    def feed(self, piece: str) -> tuple[str, bool]:
        """Reads the next characters of the text; returns those that can be shown now, and True if a stop string is
        complete. The longest end of the text that is a prefix of a stop string is held back; a stop string and the text
        after it are never shown."""
        if self.matched is not None:
            return "", True
        for character in piece:
            self._held.append(character)
            self._node = self._step(self._node, character)
            if length := self._found[self._node]:
                text = "".join(self._held)
                self._held.clear()
                self.matched = text[-length:]
                return text[:-length], True
        settled = len(self._held) - self._depth[self._node]
        return "".join(self._held.popleft() for _ in range(settled)), False

    def flush(self) -> str:
        """Ends the text without a stop string; returns the characters held back until now."""
        text = "".join(self._held)
        self._held.clear()
        self._node = 0
        return text


class Decodes(Protocol):
    """Protocol of a tokenizer that decodes ids into text, and can be hashed."""

    def decode(self, ids: Any) -> str: ...

    def __hash__(self) -> int: ...


class Detokenizer:
    """Incremental decoder: its pieces join to `tokenizer.decode` of all tokens, and no piece ends within a character.
    The cost of a token does not grow with the text.

    A run of byte tokens (`<0x0A>`) is shown as a whole, because with one wrong byte `decode` turns every byte of the
    run into U+FFFD, those of whole characters too.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self._decode = tokenizer.decode
        self._byte_ids, self._silent = _byte_ids(tokenizer), _silent(tokenizer)
        self._window: list[int] = []  # latest tokens that have text
        self._shown = 0  # characters of the window's text that were shown

    def feed(self, token: int) -> str:
        """Decodes the next token; returns the text that it completes, "" within a character or a run of byte tokens.

        Raises RequestError for an id outside the vocabulary."""
        silent = self._silent.get(token)
        if silent is None:  # twice, because a leading space is left out
            silent = self._silent[token] = not self._decode([token, token])
        if silent:
            return ""
        self._window.append(token)
        if token in self._byte_ids:
            return ""
        text = self._decode(self._window)
        settled = len(text) - text.endswith(REPLACEMENT)  # a last U+FFFD may still become a character
        piece = text[self._shown : settled]
        self._shown = settled
        if len(self._window) > WINDOW:
            self._window = self._window[-CONTEXT:]
            self._shown = len(self._decode(self._window)) - (len(text) - settled)
        return piece

    def flush(self) -> str:
        """Ends the text; returns the characters held back because they may have been part of a longer character."""
        piece = self._decode(self._window)[self._shown :]
        self._window, self._shown = [], 0
        return piece


class GrowingText:
    """Text that grows by one token at a time: whole characters, which end before a stop string or at an end token.

    tokens  ids taken so far, with the one that ended the text
    text    characters that can be shown
    finish  None while the text may grow, "stop" after an end token or a stop string, "length" after `most` tokens

    Without a tokenizer only tokens are kept. `ends` are the ids that end the text; `most` is the largest number of
    tokens, None without a bound.
    """

    def __init__(
        self,
        tokenizer: Decodes | None,
        ends: Collection[int] = (),
        stop: str | Sequence[str] = (),
        most: int | None = None,
    ) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._ends, self._most = frozenset(ends), most
        self._stops = Stops(stop) if stop else None
        self.tokens: list[int] = []
        self.text = ""
        self.finish: str | None = None

    @property
    def stop(self) -> str | None:
        """Stop string that ended the text; None if another cause did, or none yet."""
        return None if self._stops is None else self._stops.matched

    def take(self, token: int) -> str:
        """Appends a token; returns the characters that it adds to `text`, sets `finish` if the text ends.

        Raises RequestError for an id outside the vocabulary; `text` then stays as it is."""
        self.tokens.append(token)
        if token in self._ends:
            self.finish = "stop"
            return ""
        if self._most is not None and len(self.tokens) >= self._most:
            self.finish = "length"
        detokenizer, self._detokenizer = self._detokenizer, None  # its window is wrong if an exception leaves it
        piece = "" if detokenizer is None else detokenizer.feed(token)
        self._detokenizer = detokenizer
        return self._shown(piece)

    def close(self) -> str:
        """Ends the text without further tokens; returns the characters held back until now, which are added to
        `text`."""
        return self._shown("" if self._detokenizer is None else self._detokenizer.flush(), last=True)

    def _shown(self, piece: str, last: bool = False) -> str:
        if self._stops is not None:
            piece, stopped = self._stops.feed(piece)
            if stopped:
                self.finish = "stop"
            elif last:
                piece += self._stops.flush()
        self.text += piece
        return piece


def special_stops(tokenizer: Tokenizer | None, stop: str | Sequence[str]) -> frozenset[int]:
    """Returns the ids of the stop strings that are special tokens: they end a text without being part of it."""
    if tokenizer is None or not stop:
        return frozenset()
    return frozenset(i for i in map(tokenizer.id_of, check_stops(stop)) if i is not None and i in tokenizer.special_ids)


@lru_cache(maxsize=2)
def _byte_ids(tokenizer: Decodes) -> frozenset[int]:
    """Returns the ids of the byte tokens `<0x00>` to `<0xFF>` (byte fallback); empty for most tokenizers."""
    ids: dict[str, int] = getattr(tokenizer, "ids", dict)()
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    return frozenset(ids[name] for name in names if name in ids and tokenizer.decode([ids[name]]) != name)


@lru_cache(maxsize=2)
def _silent(tokenizer: Decodes) -> dict[int, bool]:
    """Returns a memory of the ids that were decoded: id -> True if it has no text."""
    return {}
