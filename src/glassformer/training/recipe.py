"""Training options as a value."""

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
"""Default steps between two watches: below 3 % of a step's time (docs/benchmarks/watch.md)."""
BUDGETS = ("tokens", "flops", "minutes", "steps", "epochs")


class Recipe(Value):
    """Training of a model as a value: everything that decides a run except the model and the data.

    Exactly one of `tokens`, `flops`, `minutes`, `steps`, `epochs` is the budget. A run with a budget of minutes depends
    on the clock and differs from run to run; the others are a function of model, data, recipe and machine.

    Examples
    --------
    >>> recipe = gf.Recipe(tokens="200k", batch_size=8, context=128, optimizer={"kind": "muon"})
    >>> recipe.tokens_per_step, recipe.optimizer.kind
    (1024, 'muon')
    """

    tokens: int | None = Field(None, gt=0, lt=1 << 63)
    """Budget in tokens; "200k" is read as 200,000."""
    flops: float | None = Field(None, gt=0)
    """Budget in training FLOPs: three times those of the forward matmuls, with every pair of causal attention."""
    minutes: float | None = Field(None, gt=0)
    """Budget in minutes of training; starting and evaluating are not counted."""
    steps: int | None = Field(None, gt=0, lt=1 << 53)
    """Budget in optimizer steps."""
    epochs: float | None = Field(None, gt=0, le=1 << 20)
    """Budget in passes over the training text, or over the pairs."""
    batch_size: int = Field(16, gt=0, le=1 << 20)
    """Sequences of an optimizer step."""
    micro_batch: int | None = Field(None, gt=0)
    """Sequences of a microbatch; gradients of microbatches are added as a tree (`parallel/sums.py`), so that the result
    does not depend on the number of processes. None for the whole batch."""
    context: int = Field(256, gt=0, le=1 << 28)
    """Tokens of a sequence."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seed of the initial weights and of the order of the data."""
    learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate; None for the rule by model size and optimizer (`peak_learning_rate`)."""
    objective: ObjectiveConfig = NextTokenConfig()
    """Loss that is minimised and evaluated: next_token, masked:P, seq2seq, ... (`training/objectives`)."""
    optimizer: OptimizerConfig = AdamWConfig()
    """adamw, muon, lion, adafactor, sgd (`training/optimizers`)."""
    schedule: ScheduleConfig = CosineConfig()
    """Learning rate over the run: cosine, linear, constant, wsd (`training/schedule.py`)."""
    weight_decay: float = Field(0.1, ge=0)
    """Weight decay of AdamW, applied to matrices, not to norms, biases or embeddings. Other optimizers scale it like
    the learning rate, so that a step removes the same share of a weight."""
    clip: float | None = Field(1.0, gt=0)
    """Largest gradient norm; None for no clipping."""
    qk_clip: float | None = Field(None, gt=0)
    """Largest attention logit: W_q and W_k of heads that exceed it are scaled down after the step
    (`dynamics/qk_clip.py`; 100 in Kimi K2). None for no clipping."""
    evaluate_every: int | None = Field(None, gt=0)
    """Steps between evaluations; None for two to eight in a run."""
    evaluation_tokens: int = Field(16384, gt=0)
    """Tokens of held-out text of an evaluation."""
    checkpoint_seconds: float = Field(60.0, gt=0)
    """Seconds between checkpoints; the last step is always saved."""
    async_save: bool = False
    """True if a thread writes checkpoints: training waits only for a copy in memory."""
    watch: int | None = Field(None, gt=0)
    """Steps between statistics by layer and head, written to dynamics.jsonl; None for none, except at spikes."""
    on_spike: Literal["go_on", "skip", "roll_back"] = "go_on"
    """Answer to a spike of loss or gradient norm: take the step, skip it, or return to the latest checkpoint and skip
    the batches since."""
    device: str = "auto"
    """auto, cpu, cuda, mps."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of autocast; auto for bfloat16 where its matmuls are faster."""
    threads: int | None = Field(None, gt=0)
    """Threads of the CPU; None for one for each core."""
    compile: bool | None = None
    """Compile the elementwise regions; None for yes where a compiler is installed and the run is long enough."""

    @field_validator("tokens", "steps", "flops", mode="before")
    @classmethod
    def _counted(cls, value: Any, info: Any) -> Any:
        """Converts a count given as text, such as "200k", to a number."""
        if not isinstance(value, str):
            return value
        return quantity(value) if info.field_name == "flops" else count(value)

    @field_validator("dtype", "device", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        """Converts torch objects such as torch.bfloat16 and torch.device("cuda:0") to their names."""
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
        """Number of training tokens of an optimizer step."""
        return self.batch_size * self.context

    @property
    def atoms(self) -> int:
        """Number of microbatches (atoms) in an optimizer step."""
        return self.batch_size // (self.micro_batch or self.batch_size)

    def peak_learning_rate(self, config: ModelConfig) -> float:
        """Returns the peak learning rate.

        Parameters
        ----------
        config
            The model.

        Returns
        -------
        float
            `learning_rate`; if None, AdamW's default for a model of this size times the optimizer's `rate`.

        Examples
        --------
        >>> f"{recipe.peak_learning_rate(gf.preset('llama@0.3m')):.2g}"
        '0.0015'
        """
        return self.learning_rate or default_learning_rate(config) * self.optimizer.rate

    def num_steps(
        self, config: ModelConfig, tokens_per_step: float | None = None, steps_per_epoch: int | None = None
    ) -> int | None:
        """Returns the number of optimizer steps of the run.

        Parameters
        ----------
        config
            The model.
        tokens_per_step
            Mean number of tokens that a step reads, for data on which that depends. If None, `tokens_per_step`.
        steps_per_epoch
            Steps of a pass over the training data, for a budget of epochs. If None, the data is not known.

        Returns
        -------
        int or None
            Steps; None for a budget of minutes, and for one of epochs before the data is known.

        Examples
        --------
        >>> recipe.num_steps(gf.preset("llama@0.3m"))
        196
        """
        if self.steps is not None:
            return self.steps
        if self.epochs is not None:
            return None if steps_per_epoch is None else max(1, math.ceil(self.epochs * steps_per_epoch))
        tokens = self.tokens
        if self.flops is not None:
            tokens = round(self.flops / (3 * config.flops(self.context)))
        return None if tokens is None else max(1, math.ceil(tokens / (tokens_per_step or self.tokens_per_step)))

    def save(self, path: Path) -> None:
        """Writes the recipe into a YAML file.

        Parameters
        ----------
        path
            The file.

        Examples
        --------
        >>> recipe.save(Path("recipe.yaml"))
        """
        path.write_text(yaml.safe_dump(to_plain(self), sort_keys=False), encoding="utf-8")

    @classmethod
    def from_file(cls, path: Path) -> Recipe:
        """Reads a recipe from a YAML or JSON file.

        Parameters
        ----------
        path
            The file.

        Returns
        -------
        Recipe
            The recipe.

        Raises
        ------
        RequestError
            For a file that is missing or damaged, and for fields that are wrong.

        Examples
        --------
        >>> gf.Recipe.from_file(Path("recipe.yaml")) == recipe
        True
        """
        return validated(cls, read_tree(path), "recipe", str(path))

    @classmethod
    def of(cls, **fields: object) -> Recipe:
        """Makes a recipe from fields that a user has given by name.

        Parameters
        ----------
        **fields
            Fields of `Recipe`.

        Returns
        -------
        Recipe
            The recipe.

        Raises
        ------
        RequestError
            For a wrong field.

        Examples
        --------
        >>> gf.Recipe.of(steps=10).batch_size
        16
        """
        return validated(cls, fields, "recipe")
