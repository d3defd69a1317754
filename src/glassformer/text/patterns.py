r"""Check of the running time of regular expressions in an untrusted tokenizer.json.

The library's engine (Oniguruma) backtracks. A pattern is refused if it may do so more often than a text is long from
one position: `(x+x+)y` or `(x|x)*y`, where a repetition can be divided in many ways before something fails. The
remaining patterns take at most quadratic time in the length of a text. Such a repetition is safe at the end of an
alternative, if nothing can fail afterwards (`\s*[\r\n]+`), before a character that it cannot hold, or if it is
possessive (`x++`, `(?>x+)`).

>>> check(r" ?\p{L}+|\s+(?!\S)|\s+")
>>> check("(?:x+x+)y")
Traceback (most recent call last):
ValueError: ...
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

LONGEST = 1 << 16
MANY = 16  # repetitions above which their number counts as that of the text
MOST_WAYS = 1 << 8  # of taking the optional parts or not

# A set of characters is one of atoms: each ASCII character, and beyond it the general categories of Unicode.
ASCII = frozenset(map(chr, range(128)))
CATEGORIES = frozenset(
    [
        *("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po"),
        *("Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Co", "Cn"),
    ]
)
ALL = ASCII | CATEGORIES
FOREIGN = frozenset(["han", "hiragana", "katakana", "hangul", "thai", "arabic", "hebrew", "cyrillic", "greek"])


class Some(NamedTuple):
    """A set of characters, known in part: `may`, the atoms that it may intersect, and `must`, the atoms that it
    contains completely."""

    may: frozenset[str]
    must: frozenset[str]

    def or_(self, other: Some) -> Some:
        return Some(self.may | other.may, self.must | other.must)

    def and_(self, other: Some) -> Some:
        return Some(self.may & other.may, self.must & other.must)

    def negated(self) -> Some:
        return Some(ALL - self.must, ALL - self.may)


NONE = Some(frozenset(), frozenset())


def _one(character: str) -> Some:
    if character in ASCII:
        return Some(frozenset(character), frozenset(character))
    return Some(frozenset([unicodedata.category(character)]), frozenset())


def _range(first: str, last: str) -> Some:
    low = frozenset(c for c in ASCII if first <= c <= last)
    return Some(low | (CATEGORIES if last not in ASCII else frozenset()), low)


def _in(*categories: str) -> frozenset[str]:
    beyond = {name for name in CATEGORIES if name.startswith(categories)}
    return frozenset({c for c in ASCII if unicodedata.category(c).startswith(categories)} | beyond)


def _named(name: str) -> Some:
    """Returns the set of \\p{name}; for an unknown name, one of any characters."""
    found = _in(name) if name[:1] in "LMNPSZC" and (len(name) == 1 or name in CATEGORIES) else frozenset[str]()
    if found:
        return Some(found, found)
    return Some(CATEGORIES if name.lower() in FOREIGN else ALL, frozenset())


_BLANKS = frozenset("\t\n\v\f\r ")
_WORD = _in("L", "M", "N", "Pc")
_KINDS = {
    "s": Some(_BLANKS | _in("Z") | {"Cc"}, _BLANKS | _in("Z")),
    "w": Some(_WORD, _in("L", "M", "Nd", "Pc")),
    "d": Some(_in("Nd"), _in("Nd")),
    "h": Some(*[frozenset("0123456789abcdefABCDEF")] * 2),
    "R": Some(frozenset("\n\v\f\r") | {"Zl", "Zp", "Cc"}, frozenset()),
    "X": Some(ALL, frozenset()),
    "N": Some(ALL - {"\n"}, ALL - {"\n"}),
    "O": Some(ALL, ALL),
}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
_LETTERS = _in("L")

FAR = "each round of a repetition in it may read far ahead"

# Nodes of a pattern


class Node:
    """A node of a parsed pattern."""

    chars: frozenset[str] = frozenset()
    """Characters that the node's matches may contain."""
    first: frozenset[str] = frozenset()
    empty: bool = True
    """True if the node may match the empty string."""
    fails: bool = True
    """True if the node may fail to match."""
    late: bool = False
    """True if the node may fail after a repetition in it."""
    wide: bool = False
    """True if the node may scan to the end of a text, and fail there, from each character."""
    plain: bool = True
    """True if the node has at most one match at each position, without repetition."""
    scans: frozenset[str] = frozenset()
    """Characters that the node's unbounded repetitions may contain."""
    back: frozenset[str] = frozenset()
    """Characters of `scans` that are given back if a later node fails."""
    ways: int = 1

    def check(self, fails: bool) -> None:
        """Raises ValueError if the node may take exponential time; `fails`: True if a later node may fail."""


