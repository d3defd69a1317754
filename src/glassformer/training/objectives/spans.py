from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.generation.spans import answer_span, given_segments
from glassformer.model import Model
from glassformer.text import Batch, FedBatch, Tokens
from glassformer.text.pairs import added_around, question_row
from glassformer.text.shards import TokenShards
from glassformer.training.objectives.base import Answered, ObjectiveConfig, check_reading_all
from glassformer.training.objectives.classes import check_one_text, padded, spread
from glassformer.training.objectives.pairs import PairBatches, PairWindows, RecordStream, refuse_cut


class SpansConfig(ObjectiveConfig, kind="spans"):
    """Extractive question answering objective, to find the span that answers a question: the mean of -log p(start) and
    -log p(end) over the questions.

    Devlin et al. 2018, 1810.04805, section 4.2. JSON lines have `context`, `question`, `answer` and `start`, the
    character of the context at which the answer starts. A row is question, tab, context; p is over its tokens.
    """

    continues: ClassVar[bool] = False
    one_length: ClassVar[bool] = False
    fields: ClassVar[tuple[str, ...]] = ("context", "question", "answer", "start")

    def check(self, config: ModelConfig) -> None:
        if config.head.gives != "spans" or config.embedding.reads != "tokens":
            raise RequestError(
                f"objective=spans finds starts and ends of answers, and this model's head gives {config.head.gives}; "
                "use +spans",
                code="conflict", field="head", value=config.head.gives, expected="+spans",
            )  # fmt: skip
        check_one_text(self, config)
        check_reading_all(self, config)

    def check_length(self, text: Tokens, context: int, config: ModelConfig | None = None) -> None:
        refuse_cut(text)
        for name, side in (("training", text.train), ("held-out", text.validation)):
            questions = Questions(side, text)
            for number in range(len(questions)):
                questions.span(number)
            if (longest := int(questions.sizes.max())) > context:
                raise RequestError(
                    f"a question with its context has {longest:,} tokens in the {name} text, and the context is "
                    f"{context:,}; use --context {longest}",
                    code="range", field="context", value=context, expected=f">= {longest}",
                )  # fmt: skip

    def batches(
        self, text: Tokens, batch: int, context: int, seed: int, config: ModelConfig | None = None
    ) -> PairBatches:
        return PairBatches(Questions(text.train, text), batch, seed)

    def evaluation(
        self, text: Tokens, context: int, max_tokens: int | None, batch: int, config: ModelConfig | None = None
    ) -> PairWindows:
        return PairWindows(Questions(text.validation, text), max_tokens, batch)

    def writes(self, config: ModelConfig) -> bool:
        """Returns False: a span is part of a given text."""
        return False

    def loss(self, model: Model, batch: Batch, reduction: str = "mean") -> Tensor:
        given = batch.beside
        segments = given_segments(model, given["segments"])
        logits = model(batch.inputs, documents=given["documents"], segments=segments).float()
        logits = logits.masked_fill((given["documents"] == 0)[..., None], -torch.inf)
        return F.cross_entropy(logits, batch.targets, reduction=reduction)  # classes (tokens) are the second axis

    def answered(self, model: Model, text: Tokens, count: int, context: int) -> list[Answered]:
        questions = Questions(text.validation, text)
        found = []
        for number in spread(len(questions), count):
            row, segments = questions.row(number)
            first, last, _ = answer_span(model, row, segments, questions.behind)
            sides = (questions.field(number, 1), questions.field(number, 2), row[first : last + 1])
            found.append(Answered(*(text.tokenizer.decode(ids.tolist()) for ids in sides)))
        return found

    overlap: ClassVar[bool] = True


class Questions(RecordStream):
    """Dataset of questions, each with a text that contains its answer. Raises RequestError for a tokenizer that loses
    text."""

    fields = ("context", "question", "answer", "start")
    counted = ()

    def __init__(self, side: TokenShards, text: Tokens):
        super().__init__(side.tokens, text.tokenizer)
        self.tokenizer, self.token_bytes = text.tokenizer, text.token_bytes
        self.behind = len(added_around(text.tokenizer)[1])
        if not text.token_bytes.any():
            raise RequestError(
                f"objective=spans finds the tokens of an answer by the bytes before it, and the "
                f"{text.tokenizer.kind} tokenizer loses text; use byte or bpe",
                code="conflict", field="tokenizer", value=text.tokenizer.kind, expected="byte or bpe",
            )  # fmt: skip

    @property
    def sizes(self) -> np.ndarray:
        """Number of tokens of each row, (n, 1)."""
        added = len(added_around(self.tokenizer)[0]) + 1 + self.behind
        return (np.diff(self.borders)[:, :2] - 1).sum(1, keepdims=True) + added

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token ids (s,) of a row and their segments (s,), which tell question from context."""
        return question_row(self.tokenizer, self.field(number, 1), self.field(number, 0))

    def span(self, number: int) -> tuple[int, int]:
        """Returns the first and last token of the answer within the context. Raises RequestError if the context has
        another text there."""
        context = self.field(number, 0)
        text, answer, start = (self.tokenizer.decode(self.field(number, i).tolist()) for i in (0, 2, 3))
        place = int(start) if start.strip().isdecimal() else -1
        if place < 0 or text[place : place + len(answer)] != answer:
            raise RequestError(
                f"the answer of document {number} is not in its context at character {start.strip()}; start is the "
                "character of the context at which the answer starts, from 0 on",
                code="conflict", field="data.start", value=start.strip(), expected="the place of the answer",
            )  # fmt: skip
        before = len(text[:place].encode())
        begins = np.concatenate([[0], np.cumsum(self.token_bytes[context])[:-1]])
        first = int(np.searchsorted(begins, before, side="right")) - 1
        last = int(np.searchsorted(begins, before + len(answer.encode()), side="left")) - 1
        return first, last

    def batch(self, numbers: Sequence[int] | np.ndarray) -> Batch:
        rows, segments = zip(*(self.row(int(i)) for i in numbers), strict=True)
        targets = torch.tensor([self.span(int(i)) for i in numbers])
        targets = targets + torch.tensor([int(one.argmax()) for one in segments])[:, None]
        made = padded(rows, self.end, targets)
        kinds = pad_sequence([torch.from_numpy(one) for one in segments], True, 0)
        return FedBatch.of(made.inputs, made.targets, **made.given, segments=kinds)
