"""Base of the configs of objectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from torch import Tensor

from glassformer.config import ModelConfig, told
from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.parts.core.base import PartConfig
from glassformer.text import (
    Batch,
    Batches,
    EvaluationWindows,
    FileTokenizer,
    Tokenizer,
    Tokens,
    as_file,
    evaluation_windows,
    refuse_long,
)
from glassformer.text.files import JOIN, JSONL_SUFFIXES
from glassformer.text.vocabulary import END_OF_TEXT

Decode = Callable[[list[int]], str]
PROSE, PLACES = 0.8, 64
"""Minimum share of letters and spaces in a text that counts as prose; number of slices in which `prose` looks for
one."""

NEXT, OF_HEADS = "next_token", ("classes", "spans")
"""Kind of the usual objective; kinds of objectives for heads with equal names."""

Text = TypeVar("Text", bound=Tokens)


class Steps(Protocol):
    """Interface of a run's training batches, indexed by step; each is a pure function of (seed, step, rank)."""

    @property
    def tokens_per_step(self) -> float:
        """Mean number of training tokens of a step."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of steps after which all training data was read at least once; None for rows that are drawn without
        end."""

    def __getitem__(self, step: int) -> Batch: ...

    def read(self, steps: int) -> dict[str, int]:
        """Returns the numbers of tokens read in the first `steps`: `tokens`, and for pairs also those of sources and
        targets."""


class Opening(NamedTuple):
    """Start of a text that a trained model continues as a sample: its ids (s,), and the ids of the encoder's source
    (t,)."""

    tokens: np.ndarray
    source: np.ndarray | None = None


class Asked(NamedTuple):
    """Held-out question for a model that generates answers: the ids with which the answer starts, those of the source,
    and those of the correct answer."""

    opening: Opening
    source: np.ndarray
    target: np.ndarray


class Answered(NamedTuple):
    """Held-out question with its correct answer and the model's answer, as texts."""

    source: str
    right: str
    answer: str