class Anchor(Node):
    r"""A node that matches a position and no characters: ^, \b and the like."""


class Set(Node):
    empty = False

    def __init__(self, chars: frozenset[str]):
        self.chars = self.first = chars


@dataclass(eq=False)
class Sequence(Node):
    items: list[Node]

    def __post_init__(self) -> None:
        self.chars = frozenset[str]().union(*(item.chars for item in self.items))
        self.empty = all(item.empty for item in self.items)
        self.fails = any(item.fails for item in self.items)
        self.plain = all(item.plain for item in self.items)
        self.scans = frozenset[str]().union(*(item.scans for item in self.items))
        self.back = frozenset[str]().union(*(item.back for item in self.items))
        self.wide = any(item.wide for item in self.items)
        self.ways = min(math.prod(item.ways for item in self.items), 1 << 30)
        begun = next((i for i, item in enumerate(self.items) if not item.empty), len(self.items))
        self.first = frozenset[str]().union(*(item.first for item in self.items[: begun + 1]))
        scanned = next((i for i, item in enumerate(self.items) if item.scans), len(self.items))
        self.late = any(item.late for item in self.items) or any(item.fails for item in self.items[scanned + 1 :])

    def check(self, fails: bool) -> None:
        later = [fails]  # for each item, True if a later one may fail
        for item in reversed(self.items[1:]):
            later.append(later[-1] or item.fails)
        later.reverse()
        ways = 1
        for i, (item, more) in enumerate(zip(self.items, later, strict=False)):
            item.check(more)
            if more and item.wide:
                raise ValueError(FAR)
            ways *= item.ways
            if more and ways > MOST_WAYS:
                raise ValueError("its optional parts can be taken in too many ways")
            if item.back:
                self._follow(item.back, i + 1, later)

    def _follow(self, held: frozenset[str], start: int, later: list[bool]) -> None:
        """Raises ValueError if an item from index `start` on can divide the characters `held` of a repetition with it,
        and fail."""
        for item, fails in zip(self.items[start:], later[start:], strict=False):
            if item.scans & held and (fails or item.late):
                raise ValueError("two of its repetitions can divide a text between them in many ways")
            if not item.empty and not item.chars & held:
                return


@dataclass(eq=False)
class Alternation(Node):
    options: list[Node]

    def __post_init__(self) -> None:
        self.chars, self.first, self.scans, self.back = (
            frozenset[str]().union(*(getattr(one, name) for one in self.options))
            for name in ("chars", "first", "scans", "back")
        )
        self.empty = any(one.empty for one in self.options)
        self.fails = all(one.fails for one in self.options)
        self.late = any(one.late for one in self.options)
        self.wide = any(one.wide for one in self.options)
        self.ways = sum(one.ways for one in self.options)
        told = not self.empty and sum(len(one.first) for one in self.options) == len(self.first)
        self.plain = told and all(one.plain for one in self.options)  # the first character decides

    def check(self, fails: bool) -> None:
        for one in self.options:
            one.check(fails)


