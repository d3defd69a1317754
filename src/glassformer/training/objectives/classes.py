from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from glassformer.config import ModelConfig
from glassformer.errors import RequestError, shown
from glassformer.introspection import at_rest
from glassformer.model import Model
from glassformer.text import Batch, FedBatch, Tokenizer, Tokens
from glassformer.text.pairs import added_around
from glassformer.training.objectives.base import Answered, ObjectiveConfig
from glassformer.training.objectives.pairs import PairBatches, PairWindows, RecordStream, refuse_cut

ROWS = 32
"""Held-out texts of a batch."""
NAMED = 8
"""Labels named in an error, at most."""


class ClassesConfig(ObjectiveConfig, kind="classes"):
    """Classification objective, to predict the class of a text: the mean of -log p(label | text) over the texts.

    Devlin et al. 2018, 1810.04805, section 4.1. JSON lines have a `text` and a `label`; a text longer than the context
    is cut. A run keeps the names of the labels in its config (`head.labels`), in the order of the alphabet.
    """

    continues: ClassVar[bool] = False
    one_length: ClassVar[bool] = False
    fields: ClassVar[tuple[str, ...]] = ("text", "label")

    def check(self, config: ModelConfig) -> None:
        if config.head.gives != "classes" or config.embedding.reads != "tokens":
            raise RequestError(
                f"objective=classes names the class of a text, and this model's head gives {config.head.gives}; use "
                "+classes:N, N the number of labels",
                code="conflict", field="head", value=config.head.gives, expected="+classes:N",
            )  # fmt: skip
        check_one_text(self, config)
        if config.head.pool == "cls" and all(block.mixer.causal(config.ctx) for block in config.layers()):
            raise RequestError(
                "head.pool=cls reads the class from the first token, which in a causal model attends to no other; use "
                "+head.pool=last or +head.pool=mean behind +classes",
                code="causal", field="head.pool", value="cls", expected="last or mean",
            )  # fmt: skip

    def check_length(self, text: Tokens, context: int, config: ModelConfig | None = None) -> None:
        refuse_cut(text)
        labels = labels_of(text)
        room = LabelledTexts(text.train.tokens, text.tokenizer, context, labels).room
        if room < 1:
            raise RequestError(
                f"context={context} holds what the tokenizer adds to a text and no token of the text; use "
                f"{context - room + 1} or more",
                code="range", field="context", value=context, expected=f">= {context - room + 1}",
            )  # fmt: skip
        if config is not None and config.head.classes != len(labels):
            some = ", ".join(map(shown, labels[:NAMED])) + (", ..." if len(labels) > NAMED else "")
            raise RequestError(
                f"head.classes={config.head.classes}, and the data have {len(labels):,} labels ({some}); use "
                f"+classes:{len(labels)}",
                code="conflict", field="head.classes", value=config.head.classes, expected=str(len(labels)),
            )  # fmt: skip

    def fitted(self, config: ModelConfig, text: Tokens) -> ModelConfig:
        return config.replace(head=config.head.replace(labels=labels_of(text)))

    def batches(
        self, text: Tokens, batch: int, context: int, seed: int, config: ModelConfig | None = None
    ) -> PairBatches:
        return PairBatches(LabelledTexts(text.train.tokens, text.tokenizer, context, labels_of(text)), batch, seed)

    def evaluation(
        self, text: Tokens, context: int, max_tokens: int | None, batch: int, config: ModelConfig | None = None
    ) -> PairWindows:
        held_out = LabelledTexts(text.validation.tokens, text.tokenizer, context, labels_of(text))
        return PairWindows(held_out, max_tokens, batch)

    def writes(self, config: ModelConfig) -> bool:
        """Returns False: a class is not a text."""
        return False

    @torch.no_grad()
    def answered(self, model: Model, text: Tokens, count: int, context: int) -> list[Answered]:
        labels = labels_of(text)
        texts = LabelledTexts(text.validation.tokens, text.tokenizer, context, labels)
        numbers, found = spread(len(texts), count), []
        with at_rest(model):
            for first in range(0, len(numbers), ROWS):
                some = numbers[first : first + ROWS]
                batch = texts.batch(some).to(model.device)
                classes = model(batch.inputs, **batch.beside).argmax(-1).tolist()
                for number, right, given in zip(some, batch.targets.tolist(), classes, strict=True):
                    source = text.tokenizer.decode(texts.field(number, 0).tolist())
                    found.append(Answered(source, labels[right], labels[given]))
        return found

    def labels(self, config: ModelConfig) -> tuple[str, ...]:
        return config.head.labels or ()


class LabelledTexts(RecordStream):
    """Dataset of labelled texts. A row has special tokens around the text, which is cut to the context, and the index
    of its label."""

    fields = ("text", "label")
    counted = ()

    def __init__(self, tokens: np.ndarray, tokenizer: Tokenizer, context: int, labels: Sequence[str] = ()):
        super().__init__(tokens, tokenizer)
        self.front, self.behind = added_around(tokenizer)
        self.room = context - len(self.front) - len(self.behind)
        self.decode = tokenizer.decode
        self.labels = tuple(labels)

    @property
    def sizes(self) -> np.ndarray:
        """Number of tokens of each row, (n, 1)."""
        text = np.diff(self.borders)[:, :1] - 1
        return np.minimum(text, self.room) + len(self.front) + len(self.behind)

    @cached_property
    def names(self) -> list[str]:
        """Label names of the texts, (n,)."""
        known: dict[bytes, str] = {}
        found = []
        for number in range(len(self)):
            ids = self.field(number, 1)
            key = ids.tobytes()
            if key not in known:
                known[key] = self.decode(ids.tolist()).strip()
            found.append(known[key])
        return found

    def batch(self, numbers: Sequence[int] | np.ndarray) -> Batch:
        rows = [np.concatenate([self.front, self.field(i, 0)[: self.room], self.behind]) for i in numbers]
        return padded(rows, self.end, torch.tensor([self.labels.index(self.names[i]) for i in numbers]))


def padded(rows: Sequence[np.ndarray], end: int, targets: torch.Tensor) -> FedBatch:
    """Returns texts of different lengths as one batch, padded with the token `end`; the padding has the document id 0,
    which the model ignores."""
    inputs = pad_sequence([torch.from_numpy(row.astype(np.int64)) for row in rows], True, end)
    documents = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], True, 0)
    return FedBatch.of(inputs, targets, documents=documents)


def labels_of(text: Tokens) -> tuple[str, ...]:
    """Returns every label of the data, in alphabetical order."""
    sides = (LabelledTexts(side.tokens, text.tokenizer, 1).names for side in (text.train, text.validation))
    return tuple(sorted({name for names in sides for name in names}))


def spread(size: int, count: int) -> list[int]:
    """Returns at most `count` integers below `size`, evenly spaced."""
    return np.unique(np.linspace(0, size - 1, min(count, size)).round().astype(int)).tolist()


def check_one_text(objective: ObjectiveConfig, config: ModelConfig) -> None:
    """Raises RequestError for an encoder-decoder model, because the objective reads a single text."""
    if config.encoder is not None:
        raise RequestError(
            f"objective={objective.kind} gives a model one text, and the encoder of this one reads another; use a "
            "model without an encoder, such as bert",
            code="conflict", field="objective", value=objective.kind, expected="a model without an encoder",
        )  # fmt: skip
