"""Training and held-out sides: two streams of documents that share no document.

With enough documents, whole documents are held out, chosen by a keyed hash of their content: the choice depends on
neither the order of reading nor the machine, and equal documents are on the same side. With few, or if a few hold
nearly all of the text, the end of each is held out, cut at a line (the split of nanoGPT's shakespeare_char).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from glassformer.errors import RequestError
from glassformer.progress import OnProgress, silent
from glassformer.text.documents import Corpus, Document
from glassformer.text.storage import digest

FEW = 10  # below this number of different documents, each is divided
LEAST = 1 / 3  # of the text to be held out: if whole documents make less than this, each is divided too
LOOKAHEAD = 64 * 1024  # characters searched for a line end after the target of a cut
CUT = "the last"
"""First words of the rule (`held_out` in `Split.describe`) of a split that cuts each document."""
VERSION = 1  # version of the rule; part of every fingerprint


@dataclass(frozen=True)
class SplitPlan:
    """Rule of a split: either whole documents are held out, those with hashes up to `threshold` except hashes in
    `too_large`, or the end of each document.

    `cuts` maps the hash of a document to the number of its characters on the training side; None if whole documents are
    held out.
    """

    threshold: int
    too_large: frozenset[int]
    cuts: dict[int, int] | None
    documents: int
    bytes: dict[str, int]  # of each side


@dataclass
class Split:
    """A corpus and its division into a training and a held-out side. The rule of the division (`plan`) is computed from
    the corpus at its first use."""

    corpus: Corpus
    fraction: float
    seed: int
    progress: OnProgress = field(default=silent, repr=False)

    @property
    def train(self) -> Side:
        return Side(self, "train")

    @property
    def validation(self) -> Side:
        return Side(self, "validation")

    @cached_property
    def plan(self) -> SplitPlan:
        return _plan(self)

    def describe(self) -> dict[str, object]:
        """Returns the division as plain values for a record of the data: its rule in words, the number of documents,
        the seed, and the task, if any. The rule names the actual held-out share if that differs from `fraction` by 5%
        or more, because lines and documents are not cut."""
        size = self.plan.bytes
        share = size["validation"] / sum(size.values())
        near = abs(share - self.fraction) < 0.05 * self.fraction
        told = f"{self.fraction:g}" if near else f"{share:.2g}"
        rule = f"{CUT} {told} of each document" if self.plan.cuts else f"whole documents, {told} of the bytes"
        rule += "" if near else f" ({self.fraction:g} asked for)"
        task = {} if self.corpus.task is None else {"task": self.corpus.task}
        return {"held_out": rule, "documents": self.plan.documents, "split_seed": self.seed, **task}


@dataclass(frozen=True)
class Side:
    """One side of a split: a stream of documents that can be read repeatedly."""

    split: Split
    name: str

    @property
    def fingerprint(self) -> str:
        split = self.split
        return digest("side", VERSION, split.corpus.fingerprint, split.fraction, split.seed, self.name)

    @property
    def bytes(self) -> int:
        """Number of UTF-8 bytes of text on this side."""
        return self.split.plan.bytes[self.name]

    def documents(self) -> Iterator[Document]:
        plan, held_out = self.split.plan, self.name == "validation"
        for document in self.split.corpus.documents():
            rank = _rank(document, self.split.seed)[0]
            if plan.cuts is None:
                if (rank <= plan.threshold and rank not in plan.too_large) == held_out:
                    yield document
            elif (cut := plan.cuts.get(rank, -1)) < 0:
                if not held_out:
                    yield document
            else:
                yield _part(document, cut, None) if held_out else _part(document, 0, cut)


def split(corpus: Corpus, fraction: float = 0.1, seed: int = 0, progress: OnProgress = silent) -> Split:
    """Returns the division of a corpus that holds out `fraction` of its text. Equal arguments give equal sides.

    Raises RequestError for a fraction outside (0, 0.5], and (when the sides are first read) for a text of one
    character.
    """
    if not 0 < fraction <= 0.5:
        raise RequestError(
            f"held_out={fraction!r} must be a fraction above 0 and at most 0.5, as 0.1",
            code="range", field="held_out", value=fraction,
        )  # fmt: skip
    return Split(corpus, float(fraction), int(seed), progress)


def _rank(document: Document, seed: int) -> tuple[int, int, int]:
    """Returns (64-bit keyed hash of a document's content, or of its group; number of UTF-8 bytes; number of
    characters)."""
    sha = hashlib.blake2b(digest_size=8, key=digest("split", seed).encode())
    size = characters = 0
    for piece in document.pieces():
        data = piece.encode()
        sha.update(data)
        size += len(data)
        characters += len(piece)
    if document.group is not None:  # one rank for all of a group
        sha = hashlib.blake2b(document.group.encode(), digest_size=8, key=digest("split group", seed).encode())
    return int.from_bytes(sha.digest(), "little"), size, characters


def _plan(parts: Split) -> SplitPlan:
    # 16 bytes for each document, whatever its length: documents of 3 kB make a corpus 200 times larger.
    ranks, sizes, total = array("Q"), array("Q"), 0
    for document in parts.corpus.documents():
        rank, size, _ = _rank(document, parts.seed)
        ranks.append(rank)
        sizes.append(size)
        total += size
        parts.progress("dividing", total, parts.corpus.size)
    if not total:
        raise RequestError(
            f"data={parts.corpus.name!r} holds no text", code="missing", field="data", value=parts.corpus.name
        )
    budget = parts.fraction * total
    rank_of, group = np.unique(np.frombuffer(ranks, np.uint64), return_inverse=True)
    weight = np.bincount(group.reshape(-1), weights=np.frombuffer(sizes, np.uint64)).astype(np.int64)
    # A document larger than the whole held-out share stays in training.
    fits = weight <= budget
    # If the others are next to nothing, they would not represent the text: the large ones have to be cut.
    if len(rank_of) < FEW or weight[fits].sum() < LEAST * budget:
        return _divide(parts, len(ranks), total)
    held = np.cumsum(weight[fits])
    last = int(np.abs(held - budget).argmin())
    too_large = frozenset(int(rank) for rank in rank_of[~fits])
    validation = int(held[last])
    sides = {"train": total - validation, "validation": validation}
    return SplitPlan(int(rank_of[fits][last]), too_large, None, len(ranks), sides)


def _divide(parts: Split, documents: int, total: int) -> SplitPlan:
    """Returns the plan that holds out the end of each document, from the first line end at or after `1 - fraction` of
    its characters. Raises RequestError if nothing is held out."""
    cuts: dict[int, int] = {}
    held = 0
    for document in parts.corpus.documents():
        rank, size, characters = _rank(document, parts.seed)
        if characters < 2:
            continue
        if rank not in cuts:
            cuts[rank] = _line_end(document, min(int(characters * (1 - parts.fraction)), characters - 1), characters)
        held += size - sum(len(piece.encode()) for piece in _part(document, 0, cuts[rank]).pieces())
    if not held:
        raise RequestError(
            f"data={parts.corpus.name!r} is too short to hold anything out: give at least two characters",
            code="range", field="data", value=parts.corpus.name,
        )  # fmt: skip
    return SplitPlan(-1, frozenset(), cuts, documents, {"train": total - held, "validation": held})


def _line_end(document: Document, target: int, characters: int) -> int:
    """Returns the first index from `target` on at which a line of the document starts; `target` if no line end is
    near."""
    target = max(target, 1)
    # Near: at most a quarter of the held-out share moves to the training side.
    near = min(target + (characters - target) // 4, target + LOOKAHEAD)
    # From target - 1: the target itself may already start a line.
    ahead = "".join(_part(document, target - 1, near).pieces())
    return target + max(ahead.find("\n"), 0)


def _part(document: Document, begin: int, end: int | None) -> Document:
    """Returns the characters of a document from one index to before another (with `end` None, to the last) as a
    document, which is read in pieces."""

    def chunks() -> Iterator[str]:
        position = 0
        for piece in document.pieces():
            if end is not None and position >= end:
                return
            part = piece[max(begin - position, 0) : None if end is None else end - position]
            if part:
                yield part
            position += len(piece)

    return Document(document.name, chunks)
