"""Batched passes for many edits: rows of a batch are repeated, and every copy has a different edit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.introspection import at_rest, eager, edit
from glassformer.model import Model
from glassformer.parts.core.running import Edit

Metric = Callable[[Tensor], Tensor]
"""Function of logits (b, s, v); returns a number, or one for each row."""
OnPass = Callable[[int, int], None]
"""Function of (passes done, number of passes), called after each pass."""
Measure = Callable[[Tensor, int], Tensor]
"""Function of (tokens of all copies, number of copies); returns a number for each copy, (copies,)."""

Change = tuple[str, Edit]
"""One edit of a model: (site, function of the site's value)."""

SAME: Change = ("embed", lambda x: x)
"""Identity change, for the unedited model."""
TOKENS_PER_PASS = 4096
LOGITS_PER_PASS = 1 << 26


def by_loss(model: Model) -> Measure:
    """Returns a function that measures each copy of a batch by its mean cross-entropy in nats."""

    def measure(tokens: Tensor, copies: int) -> Tensor:
        losses = eager(model).loss(tokens[:, :-1], tokens[:, 1:], reduction="none")
        return losses.reshape(copies, -1).mean(1)

    return measure


def by_metric(model: Model, metric: Metric) -> Measure:
    """Returns a function that measures each copy of a batch by the mean of `metric(logits)` over its rows."""

    def measure(tokens: Tensor, copies: int) -> Tensor:
        logits = eager(model)(tokens)
        return torch.stack([number(metric(part), len(part)) for part in logits.chunk(copies)])

    return measure


def number(given: object, rows: int) -> Tensor:
    """Returns the result of a metric as a scalar tensor in fp64: the number given, or the mean of one number for each
    row. Raises RequestError for any other result."""
    try:
        found = torch.as_tensor(given, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise RequestError(
            f"metric gave {type(given).__name__}; give a number, or one for each row",
            code="type", field="metric", value=type(given).__name__,
        ) from None  # fmt: skip
    if found.numel() != 1 and found.shape != (rows,):
        raise RequestError(
            f"metric gave shape {tuple(found.shape)} of logits of {rows} rows; give a number, or one for each row",
            code="range", field="metric", value=tuple(found.shape),
        )  # fmt: skip
    return found.mean()


def outcomes(
    model: Model,
    tokens: Tensor,
    changes: Sequence[Change],
    measure: Measure,
    progress: OnPass | None = None,
) -> Tensor:
    """Returns the measure (len(changes),) fp64 of the model on tokens (b, s) under each change, an edit (site, f),
    separately.

    Copies share a pass up to 4,096 tokens or 64 Mi logits together; f gets the b rows of its copy."""
    b, s = tokens.shape
    fitting = min(TOKENS_PER_PASS, LOGITS_PER_PASS // eager(model).vocab_size) // (b * s)
    found: list[Tensor] = []
    for first in range(0, len(changes), max(1, fitting)):
        some = changes[first : first + max(1, fitting)]
        of_site: dict[str, list[tuple[slice, Edit]]] = {}
        for copy, (site, change) in enumerate(some):
            of_site.setdefault(site, []).append((slice(copy * b, (copy + 1) * b), change))
        edits = {site: _each(pairs) for site, pairs in of_site.items()}
        with torch.no_grad(), at_rest(model), edit(model, edits):
            found.append(measure(tokens.repeat(len(some), 1), len(some)).cpu().double())
        if progress is not None:
            progress(first + len(some), len(changes))
    return torch.cat(found)


def _each(changes: list[tuple[slice, Edit]]) -> Edit:
    def edited(x: Tensor) -> Tensor:
        for rows, change in changes:
            x[rows] = change(x[rows])
        return x

    return edited
