"""How a model is trained, as a value."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from pydantic import Field, field_validator, model_validator

from glassformer.config import ModelConfig, read_tree, validated
from glassformer.dynamics.rates import default_learning_rate
from glassformer.errors import RequestError
from glassformer.parts.core.base import Value, to_plain
from glassformer.training.objectives import NextTokenConfig, ObjectiveConfig
from glassformer.training.optimizers import AdamWConfig, OptimizerConfig
from glassformer.training.schedule import CosineConfig, ScheduleConfig
from glassformer.units import count, quantity

WATCH = 25
"""Steps between looks where none are named: below 3 % of a step (docs/benchmarks/watch.md)."""
BUDGETS = ("tokens", "flops", "minutes", "steps")


class Recipe(Value):
    """Everything that decides a run besides the model and the text.

    Exactly one of `tokens`, `flops`, `minutes`, `steps` bounds it. A run bounded by minutes follows the clock, so it is
    not the same twice; the others are a pure function of model, text, recipe and machine.
    """

    tokens: int | None = Field(None, gt=0, lt=1 << 63)
    flops: float | None = Field(None, gt=0)
    """Training FLOPs: three times the forward products, causal attention counted in full."""
    minutes: float | None = Field(None, gt=0)
    steps: int | None = Field(None, gt=0, lt=1 << 53)
    """Optimizer steps."""
    batch_size: int = Field(16, gt=0, le=1 << 20)
    """Sequences per optimizer step."""
    micro_batch: int | None = Field(None, gt=0)
    """Sequences at once, an atom of the step; their gradients are added up as a tree (`parallel/sums.py`), so that the
    processes that share them do not show in the result. None: all."""
    context: int = Field(256, gt=0, le=1 << 28)
    seed: int = Field(0, ge=0, lt=1 << 63)
    learning_rate: float | None = Field(None, gt=0)
    """The peak. None takes a rule by the model's size and the optimizer (`peak_learning_rate`)."""
    objective: ObjectiveConfig = NextTokenConfig()
    """What the model is trained for and scored on: next_token, masked:P, seq2seq, ... (`training/objectives`)."""
    optimizer: OptimizerConfig = AdamWConfig()
    schedule: ScheduleConfig = CosineConfig()
    weight_decay: float = Field(0.1, ge=0)
    """AdamW's, on weights of matrices; never on norms, biases or embeddings. Other optimizers scale it as they do the
    learning rate, so that a step takes the same share of a weight."""
    clip: float | None = Field(1.0, gt=0)
    """Largest gradient norm."""
    qk_clip: float | None = Field(None, gt=0)
    """Largest attention logit: heads that passed it have W_q and W_k shrunk after the step (`dynamics/qk_clip.py`; 100
    in Kimi K2)."""
    evaluate_every: int | None = Field(None, gt=0)
    """Steps between evaluations; None: about eight in a run."""
    evaluation_tokens: int = Field(16384, gt=0)
    checkpoint_seconds: float = Field(60.0, gt=0)
    """Time between checkpoints; the last step is always saved."""
    async_save: bool = False
    """Whether a thread writes checkpoints while training goes on, which waits for a copy in memory alone."""
    watch: int | None = Field(None, gt=0)
    """Steps between looks inside, written to dynamics.jsonl; None: none but for spikes."""
    on_spike: Literal["go_on", "skip", "roll_back"] = "go_on"
    """What to do about a step whose loss or gradient norm is a spike: take it, leave it out, or return to the latest
    checkpoint and leave out the batches since."""
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: int | None = Field(None, gt=0)
    compile: bool | None = None

    @field_validator("tokens", "steps", "flops", mode="before")
    @classmethod
    def _counted(cls, value: Any, info: Any) -> Any:
        """Takes "200k" for 200_000."""
        if not isinstance(value, str):
            return value
        return quantity(value) if info.field_name == "flops" else count(value)

    @field_validator("dtype", "device", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        """Takes what torch calls them: torch.bfloat16, torch.device("cuda:0")."""
        return str(value).removeprefix("torch.") if isinstance(value, torch.dtype | torch.device) else value

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) != 1:
            told = f"give one of {', '.join(BUDGETS)}; {' and '.join(given) or 'none'} given"
            raise RequestError(told, code="conflict", field="budget", value=given)
        micro = self.micro_batch
        if micro is not None and self.batch_size % micro:
            told = f"micro_batch={micro} does not divide batch_size={self.batch_size}"
            raise RequestError(told, code="conflict", field="micro_batch", value=micro)
        return self

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.context

    @property
    def atoms(self) -> int:
        """Pieces of a step's batch."""
        return self.batch_size // (self.micro_batch or self.batch_size)

    def peak_learning_rate(self, config: ModelConfig) -> float:
        """`learning_rate`, or AdamW's default for a model of this size times the optimizer's `rate`."""
        return self.learning_rate or default_learning_rate(config) * self.optimizer.rate

    def num_steps(self, config: ModelConfig, tokens_per_step: float | None = None) -> int | None:
        """Optimizer steps of the run, or None where the clock decides. `tokens_per_step`: what a step reads in the
        mean, where that depends on the text."""
        if self.steps is not None:
            return self.steps
        tokens = self.tokens
        if self.flops is not None:
            tokens = round(self.flops / (3 * config.flops(self.context)))
        return None if tokens is None else max(1, math.ceil(tokens / (tokens_per_step or self.tokens_per_step)))

    def save(self, path: Path) -> None:
        path.write_text(yaml.safe_dump(to_plain(self), sort_keys=False), encoding="utf-8")

    @classmethod
    def from_file(cls, path: Path) -> Recipe:
        return validated(cls, read_tree(path), "recipe", str(path))

    @classmethod
    def of(cls, **fields: object) -> Recipe:
        """Raises RequestError in one sentence."""
        return validated(cls, fields, "recipe")
