from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.text import Batch, FedBatch, Tokens
from glassformer.training.objectives.base import ObjectiveConfig
from glassformer.training.objectives.pairs import Pair, PairBatches, Pairs, PairWindows, SourceLayout, check_pairs


class ContrastiveConfig(ObjectiveConfig, kind="contrastive"):
    """Contrastive objective, to match sources and targets within a batch by the angle between their vectors.

    van den Oord et al. 2018, 1807.03748 (InfoNCE); symmetric as in Radford et al. 2021, 2103.00020. With u_i and v_i
    the vectors of source i and target i, of length 1, and temperature t,

        loss = 1/2 mean_i [ -log softmax_j(u_i v_j / t)[i]  -  log softmax_j(u_j v_i / t)[i] ]

    Each document of the data is a pair, its two texts with a tab between. A model with a head of vectors reads each
    text separately. The other pairs of a batch (with micro_batch, of a microbatch) are the negatives, so batches of
    other sizes have other losses. The loss is not a likelihood, so it has no bits per byte; `perplexity` is the number
    of pairs among which a uniform guess has the same loss.
    """

    values: ClassVar[tuple[str, ...]] = ("temperature",)
    continues: ClassVar[bool] = False
    one_length: ClassVar[bool] = False

    temperature: float = Field(0.05, gt=0, le=100)

    def check(self, config: ModelConfig) -> None:
        if not config.head.vector:
            raise RequestError(
                "objective=contrastive compares vectors, and this model's head gives "
                f"{'tokens' if config.head.predicts_tokens else 'classes'}; use one of vectors (+pooled:mean)",
                code="conflict", field="head", value=config.head, expected="a head of vectors",
            )  # fmt: skip
        if config.encoder is not None:
            raise RequestError(
                "objective=contrastive gives a model one text at a time, and the encoder of this one reads another "
                "with it",
                code="conflict", field="objective", value=self.kind, expected="a model without an encoder",
            )  # fmt: skip

    def check_length(self, text: Tokens, context: int, config: ModelConfig | None = None) -> None:
        for name, side in (("training", text.train), ("held-out", text.validation)):
            found = Pairs(side.tokens, text.tokenizer, Apart())
            check_pairs(found, context, name)
            if len(found) < 2:
                raise RequestError(
                    f"the {name} text has one pair, which there is nothing to tell from; give two or more",
                    code="range", field="data", value=len(found), expected=">= 2",
                )  # fmt: skip

    def check_batch(self, text: Tokens, batch: int) -> None:
        pairs = len(Pairs(text.train.tokens, text.tokenizer, Apart()))
        if not 2 <= batch <= pairs:  # with fewer pairs one would be a negative of itself
            raise RequestError(
                f"batch_size={batch}: each pair is contrasted with the others of its batch, and the training text has "
                f"{pairs}; use from 2 to {pairs}",
                code="range", field="batch_size", value=batch, expected=f"2 to {pairs}",
            )  # fmt: skip

    def batches(
        self, text: Tokens, batch: int, context: int, seed: int, config: ModelConfig | None = None
    ) -> PairBatches:
        return PairBatches(Pairs(text.train.tokens, text.tokenizer, Apart()), batch, seed, whole=True)

    def evaluation(
        self, text: Tokens, context: int, max_tokens: int | None, batch: int, config: ModelConfig | None = None
    ) -> PairWindows:
        """Returns held-out batches that all have one size, at least one batch, so that each pair has an equal number of
        negatives."""
        windows = PairWindows(Pairs(text.validation.tokens, text.tokenizer, Apart()), max_tokens, batch)
        count = len(windows.starts)
        windows.starts = windows.starts[: max(count - count % batch, min(count, batch))]
        return windows

    def writes(self, config: ModelConfig) -> bool:
        """Returns False: a vector is not a text."""
        return False

    def loss(self, model: Model, batch: Batch, reduction: str = "mean") -> Tensor:
        given = batch.beside
        sources = model(batch.inputs, documents=given["documents"])
        targets = model(given["other"], documents=given["other_documents"])
        cosines = F.normalize(sources.float(), dim=-1) @ F.normalize(targets.float(), dim=-1).T / self.temperature
        right = torch.arange(len(cosines), device=cosines.device)
        ways = (F.cross_entropy(one, right, reduction=reduction) for one in (cosines, cosines.T))
        loss = 0.5 * sum(ways, torch.zeros((), device=cosines.device))
        return loss if reduction == "mean" else loss[:, None]


class Apart(SourceLayout):
    """Layout of a pair whose two texts are read separately, each with its end token; the target of a row is the index
    of its pair."""

    def batch(self, pairs: list[Pair], end: int, between: int) -> Batch:  # type: ignore[override]
        whole = super().batch(pairs, end, between)
        other = super().batch([(target, source) for source, target in pairs], end, between)
        given, others = whole.beside, other.beside
        return FedBatch.of(
            given["source"], torch.arange(len(pairs))[:, None], documents=given["source_documents"],
            other=others["source"], other_documents=others["source_documents"],
        )  # fmt: skip
