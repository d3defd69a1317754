"""Notes on text that is read again and again: passes over the training text, held-out text that training reads too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from glassformer.config import ModelConfig
from glassformer.text import Tokens
from glassformer.training.recipe import Recipe

MOST_PASSES = 4
"""Passes over a text that teach nearly as much as new text (Muennighoff et al. 2023, 2305.16264)."""
PIECES, PIECE_BYTES, LEAST_BYTES = 64, 256, 64
"""Largest number of pieces of held-out text that are searched for in the training text, bytes of a piece, and least
bytes of a piece that is a whole shorter document."""
SEARCHED = 1 << 22
"""Number of tokens at the start of the training text that are searched."""
SHARED = 0.1
"""Smallest share of pieces found in the training text that causes a note."""


def passes(recipe: Recipe, config: ModelConfig, text: Tokens) -> float | None:
    """Returns the number of times that a run will read the whole training text; None for a budget of minutes, and for
    tasks, whose rows are drawn without end."""
    if recipe.epochs is not None:
        return recipe.epochs
    steps = recipe.num_steps(config)
    return None if steps is None else times_read(steps * recipe.tokens_per_step, recipe, text)


def times_read(tokens: int, recipe: Recipe, text: Tokens) -> float | None:
    """Returns the number of times that a run of `tokens` tokens reads the whole training text; None for data that is
    drawn without end."""
    return tokens / len(text.train) if recipe.objective.repeats and not text.train.task else None


def repeat_notes(found: Mapping[str, float | None], several: bool = False) -> list[str]:
    """Returns [a note] if the training text is read more than MOST_PASSES times, otherwise [].

    Parameters
    ----------
    found
        Passes of each model over the training text; None if they are not known.
    several
        True if the note names the models."""
    many = {name: times for name, times in found.items() if times is not None and times > MOST_PASSES}
    if not many:
        return []
    told = ", ".join(f"{name} {times:.3g} times" for name, times in many.items())
    return [
        f"The training text is read {told if several else f'{max(many.values()):.3g} times'}: more than {MOST_PASSES} "
        "passes teach little, and the model learns the text by heart; more text helps, or fewer tokens."
    ]


def shared_notes(text: Tokens) -> list[str]:
    """Returns [a note] if much of the held-out text also occurs in the training text, otherwise []."""
    share = 0.0 if text.train.task else shared(text)
    if share < SHARED:
        return []
    return [
        f"{share:.0%} of the held-out text is in the training text too (of {PIECES} pieces at most), so the held-out "
        "loss is too low to compare with others; leave out repeated text, or hold out other documents."
    ]


def shared(text: Tokens) -> float:
    """Returns the share of pieces of the held-out text that are in the training text; 0 if no piece is long enough."""
    kind = np.dtype(np.uint8) if text.tokenizer.vocab_size <= 256 else text.train.tokens.dtype  # bytes are searched
    train = text.train.tokens[:SEARCHED].astype(kind).tobytes()
    pieces = [piece.astype(kind).tobytes() for piece in _pieces(text)]
    return sum(_inside(train, piece, kind.itemsize) for piece in pieces) / max(1, len(pieces))


def _inside(train: bytes, piece: bytes, width: int) -> bool:
    at = train.find(piece)
    while at >= 0 and at % width:  # a match that does not start at the first byte of a token
        at = train.find(piece, at + 1)
    return at >= 0


def _pieces(text: Tokens) -> Iterator[np.ndarray]:
    """Yields slices of the held-out text, evenly spread, each from one document."""
    tokens, starts = text.validation.tokens, text.validation.document_starts.astype(np.int64)
    of_byte = len(tokens) / max(1, text.validation.bytes)
    length, least = (max(8, round(size * of_byte)) for size in (PIECE_BYTES, LEAST_BYTES))
    ends = np.append(starts[1:], len(tokens))
    for at in range(0, len(tokens), max(length, -(-len(tokens) // PIECES))):
        document = int(np.searchsorted(starts, at, side="right")) - 1
        end = min(int(ends[document]), at + length)
        begin = max(int(starts[document]), end - length)
        if end - begin >= least:
            yield tokens[begin:end]