@dataclass(eq=False)
class Repeat(Node):
    """A repetition of `body`, `low` to `high` times; `held`: True if it is possessive or atomic."""

    body: Node
    low: int
    high: float
    held: bool = False

    def __post_init__(self) -> None:
        body = self.body
        self.long = self.high > MANY
        self.chars, self.first = body.chars, body.first
        self.empty, self.fails = self.low == 0 or body.empty, self.low > 0 and body.fails
        self.late = body.late or (bool(body.scans) and self.low > 1)
        self.wide = body.wide or (self.long and body.late)
        self.plain = self.low == self.high and not self.long and body.plain
        self.scans = body.scans | (body.chars if self.long else frozenset())
        self.back = frozenset() if self.held else self.scans
        if not self.held and not self.long:
            taken = 1 if body.plain else min(body.ways, 1 << 30) ** int(self.high)
            self.ways = min(taken * (int(self.high) - self.low + 1), 1 << 30)

    def check(self, fails: bool) -> None:
        again = (fails and not self.held) or self.low > 1
        if again and ((self.long and not self.body.plain) or (self.high > 1 and fails and self.body.scans)):
            raise ValueError("a repetition in it can divide a text in many ways")
        if self.high > 1 and self.body.wide:
            raise ValueError(FAR)
        self.body.check(again)


class Lookaround(Node):
    def __init__(self, body: Node):
        self.body, self.scans, self.late = body, body.scans, bool(body.scans)
        self.plain = not body.scans

    def check(self, fails: bool) -> None:
        if self.body.wide:
            raise ValueError(FAR)
        self.body.check(True)


# Parser

_SIGNS = {"?": (0, 1), "*": (0, math.inf), "+": (1, math.inf)}
_COUNT = re.compile(r"\{(\d{0,6})(,?)(\d{0,6})\}")
_CODE = re.compile(r"x\{([0-9A-Fa-f]{1,6})\}|x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{4})|0([0-7]{0,2})")
_NAMED = re.compile(r"([pP])\{(\^?)([^}]{1,80})\}")
_FLAGS = re.compile(r"\?([im]*)(-[im]*)?([:)])")
_NAME = re.compile(r"\?<[A-Za-z_]\w*>")
_POSIX = re.compile(r"\[:\^?\w+:\]")