class ObjectiveConfig(PartConfig, axis="objective"):
    """Training objective of a model: makes batches from a text, and computes the loss of a batch.

    `KIND:VALUE` or `KIND:VALUE:VALUE` names one in a recipe and after --objective, where the values are those of the
    fields `values`.
    """

    values: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that the values after KIND set, in this order."""
    continues: ClassVar[bool] = True
    """True if a row of a batch is a stretch of text to continue, so that losses at other lengths and generated texts
    can be measured, and FLOPs follow from `tokens`."""
    repeats: ClassVar[bool] = True
    """True if batches pass over the training data again and again; False if rows are drawn without end."""
    in_nats: ClassVar[bool] = True
    """True if the loss is in nats, so that a rise by one is a divergence; otherwise only a loss that is not finite
    counts as divergence."""
    one_length: ClassVar[bool] = True
    """True if all batches have one shape; otherwise each shape would be compiled separately."""

    @classmethod
    def _choose(cls, value: Any) -> PartConfig:
        if isinstance(value, str) and ":" in value:
            kind, *given = value.split(":")
            known = cls.choices().get(kind)
            if known is not None and issubclass(known, ObjectiveConfig):
                if len(given) > len(known.values):
                    takes = ":".join(known.values)
                    raise ValueError(f"{kind} takes no value" if not takes else f"write {kind}:{takes.upper()}")
                value = {"kind": kind, **dict(zip(known.values, given, strict=False))}
        return super()._choose(value)

    fields: ClassVar[tuple[str, ...]] = ()
    """Fields of JSON lines that make a record; empty for the one field `text`."""
    overlap: ClassVar[bool] = False
    """True if an answer may be right in part, so that the overlap of its words with the right one is measured."""

    def data(self, data: Any) -> Any:
        """Returns the name of the training data, completed by ",column=FIELDS" with the fields that this objective
        reads, if it names a JSON lines file without columns; otherwise `data` unchanged."""
        if not self.fields or not isinstance(data, str | Path) or Path(data).suffix.lower() not in JSONL_SUFFIXES:
            return data
        return f"{data},column={JOIN.join(self.fields)}"

    def fitted(self, config: ModelConfig, text: Tokens) -> ModelConfig:
        """Returns the model's config with the values that the training data determine, such as the names of classes."""
        return config

    def labels(self, config: ModelConfig) -> tuple[str, ...]:
        """Returns the answers among which a model of this config chooses; empty if there are too many to list."""
        return ()

    def answered(self, model: Model, text: Tokens, count: int, context: int) -> list[Answered]:
        """Returns at most `count` held-out questions with the model's answers, for a model that answers without
        generating, such as a classifier; empty for a model that generates its answers (`asked`)."""
        return []

    def check(self, config: ModelConfig) -> None:
        """Raises RequestError for a model that cannot learn this objective, or to which it would teach nothing."""
        if not config.head.predicts_tokens:
            usual = usual_objective(config)
            remedy = "one of tokens (head.vector=false, no pool)" if usual == NEXT else f"--objective {usual}"
            raise RequestError(
                f"objective={self.kind} predicts tokens, and this model's head gives {config.head.gives}; use "
                f"{remedy}",
                code="conflict", field="head", value=config.head, expected="a head of tokens",
            )  # fmt: skip

    def among(self, configs: Mapping[str, ModelConfig]) -> Self:
        """Returns this objective, adapted to a comparison of the models {name: config}. Raises RequestError if a model
        cannot learn it, or if the models would be trained on different texts."""
        for config in configs.values():
            self.check(config)
        return self

    def with_tokens(self, text: Text) -> Text:
        """Returns the text with a tokenizer that has the special tokens this objective needs; the ids of the text do
        not change. Raises RequestError if a token is missing that cannot be added."""
        return text

    def check_length(self, text: Tokens, context: int, config: ModelConfig | None = None) -> None:
        """Raises RequestError if the text is too short for this context, or its pairs are too long."""
        for name, side in (("training", text.train), ("held-out", text.validation)):
            refuse_long(context, len(side), f"{name} text")

    def check_batch(self, text: Tokens, batch: int) -> None:
        """Raises RequestError if a batch of `batch` texts is too small to learn from."""

    def batches(self, text: Tokens, batch: int, context: int, seed: int, config: ModelConfig | None = None) -> Steps:
        """Returns the training batches, one for each step, for a model of this config; if None, for a usual model of
        the objective."""
        return Batches(text.train, batch, context, seed)

    def evaluation(
        self, text: Tokens, context: int, max_tokens: int | None, batch: int, config: ModelConfig | None = None
    ) -> EvaluationWindows:
        """Returns the held-out windows on which the loss is measured, equal at every call. `EvaluationBatch.bytes`
        counts the bytes of each target, 0 if bits per byte of text mean nothing."""
        return evaluation_windows(text.validation, context, max_tokens, token_bytes=text.token_bytes, batch=batch)

    def writes(self, config: ModelConfig) -> bool:
        """Returns True if a model of this config learns to continue a text."""
        return config.writes

    def opening(self, text: Tokens, length: int, config: ModelConfig) -> Opening:
        """Returns about `length` held-out tokens that a generating model continues: whole words, of prose if the start
        of the text has any."""
        tokens, decode = text.validation.tokens, text.tokenizer.decode
        if not self.continues or text.train.task is not None:
            return Opening(tokens[:length])
        return Opening(whole_words(prose(tokens, length, decode), decode))

    def asked(self, text: Tokens, count: int, config: ModelConfig) -> list[Asked]:
        """Returns at most `count` held-out questions that have one correct answer, for a model that generates its
        answers; empty if a model of this config answers no questions."""
        return []

    def loss(self, model: Model, batch: Batch, reduction: str = "mean") -> Tensor:
        """Returns the mean loss in nats over the targets of the batch, a scalar. `batch.inputs` and `batch.targets` are
        (b, s) ids; targets of -100 do not count. `reduction="none"`, of held-out text, gives (b, s) losses."""
        return model.loss(batch.inputs, batch.targets, reduction=reduction, **batch.beside)


