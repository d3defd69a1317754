from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.parts.loss import IGNORED
from glassformer.text import Batch, Tokens
from glassformer.training.objectives.base import ObjectiveConfig, check_causal
from glassformer.training.objectives.drawn import DrawnBatches, DrawnWindows, as_vectors, check_row, vectors_in


class RegressionConfig(ObjectiveConfig, kind="regression"):
    """In-context regression objective: the mean of (y' - y)^2 over the positions at which the model has to give a y.

    Garg et al. 2022, 2208.01066; von Oswald et al. 2022, 2212.07677. A model reads real vectors and gives one number
    for each (`+vectors:R`). The loss is in units of y^2, not a likelihood, and has no bits per byte.
    """

    continues: ClassVar[bool] = False
    repeats: ClassVar[bool] = False
    in_nats: ClassVar[bool] = False

    def check(self, config: ModelConfig) -> None:
        if config.embedding.reads != "vectors" or config.head.classes != 1 or config.head.pool is not None:
            raise RequestError(
                f"objective=regression gives a model vectors and asks one number for each, and this model reads "
                f"{config.embedding.reads}; use +vectors:R, R the size of a vector",
                code="conflict", field="embedding.vectors", value=config.embedding.vectors, expected="+vectors:R",
            )  # fmt: skip

    def check_length(self, text: Tokens, context: int, config: ModelConfig | None = None) -> None:
        task = vectors_in(text)
        check_row(task, context)
        if config is None:
            return
        vectors = config.embedding.vectors
        if vectors is not None and vectors.size != task.size:
            raise RequestError(
                f"the vectors of {task} have {task.size} numbers, and this model reads {vectors.size}; use "
                f"+vectors:{task.size}",
                code="conflict", field="embedding.vectors.size", value=vectors.size, expected=str(task.size),
            )  # fmt: skip
        if task.layout == "apart":  # because an answer follows its question
            check_causal(config)

    def batches(
        self, text: Tokens, batch: int, context: int, seed: int, config: ModelConfig | None = None
    ) -> DrawnBatches:
        return DrawnBatches(vectors_in(text), as_vectors, batch, seed)

    def evaluation(
        self, text: Tokens, context: int, max_tokens: int | None, batch: int, config: ModelConfig | None = None
    ) -> DrawnWindows:
        return DrawnWindows(vectors_in(text), as_vectors, max_tokens, batch)

    def writes(self, config: ModelConfig) -> bool:
        """Returns False: a number is not a text."""
        return False

    def loss(self, model: Model, batch: Batch, reduction: str = "mean") -> Tensor:
        asked = batch.targets != IGNORED
        errors = (model(batch.inputs)[..., 0].float() - batch.targets).square()
        errors = torch.where(asked, errors, 0.0)
        return errors if reduction == "none" else errors.sum() / asked.sum()
