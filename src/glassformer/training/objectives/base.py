"""What every objective's config shares."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor

from glassformer.config import ModelConfig, told
from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.parts.base import PartConfig
from glassformer.text import Batch, Batches, EvaluationWindows, Tokens, evaluation_windows, refuse_long

Text = TypeVar("Text", bound=Tokens)


class Steps(Protocol):
    """Batches by step: a pure function of (seed, step, rank)."""

    def __getitem__(self, step: int) -> Batch: ...


class ObjectiveConfig(PartConfig, axis="objective"):
    """What a model is trained for: the batches that are made of a text, and their loss.

    `KIND:VALUE` names one in a recipe and after --objective, where VALUE is the field `value`.
    """

    value: ClassVar[str] = ""
    """The field that the VALUE of KIND:VALUE sets; empty: there is none."""
    compares: ClassVar[bool] = True
    """Whether `compare` can measure what was trained for it: at other lengths, and writing on from a text."""

    @classmethod
    def _choose(cls, value: Any) -> PartConfig:
        if isinstance(value, str) and ":" in value:
            kind, _, text = value.partition(":")
            known = cls.choices().get(kind)
            if known is not None and issubclass(known, ObjectiveConfig):
                if not known.value:
                    raise ValueError(f"{kind} takes no value")
                value = {"kind": kind, known.value: text}
        return super()._choose(value)

    def check(self, config: ModelConfig) -> None:
        """Raises RequestError for a model that cannot learn this, or would learn nothing by it."""
        if not config.head.predicts_tokens:
            raise RequestError(
                f"objective={self.kind} predicts tokens, and this model's head gives "
                f"{'vectors' if config.head.vector else 'classes'}; use one of tokens (head.vector=false, no pool)",
                code="conflict", field="head", value=config.head, expected="a head of tokens",
            )  # fmt: skip

    def with_tokens(self, text: Text) -> Text:
        """The text with a tokenizer that has the special tokens this objective needs. The ids of the text itself stay
        as they are. Raises RequestError where a token is missing that cannot be added."""
        return text

    def check_length(self, text: Tokens, context: int) -> None:
        """Raises RequestError where the text is too short for this context."""
        for name, side in (("training", text.train), ("held-out", text.validation)):
            refuse_long(context, len(side), f"{name} text")

    def batches(self, text: Tokens, batch: int, context: int, seed: int) -> Steps:
        """What each step is trained on."""
        return Batches(text.train, batch, context, seed)

    def evaluation(self, text: Tokens, context: int, max_tokens: int | None, batch: int) -> EvaluationWindows:
        """What the model is scored on, the same at every call: the `EvaluationBatch.bytes` of a target are those whose
        bits it counts, 0 where bits per byte of text mean nothing."""
        return evaluation_windows(text.validation, context, max_tokens, token_bytes=text.token_bytes, batch=batch)

    def loss(self, model: Model, batch: Batch, reduction: str = "mean") -> Tensor:
        """Mean nats over the targets of the batch; `reduction="none"` gives (b, s) losses."""
        return model.loss(batch.inputs, batch.targets, reduction=reduction)


def check_causal(config: ModelConfig) -> None:
    """Raises RequestError where a token would see what follows it."""
    for layer, block in enumerate(config.layers()):
        if not block.mixer.causal(config.ctx):
            raise RequestError(
                f"layer {layer} is not causal ({told(block.mixer)}): it would see the token it is to predict; use "
                "a causal mixer, or objective masked",
                code="not_causal", field=f"layers.{layer}.mixer", value=block.mixer,
            )  # fmt: skip
        if block.ffn is not None and not block.ffn.causal:
            raise RequestError(
                f"layer {layer} is not causal (ffn {block.ffn.kind}): which tokens its experts choose depends on "
                "the tokens that are to be predicted; use experts that tokens choose (ffn kind experts)",
                code="not_causal", field=f"layers.{layer}.ffn", value=block.ffn.kind,
            )  # fmt: skip
