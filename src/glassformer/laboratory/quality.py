"""Cost of fewer bits: the perplexity of one checkpoint in each precision, over the same held-out text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import RenderableType

from glassformer.errors import RequestError
from glassformer.figures.terminal import Tabular, ruled, size
from glassformer.generation.steps import check_tokens
from glassformer.loaded import Loaded
from glassformer.machine import Settings
from glassformer.model import Model
from glassformer.parts.quantized import quantize
from glassformer.progress import silent
from glassformer.text import (
    EvaluationWindows,
    OnProgress,
    Tokenizer,
    evaluation_windows,
    open_corpus,
    split,
    token_shards,
)
from glassformer.training.evaluate import score
from glassformer.units import plural

CONTEXT = 512
TOKENS = 20_000
ENOUGH = 2_000
"""Held-out tokens, a tenth of a text, below which a change of the perplexity is not meaningful."""
PACKED = (("int8", "int8"), ("int4", "int8"), ("int4", "int4"))
"""(precision of the matrices, precision of the head)."""


@dataclass(frozen=True)
class Quality:
    """Quality of a checkpoint in one precision: `loss` in nats per token, and `change` of the perplexity relative to
    the first row's."""

    weights: str
    head: str
    context: int
    tokens: int
    bytes: int
    """Bytes of all weights and scales."""
    bytes_per_token: int
    """Bytes that decoding reads per token: all but a table that is only looked up."""
    loss: float
    perplexity: float
    bits_per_byte: float | None
    change: float


@dataclass(frozen=True)
class QualityTable(Tabular):
    """Perplexity of one checkpoint in several precisions, over the same held-out text.

    Attributes
    ----------
    name : str
        Text or path that names the checkpoint, or the class of its value.
    data : str
        Corpus whose held-out part was read.
    rows : tuple of Quality
        The checkpoint unchanged, and in fewer bits.
    """

    name: str
    data: str
    rows: tuple[Quality, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "data": self.data, "rows": self.records()}

    def records(self) -> list[dict[str, Any]]:
        """Returns a table row for each precision of the checkpoint."""
        return [asdict(row) for row in self.rows]

    def lines(self) -> Iterator[str | RenderableType]:
        """Yields a heading and the table of precisions."""
        first = self.rows[0]
        held_out = f"{first.tokens:,} tokens in windows of {first.context}"
        yield f"{self.name} on the held-out part of {self.data}, {held_out}"
        table = ruled()
        for heading in ("weights", "head", "bytes", "read per token", "perplexity", "bits/byte", "change in %"):
            table.add_column(heading, justify="left" if heading in ("weights", "head") else "right")
        for row in self.rows:
            bits = "no" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}"
            table.add_row(
                row.weights, row.head, size(row.bytes), size(row.bytes_per_token), f"{row.perplexity:.4f}", bits,
                f"{100 * row.change:+.3f}",
            )  # fmt: skip
        yield table
        if first.tokens < ENOUGH:
            yield f"{first.tokens:,} tokens, too few to judge by: give a text with {10 * ENOUGH:,} or more (--data)"


def windows_of(
    tokenizer: Tokenizer,
    context: int,
    data: str = "python-docs",
    tokens: int = TOKENS,
    progress: OnProgress = silent,
) -> EvaluationWindows:
    """Returns the held-out text on which perplexity is measured: windows of at most 512 tokens, evenly spaced over the
    part of a corpus that `train` and `compare` hold out."""
    if tokens < 1:
        raise RequestError(f"tokens={tokens} must be at least 1", code="range", field="tokens", value=tokens)
    corpus = open_corpus(data, progress=progress)
    sides = split(corpus, progress=progress)
    held_out = token_shards(
        sides.validation.documents,
        tokenizer,
        sides.validation.fingerprint,
        notes=sides.describe,
        total_bytes=lambda: sides.validation.bytes,
        stage="tokenizing",
        progress=progress,
    )
    wide, held = min(CONTEXT, context), len(held_out)
    if held < wide + 1:
        raise RequestError(
            f"the held-out part of {data} has {plural(held, 'token')}, and a window of this model takes {wide + 1}: "
            f"give more text, or the model a shorter context by its expression: MODEL+context={max(1, held - 1)}",
            code="range", field="context", value=wide, expected=f"at most {max(0, held - 1)}",
        )  # fmt: skip
    # One window at a time: a quantised head computes all of its logits.
    return evaluation_windows(held_out, wide, tokens, token_bytes=held_out.token_bytes(tokenizer), batch=1)


def qualities(
    load: Callable[[], Loaded], data: str = "python-docs", tokens: int = TOKENS, progress: OnProgress = silent
) -> Iterator[Quality]:
    """Yields the quality of a checkpoint in each precision: as `load` returns it, in bf16, in 8 bits, and in 4 with a
    head of 8 or 4 bits.

    Raises RequestError for a model without a tokenizer, or a bidirectional one."""
    loaded = load()
    if loaded.tokenizer is None:
        raise RequestError(
            "this checkpoint has no tokenizer, and perplexity is measured on text", code="missing", field="tokenizer"
        )
    if loaded.config.encoder is not None:
        raise RequestError(
            "this model writes from a source, and perplexity is measured on texts that have none; give a decoder",
            code="conflict", field="model", expected="a decoder",
        )  # fmt: skip
    windows = windows_of(loaded.tokenizer, loaded.config.context, data, tokens, progress)
    for batch, _ in windows:
        check_tokens(loaded.model, batch.inputs)
    first = _measured(loaded.model, windows, progress)
    yield first
    if first.weights != "bfloat16":
        yield _measured(loaded.model.bfloat16(), windows, progress, first)
    for kind, head in PACKED:
        model = load().model
        quantize(model, kind, head)
        yield _measured(model, windows, progress, first, kind, head)


def _measured(
    model: Model,
    windows: EvaluationWindows,
    progress: OnProgress,
    first: Quality | None = None,
    kind: str | None = None,
    head: str | None = None,
) -> Quality:
    kind = kind or str(model.dtype).removeprefix("torch.")
    head = head or kind
    label = kind if head == kind else f"{kind} with a head of {head}"

    def told() -> Iterator[Any]:
        for done, batch in enumerate(windows, 1):
            yield batch
            progress(label, done, len(windows))

    how = Settings(str(model.device), "float32", torch.get_num_threads(), compile=False)
    found = score(model, told(), how)
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    looked_up = model.head.packed is not None or model.head.weight is not None
    return Quality(
        weights=kind,
        head=head,
        context=windows.context,
        tokens=found["tokens"],
        bytes=held,
        bytes_per_token=held - model.embedding.applied().nbytes if looked_up else held,
        loss=found["loss"],
        perplexity=found["perplexity"],
        bits_per_byte=found["bits_per_byte"],
        change=found["perplexity"] / first.perplexity - 1 if first else 0.0,
    )
