from __future__ import annotations

from functools import partial
from typing import ClassVar

import numpy as np

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.text import Tokens
from glassformer.training.objectives.base import ObjectiveConfig, check_causal
from glassformer.training.objectives.drawn import DrawnBatches, DrawnWindows, as_tokens, check_row, symbols_in


class TaskConfig(ObjectiveConfig, kind="task"):
    """Objective of a symbol task: the mean of -log p(answer) over the positions that ask for one (`text/tasks.py`).

    Each context holds one row. Rows are drawn for each step, so that no row is read twice; held-out rows are separate.
    """

    continues: ClassVar[bool] = False
    repeats: ClassVar[bool] = False

    def check(self, config: ModelConfig) -> None:
        super().check(config)
        check_causal(config)
        if config.encoder is not None:
            raise RequestError(
                "objective=task has no source, and the encoder of this model reads one; use a model without an encoder",
                code="conflict", field="objective", value=self.kind, expected="a model without an encoder",
            )  # fmt: skip

    def check_length(self, text: Tokens, context: int, config: ModelConfig | None = None) -> None:
        check_row(symbols_in(text), context)
        self.ids(text)

    def ids(self, text: Tokens) -> np.ndarray:
        """Returns the token of each symbol of the task. Raises RequestError if a symbol takes several tokens."""
        task, tokenizer = symbols_in(text), text.tokenizer
        found = [tokenizer.encode(symbol) for symbol in task.alphabet]
        if any(len(ids) != 1 for ids in found):
            raise RequestError(
                f"the {tokenizer.kind} tokenizer has no single token for each symbol of {task}; use char or byte",
                code="conflict", field="tokenizer", value=tokenizer.kind, expected="char",
            )  # fmt: skip
        return np.array([int(ids[0]) for ids in found], np.int64)

    def batches(
        self, text: Tokens, batch: int, context: int, seed: int, config: ModelConfig | None = None
    ) -> DrawnBatches:
        make = partial(as_tokens, ids=self.ids(text))
        return DrawnBatches(symbols_in(text), make, batch, seed)

    def evaluation(
        self, text: Tokens, context: int, max_tokens: int | None, batch: int, config: ModelConfig | None = None
    ) -> DrawnWindows:
        make = partial(as_tokens, ids=self.ids(text))
        return DrawnWindows(symbols_in(text), make, max_tokens, batch)

    def writes(self, config: ModelConfig) -> bool:
        """Returns False: an answer is not a text to continue."""
        return False
