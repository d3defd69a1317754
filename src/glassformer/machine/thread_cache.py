"""Cache of measured gains: how long each way of work takes compared with the previous one on this processor, for later
processes, which start with the best way. `threads.json` in the cache folder; measurements during work update it."""

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
"""Most comparisons of two ways that are kept, the latest ones; their median is used."""
KINDS = 256
"""Most pairs of ways kept for a processor; the least recently used ones are dropped."""
LONGEST = 120
"""Most characters of a pair's name."""


def gains(work: str, ways: Sequence[Way]) -> dict[int, float]:
    """Returns {index of a way: ratio of its time to that of the previous way} for the kind of work `work`, as far as
    earlier processes on this processor compared them."""
    known = _known()
    found = {at: known.get(_pair(work, ways, at)) for at in range(1, len(ways))}
    return {at: median(ratios) for at, ratios in found.items() if ratios}


def keep(work: str, ways: Sequence[Way], at: int, ratio: float) -> None:
    """Stores a comparison for the kind of work `work`: `ratio` of the time of the way at index `at` to that of the
    previous one."""
    if not _believable(ratio):
        return
    known, pair = _known(), _pair(work, ways, at)
    ratios = [*known.pop(pair, []), round(ratio, 4)][-LAST:]
    remember(FILE, here(), dict([*known.items(), (pair, ratios)][-KINDS:]))


@cache
def here() -> str:
    """Returns the key of the cache, a text with the processor, the number of this process's cores, and torch's
    version."""
    cores = processor.own_cores()
    paid = "" if (share := quota.cores()) is None else f", {share:g} of them paid for"
    return f"{processor.name()}, {len(processor.flags())} flags, {cores} cores{paid}, torch {torch.__version__}"


def _known() -> dict[str, list[float]]:
    """Returns the cache's valid entries for this processor: name of a kind of work and of two ways (numbers of threads)
    to do it -> latest ratios of their times."""
    found = remembered(FILE, here())
    pairs = found.items() if isinstance(found, dict) else ()
    return {pair: ratios for pair, ratios in list(pairs)[:KINDS] if len(pair) <= LONGEST and _are_ratios(ratios)}


def _are_ratios(found: Any) -> bool:
    return isinstance(found, list) and 0 < len(found) <= LAST and all(map(_believable, found))


def _believable(ratio: Any) -> bool:
    return isinstance(ratio, float) and 0.01 < ratio < 100


def _pair(work: str, ways: Sequence[Way], at: int) -> str:
    return f"{work}: {ways[at]} / {ways[at - 1]}"[:LONGEST]
