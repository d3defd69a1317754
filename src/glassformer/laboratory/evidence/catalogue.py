"""The list of all claims, and claims by their names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from glassformer.laboratory.evidence import (
    activations,
    attention,
    condensing,
    constructions,
    costs,
    depth,
    entropy,
    experts,
    found,
    learning_in_context,
    norms,
    positions,
    recurrences,
    training,
    warmup,
)
from glassformer.laboratory.evidence.claim import Claim
from glassformer.names.checks import check_claim

SUBJECTS = (
    activations, norms, depth, condensing, entropy, found, positions, attention, experts, recurrences, training, warmup,
    costs, learning_in_context, constructions,
)  # fmt: skip
"""Modules of claims, in the order of the page."""


@cache
def known() -> dict[str, Claim]:
    """Returns {name: claim} for all claims: exact ones first, then by the minutes that they take."""
    found = [claim for subject in SUBJECTS for claim in subject.CLAIMS]
    found.sort(key=lambda claim: (not claim.quick, claim.kind == "undecidable", claim.minutes, claim.name))
    return {claim.name: claim for claim in found}


def named(names: Sequence[str]) -> list[Claim]:
    """Returns the claims with these names, or all claims if `names` is empty. Raises RequestError for an unknown name,
    with the nearest ones."""
    for name in names:
        check_claim(name)
    return [known()[name] for name in dict.fromkeys(names)]
