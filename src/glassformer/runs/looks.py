"""Looks: numbers of seeds at which verdicts were seen, and the level that corrects for several of them.

Adding seeds until a difference is significant is wrong far more often than 5 % of the time (13 % if verdicts are seen
at 2 to 5 seeds). A smaller level that is equal at every look (Pocock 1977) keeps all looks together at 5 %. It is found
by simulation with a fixed seed, because t tests with few degrees of freedom are not the normal tests of the printed
tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from glassformer.runs.contrasts import Array

PATHS = 400_000
"""Number of simulated comparisons without a difference: the level is known to about 1 % of itself."""
CHUNK = 20_000
"""Simulated comparisons at a time, so that they take a few megabytes."""
SEED = 1977
Pairs = tuple[tuple[int, int], ...]


def constant_level(looks: Sequence[int], pairs: Pairs = ((0, 1),), error: float = 0.05) -> float:
    """Returns the level of each look with which a false verdict, on any pair at any look, has probability `error`:
    .0275 if verdicts are seen at 4 and 8 seeds, .0196 at 3, 5 and 8. Looks with one seed do not count, because they
    show no verdict."""
    counted = _counted(looks)
    if len(counted) < 2:
        return error
    return float(np.quantile(_p_values(counted, pairs).min(1), error))


def false_verdicts(looks: Sequence[int], levels: Sequence[float], pairs: Pairs = ((0, 1),)) -> float:
    """Returns the probability of a false verdict, on any pair at any look, if look i has the level `levels[i]`."""
    return float((_p_values(_counted(looks), pairs) < np.asarray(levels)).any(1).mean())


def look_notes(seen: Sequence[int], planned: Sequence[int]) -> list[str]:
    """Returns [note on the levels of the verdicts], if verdicts are seen at several numbers of seeds; else []."""
    looks = sorted({*seen, *planned})
    if len(looks) < 2:
        return []
    level = f"{constant_level(looks):.2%}"
    told = f"{', '.join(map(str, looks[:-1]))} and {looks[-1]} seeds"
    if set(seen) <= set(planned):
        return [f"Verdicts are seen at {told}, as planned: each has the level {level}, and together they have 5 %."]
    levels = [constant_level(sorted({*looks[: i + 1], *planned})) for i in range(len(looks))]
    if len(set(levels)) == 1:  # the first look already had the level of all
        own = " and ".join(str(look) for look in looks if look not in planned)
        return [
            f"Verdicts are seen at {told}, and {own} was not planned: each has the level {level}, and together "
            "they have 5 %."
        ]
    return [
        f"Seeds were added after a verdict had been seen. For looks after {told} the level is {level}, which keeps 5 % "
        f"where every look has it; as the earlier ones had more, the chance of a false verdict at any look is "
        f"{false_verdicts(looks, levels):.1%}. --looks {','.join(map(str, looks))} from the start keeps 5 %."
    ]


def _counted(looks: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({n for n in looks if n > 1}))


@lru_cache(maxsize=8)
def _p_values(looks: tuple[int, ...], pairs: Pairs) -> Array:
    """Returns the p values, at each look, of `PATHS` simulated comparisons of arms without a difference, (PATHS,
    looks). The p value of a comparison is the share of simulated ones whose largest |t| over the pairs is at least as
    large."""
    arms = 1 + max(max(pair) for pair in pairs)
    random = np.random.default_rng(SEED)
    largest = np.concatenate([
        _largest(random.standard_normal((CHUNK, looks[-1], arms), dtype=np.float32), looks, pairs)
        for _ in range(PATHS // CHUNK)
    ])  # fmt: skip
    ranks = (-largest).argsort(0).argsort(0)
    return (ranks + 1) / PATHS


def _largest(losses: Array, looks: Sequence[int], pairs: Pairs) -> Array:
    """Returns the largest |t| of the pairs over the first seeds of `losses` (chunk, seeds, arms), for each look:
    (chunk, looks)."""
    found = []
    for seeds in looks:
        table = losses[:, :seeds]
        means = table.mean(1)
        residuals = table - table.mean(2, keepdims=True) - (means - means.mean(1, keepdims=True))[:, None]
        scale = np.sqrt((residuals**2).sum((1, 2)) / ((seeds - 1) * (losses.shape[2] - 1)) * 2 / seeds)
        gaps = np.stack([np.abs(means[:, b] - means[:, a]) for a, b in pairs])
        found.append(gaps.max(0) / scale)
    return np.stack(found, axis=1)
