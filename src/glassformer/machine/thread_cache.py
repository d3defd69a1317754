"""What a further way gains over the one before it on this processor: kept for later processes, which begin with the way
that served. `threads.json` in the cache folder; what is found while work runs goes on from there, and corrects it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import median
from typing import Any

import torch

from glassformer.files import remember, remembered
from glassformer.machine import processor, quota
from glassformer.machine.pace import Way

FILE = "threads.json"
LAST = 5
"""So many comparisons of two ways are kept, and their median believed."""
KINDS = 256
"""Pairs of ways kept for a processor; the ones that were not met for the longest time go."""
LONGEST = 120
"""Characters of a pair's name."""


def gains(work: str, ways: Sequence[Way]) -> dict[int, float]:
    """Seconds of a way over those of the one before it, by its place among `ways`, of those that were compared here."""
    known = _known()
    found = {at: known.get(_pair(work, ways, at)) for at in range(1, len(ways))}
    return {at: median(ratios) for at, ratios in found.items() if ratios}


def keep(work: str, ways: Sequence[Way], at: int, ratio: float) -> None:
    """One more comparison of the way at this place with the one before it."""
    if not _believable(ratio):
        return
    known, pair = _known(), _pair(work, ways, at)
    ratios = [*known.pop(pair, []), round(ratio, 4)][-LAST:]
    remember(FILE, here(), dict([*known.items(), (pair, ratios)][-KINDS:]))


@cache
def here() -> str:
    """The processor with what this process has of it, and who computes."""
    cores = processor.own_cores()
    paid = "" if (share := quota.cores()) is None else f" of which {share:g} are paid for"
    return f"{processor.name()}, {len(processor.flags())} flags, {cores} cores{paid}, torch {torch.__version__}"


def _known() -> dict[str, list[float]]:
    """Of this processor, what can be believed."""
    found = remembered(FILE, here())
    pairs = found.items() if isinstance(found, dict) else ()
    return {pair: ratios for pair, ratios in list(pairs)[:KINDS] if len(pair) <= LONGEST and _are_ratios(ratios)}


def _are_ratios(found: Any) -> bool:
    return isinstance(found, list) and 0 < len(found) <= LAST and all(map(_believable, found))


def _believable(ratio: Any) -> bool:
    return isinstance(ratio, float) and 0.01 < ratio < 100


def _pair(work: str, ways: Sequence[Way], at: int) -> str:
    return f"{work}: {ways[at]} / {ways[at - 1]}"[:LONGEST]
