"""Log-probabilities of the tokens of a prompt, as evaluation programs and the echo of completions ask for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from glassformer.generation.steps import LEAST_PIECE, PieceReader, split_pieces
from glassformer.model import Model
from glassformer.parts.state import ModelState


@dataclass
class PromptScores:
    """Log-probabilities of the tokens of a prompt after the first, filled while the prompt is read."""

    top: int = 0
    """Number of most likely tokens recorded for each position; 0 records none."""
    only: bool = False
    """True if no text is generated after the prompt."""
    logprobs: list[float] = field(default_factory=list)
    """log p(x_i | x_1 ... x_{i-1}) in nats, for i from 2."""
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    """Log-probabilities of the most likely tokens by id, best first, for the same positions."""

    @torch.inference_mode()
    def read(self, model: Model, ids: Sequence[int], state: ModelState, piece: int | None) -> Iterator[None]:
        """Prefills all tokens but the last into `state`, in pieces of at most `piece`, and stores scores; yields None
        after each layer of a piece, and after the scores of each `LEAST_PIECE` tokens."""
        tokens = torch.tensor([ids], device=model.device)
        parts = split_pieces(tokens[:, :-1], piece, model.settled)
        for part, targets in zip(parts, tokens[0, 1:].split([part.shape[1] for part in parts]), strict=True):
            if model.reads_by_layer:
                reader = PieceReader(model, part, state)
                while not reader.read(lambda: True):
                    yield None
                assert reader.hidden is not None
                x = reader.hidden
            else:
                x = model.hidden_states(part, state)
            for rows, target in zip(x.split(LEAST_PIECE, 1), targets.split(LEAST_PIECE), strict=True):
                logits = model.logits(model.unembed(rows))[0].float()
                total = logits.logsumexp(-1, keepdim=True)
                self.logprobs += (logits.gather(-1, target[:, None]) - total)[:, 0].tolist()
                if self.top:
                    best = logits.topk(min(self.top, logits.shape[-1]))
                    values = (best.values - total).tolist()
                    self.top_logprobs += [
                        dict(zip(*row, strict=True)) for row in zip(best.indices.tolist(), values, strict=True)
                    ]
                yield None