class _Reader:
    def __init__(self, pattern: str):
        self.text, self.at, self.folded = pattern, 0, False

    def next(self) -> str:
        if self.at >= len(self.text):
            raise ValueError("it ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def ahead(self, *words: str) -> bool:
        """Consumes the first of the words that matches at the current place; returns True if one does."""
        word = next((word for word in words if self.text.startswith(word, self.at)), "")
        self.at += len(word)
        return bool(word)

    def matched(self, what: re.Pattern[str]) -> re.Match[str] | None:
        if found := what.match(self.text, self.at):
            self.at = found.end()
        return found

    def choice(self, inside: bool) -> Node:
        folded, options = self.folded, list[Node]([self.sequence()])
        while self.ahead("|"):
            options.append(self.sequence())
        if inside and not self.ahead(")"):
            raise ValueError("a bracket in it is not closed")
        self.folded = folded
        return options[0] if len(options) == 1 else Alternation(options)

    def sequence(self) -> Sequence:
        items: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            node = self.repeated(self.atom())
            items += node.items if isinstance(node, Sequence) else [node]
        return Sequence(items)

    def repeated(self, node: Node) -> Node:
        while self.at < len(self.text):
            if counted := self.matched(_COUNT):
                low, comma, high = counted.groups()
                if not low and not high:  # literal braces
                    return Sequence([node, *(Set(_one(c).may) for c in counted[0])])
                least = int(low or 0)
                most = int(high) if high else math.inf if comma else least
                node = Repeat(node, int(min(least, most)), max(least, most))
                _ = comma and self.ahead("?")
            elif self.text[self.at] in "?*+":
                least, most = _SIGNS[self.next()]
                node = Repeat(node, least, most, held=self.ahead("+"))
                self.ahead("?")
            else:
                break
        return node

    def atom(self) -> Node:
        character = self.next()
        if character == "(":
            return self.group()
        if character == "[":
            return self.set(self.members())
        if character in "*+?":
            raise ValueError("one of its repetitions has nothing before it")
        if character == ".":
            return Set(ALL)
        if character in "^$":
            return Anchor()
        if character != "\\":
            return self.set(_one(character))
        if self.ahead(*"bBAzZGKyY"):
            return Anchor()
        return self.set(self.escaped()[1])

    def set(self, some: Some) -> Node:
        return Set(some.may | _LETTERS if self.folded and some.may & _LETTERS else some.may)

    def group(self) -> Node:
        if self.ahead("?#"):
            while self.next() != ")":
                pass
            return Anchor()
        if self.ahead("?=", "?!"):
            return Lookaround(self.choice(inside=True))
        if self.ahead("?<=", "?<!"):
            behind = self.choice(inside=True)
            if behind.scans:
                raise ValueError("it looks behind without a bound")
            return Lookaround(behind)
        if self.ahead("?>"):
            return Repeat(self.choice(inside=True), 1, 1, held=True)
        if flags := self.matched(_FLAGS):
            folded, self.folded = self.folded, "i" in flags[1] or (self.folded and "i" not in (flags[2] or ""))
            if flags[3] == ")":  # for the rest of the group
                rest = self.choice(inside=False)
                self.folded = folded
                return rest
            made = self.choice(inside=True)
            self.folded = folded
            return made
        if self.text.startswith("?", self.at) and not self.matched(_NAME):
            raise ValueError(f"unknown in advance is what {self.text[self.at - 1 : self.at + 3]} finds")
        return self.choice(inside=True)

    def escaped(self) -> tuple[str, Some]:
        """Parses an escape after its backslash; returns (the character, "" for a class; the set that it denotes)."""
        if named := self.matched(_NAMED):
            found = _named(named[3])
            return "", found.negated() if (named[1] == "P") != bool(named[2]) else found
        if code := self.matched(_CODE):
            number = int(next(filter(None, code.groups()), "0"), 8 if code[4] is not None else 16)
            return self.plainly(chr(min(number, 0x10FFFF)))
        character = self.next()
        if character in _KINDS:
            return "", _KINDS[character]
        if character.lower() in _KINDS and character in "SWDH":
            return "", _KINDS[character.lower()].negated()
        if character.isdigit() or character in "kg":
            raise ValueError(f"unknown in advance is what \\{character} finds")
        return self.plainly(_CONTROLS.get(character, character))

    def plainly(self, character: str) -> tuple[str, Some]:
        return character, _one(character)

    def members(self) -> Some:
        """Parses a bracket expression after its opening bracket, and returns its set."""
        negated, found, others = self.ahead("^"), NONE, list[Some]()
        begun = self.at
        while self.at == begun or not self.ahead("]"):
            if self.ahead("&&"):
                others.append(found)
                found = NONE
            elif self.matched(_POSIX):
                found = found.or_(Some(ALL, frozenset()))
            elif self.ahead("["):
                found = found.or_(self.members())
            else:
                found = found.or_(self.member())
        for other in others:
            found = found.and_(other)
        return found.negated() if negated else found

    def member(self) -> Some:
        first, found = self.one()
        ranged = first and self.text.startswith("-", self.at) and self.text[self.at + 1 : self.at + 2] not in ("]", "[")
        if not ranged or self.text.startswith("-&&", self.at):
            return found
        self.at += 1
        last, more = self.one()
        return _range(first, last) if last else found.or_(_one("-")).or_(more)

    def one(self) -> tuple[str, Some]:
        return self.escaped() if self.ahead("\\") else self.plainly(self.next())


def check(pattern: str) -> None:
    """Raises ValueError for a regular expression that may take too long, or whose time is unknown."""
    if len(pattern) > LONGEST:
        raise ValueError(f"its {len(pattern)} characters are more than {LONGEST}")
    reader = _Reader(pattern)
    found = reader.choice(inside=False)
    if reader.at < len(pattern):
        raise ValueError("a bracket in it was never opened")
    found.check(False)


def patterns(said: Any) -> Iterator[str]:
    """Yields the regular expressions in the parts of a tokenizer.json, as the library writes them."""
    inside = said.values() if isinstance(said, Mapping) else said if isinstance(said, list) else ()
    for one in inside:
        yield from patterns(one)
    if isinstance(said, Mapping) and isinstance(pattern := said.get("Regex"), str):
        yield pattern