def usual_objective(config: ModelConfig) -> str:
    """Returns the kind of objective with which a model is trained by default, which depends on its head."""
    return config.head.gives if config.head.gives in OF_HEADS else NEXT


def check_reading_all(objective: ObjectiveConfig, config: ModelConfig) -> None:
    """Raises RequestError for a causal model (each token attends only to earlier tokens), because the objective needs
    attention in both directions."""
    if all(block.mixer.causal(config.ctx) for block in config.layers()):
        raise RequestError(
            f"objective={objective.kind} needs a bidirectional model, and this one is causal: a token would be judged "
            "without those behind it; use bert, or +bidirectional",
            code="causal", field="objective", value=objective.kind, expected="a bidirectional model",
        )  # fmt: skip


def read_by(text: Text, tokenizer: Tokenizer) -> Text:
    """Returns the text with another tokenizer, which has added special tokens but gives the text equal ids."""
    lost = np.zeros(tokenizer.vocab_size - len(text.token_bytes), np.int64)
    return replace(text, tokenizer=tokenizer, token_bytes=np.concatenate([text.token_bytes, lost]))


def with_end(tokenizer: Tokenizer) -> FileTokenizer:
    """Returns the tokenizer with an end-of-text token, which is added if missing."""
    known = as_file(tokenizer)
    return known if known.eos_id is not None else known.with_special("eos_token", END_OF_TEXT)


def check_reading_on(config: ModelConfig) -> None:
    """Raises RequestError for a model that cannot generate from left to right: a token attends to future tokens outside
    a given prefix."""
    check_causal(config, prefix=config.encoder is None)  # with a source, no prefix is given


def check_causal(config: ModelConfig, prefix: bool = False) -> None:
    """Raises RequestError for a model in which a token attends to future tokens; with `prefix`, attention within a
    prefix is allowed."""
    for layer, block in enumerate(config.layers()):
        if not (block.mixer.causal(config.ctx) or (prefix and block.mixer.takes_prefix(config.ctx))):
            raise RequestError(
                f"layer {layer} is not causal ({told(block.mixer)}): it would see the token it is to predict; use "
                "a causal mixer, or objective masked",
                code="causal", field=f"layers.{layer}.mixer", value=block.mixer,
            )  # fmt: skip
        if block.ffn is not None and not block.ffn.causal:
            raise RequestError(
                f"layer {layer} is not causal (ffn {block.ffn.kind}): which tokens its experts choose depends on "
                "the tokens that are to be predicted; use experts that tokens choose (ffn kind experts)",
                code="causal", field=f"layers.{layer}.ffn", value=block.ffn.kind,
            )  # fmt: skip


def prose(ids: np.ndarray, length: int, decode: Decode) -> np.ndarray:
    """Returns `length` consecutive ids of a text that decode to prose: the first slice that is mostly letters, from the
    start of a word. If the first PLACES slices of this length have none, returns the first `length` ids."""
    for start in range(0, min(len(ids) - 2 * length, PLACES * length) + 1, max(1, length)):
        shown = decode(ids[start : start + length].tolist())
        if sum(letter.isalpha() or letter == " " for letter in shown) < PROSE * max(1, len(shown)):
            continue
        for first in range(start, start + length):
            before = decode(ids[max(0, first - 1) : first].tolist())
            own = decode(ids[max(0, first - 1) : first + 1].tolist())[len(before) :]
            starts = own[:1].isspace() or not first or before[-1:].isspace()
            if starts and own.strip()[:1].isalpha():
                return ids[first : first + length]
    return ids[:length]


def whole_words(ids: np.ndarray, decode: Decode) -> np.ndarray:
    """Returns `ids` cut after the last whole word, but at least half of the ids; if that is impossible, all of
    `ids`."""
    for n in range(len(ids) - 1, len(ids) // 2, -1):
        text = decode(ids[:n].tolist())
        if decode(ids[: n + 1].tolist())[len(text) :][:1].isspace() and not text[-1:].isspace():
            return ids[:n]
    return ids
