"""One vector for each text, by any model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.introspection import at_rest
from glassformer.machine.threads import paced
from glassformer.model import Model
from glassformer.parts.head import Pool, pool
from glassformer.progress import silent
from glassformer.text import OnProgress, Tokenizer
from glassformer.text.tokenizers import FileTokenizer

TOKENS = 1024
"""Tokens of a batch, padding included: enough for fast products, and few enough that its texts are of similar length.
"""

MOST_PROMPT = 4096
"""Largest number of tokens of a prompt that are counted."""


@dataclass(frozen=True)
class Pooling:
    """Rule of a checkpoint for turning the hidden states of a text into one vector."""

    how: Pool
    normalize: bool
    """True if the vector is divided by its length."""
    max_tokens: int | None = None
    """Largest number of tokens of a text; the rest is cut off. None for the model's context."""
    prompt: str = ""
    """Text that is put in front of each text."""
    include_prompt: bool = True
    """False if the tokens of the prompt are read but not pooled."""


MEAN = Pooling("mean", True)
"""Pooling of a model whose folder does not name one."""


@dataclass(frozen=True)
class Classified:
    """Class of a text by a model with a head of classes."""

    label: str
    """Most likely class."""
    probability: float
    """Its probability."""
    probabilities: dict[str, float]
    """Probability of each class."""


class Reader(Protocol):
    """A model with its tokenizer and pooling, such as `Loaded`."""

    model: Model
    config: ModelConfig
    tokenizer: Tokenizer | None
    pooling: Pooling | None


class Embedder:
    """Text encoder: called with n texts, it returns their vectors (n, d) in fp32, as `embed` does."""

    def __init__(self, loaded: Reader):
        if loaded.tokenizer is None:
            raise RequestError(
                "this checkpoint has no tokenizer, so it reads no text; put its tokenizer.json into the folder",
                code="missing", field="tokenizer", expected="a tokenizer.json",
            )  # fmt: skip
        if loaded.config.encoder is not None:
            raise RequestError(
                "this model has an encoder and a decoder, and a vector is of one text; give an encoder",
                code="conflict", field="model", expected="an encoder",
            )  # fmt: skip
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.pooling = loaded.pooling or MEAN
        self.own = loaded.pooling is None and loaded.config.head.vector and loaded.config.head.pool is not None
        """True if the model's head computes the vectors, so that hidden states are not pooled here."""
        self.limit = min(self.pooling.max_tokens or loaded.config.context, loaded.config.context)
        self.unpooled = 0 if self.pooling.include_prompt else prompt_tokens(self.tokenizer, self.pooling.prompt)
        """Number of tokens at the start of a row that are read but not pooled."""
        if self.unpooled >= self.limit:
            raise RequestError(
                f"the prompt of the folder has {self.unpooled:,} tokens, and texts end after {self.limit:,}",
                code="range", field="prompts", value=self.unpooled, expected=f"fewer than {self.limit:,} tokens",
            )  # fmt: skip

    def __call__(self, texts: Sequence[str], progress: OnProgress = silent) -> Float[Tensor, "n d"]:
        return in_order(self.batches(texts, progress))[1]

    def batches(self, texts: Sequence[str], progress: OnProgress = silent) -> Iterator[tuple[list[int], Tensor]]:
        """Yields the indices of a batch of b texts with their vectors (b, d), the longest texts first."""
        check_texts(texts)
        rows = tokenized(self.tokenizer, [f"{self.pooling.prompt}{text}" for text in texts], self.limit)
        if (empty := next((i for i, row in enumerate(rows) if len(row) <= self.unpooled), None)) is not None:
            raise RequestError(
                f"text {empty + 1} of {len(texts)} is empty; give one with at least one token",
                code="missing", field="texts", value="", expected="a text",
            )  # fmt: skip
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))  # the longest first: memory shows at once
        done = 0
        while done < len(rows):
            some = order[done : done + max(1, TOKENS // len(rows[order[done]]))]
            yield some, self.vectors([rows[i] for i in some]).float().cpu()
            done += len(some)
            progress("embedding", done, len(rows))

    @torch.inference_mode()
    def vectors(self, rows: Sequence[np.ndarray]) -> Tensor:
        """Returns the vectors (n, d) of n rows of tokens, which must be sorted, the longest first."""
        longest = len(rows[0])
        tokens = torch.zeros(len(rows), longest, dtype=torch.long)
        real = torch.zeros_like(tokens)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.from_numpy(row.astype(np.int64))
            real[i, : len(row)] = 1
        device = self.model.device
        documents = None if bool(real.all()) else real.to(device)
        with at_rest(self.model), paced(self.model, "embedding", tokens.numel(), free=False):
            if self.own:
                return self.model(tokens.to(device), documents=documents)
            x = self.model.hidden_states(tokens.to(device), documents=documents)
            if self.unpooled:
                real[:, : self.unpooled] = 0
                documents = real.to(device)
            x = pool(x, self.pooling.how, documents)
            return F.normalize(x, dim=-1) if self.pooling.normalize else x


def in_order(batches: Iterable[tuple[list[int], Tensor]]) -> tuple[list[int], Float[Tensor, "n d"]]:
    """Joins the batches of `Embedder.batches`; returns the indices, ascending, and the vectors in this order."""
    indices, vectors = zip(*batches, strict=True)
    found = torch.tensor([i for some in indices for i in some])
    order = found.argsort()
    return found[order].tolist(), torch.cat(vectors)[order]


class Classifier(Embedder):
    """Text classifier: called with n texts, it returns the probabilities (n, c) of the classes of the model's head."""

    def __init__(self, loaded: Reader):
        if loaded.config.head.gives != "classes":
            raise RequestError(
                f"this model's head gives {loaded.config.head.gives}, and not classes; train a model with +classes:N "
                "on texts with labels",
                code="conflict", field="model", value=loaded.config.head.gives, expected="+classes:N",
            )  # fmt: skip
        super().__init__(loaded)
        self.own = True
        self.labels = loaded.config.head.labels or tuple(map(str, range(loaded.config.head.classes or 0)))
        """Names of the classes; their numbers if the checkpoint does not name them."""

    def vectors(self, rows: Sequence[np.ndarray]) -> Tensor:
        return super().vectors(rows).float().softmax(-1)

    def classified(self, texts: Sequence[str], progress: OnProgress = silent) -> list[Classified]:
        """Returns the most likely class of each text."""
        return [
            Classified(self.labels[row.argmax()], float(row.max()), dict(zip(self.labels, row.tolist(), strict=True)))
            for row in self(texts, progress).numpy()
        ]


def tokenized(tokenizer: Tokenizer, texts: Sequence[str], limit: int) -> list[np.ndarray]:
    """Returns the tokens of each text, at most `limit`, with the special tokens that the tokenizer's file adds."""
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer.encode_whole(texts, limit)
    return [row[:limit] for row in tokenizer.encode_batch(texts)]


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> int:
    """Returns the number of tokens of a prompt in front of a text, without the special token that ends a text."""
    if not prompt:
        return 0
    row = tokenized(tokenizer, [prompt], MOST_PROMPT)[0]
    closed = len(row) > 0 and isinstance(tokenizer, FileTokenizer) and int(row[-1]) in tokenizer.special_ids
    return len(row) - closed


def check_texts(texts: Sequence[str]) -> None:
    """Raises RequestError unless the value is a list of texts."""
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise RequestError(
            f"texts is a {type(texts).__name__}; give a list of strings, such as [text]",
            code="type", field="texts", value=type(texts).__name__, expected="a list of strings",
        )  # fmt: skip
    if not texts:
        raise RequestError("texts is empty; give at least one", code="missing", field="texts", expected="a text")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise RequestError(
                f"text {i + 1} is a {type(text).__name__}; give strings",
                code="type", field="texts", value=type(text).__name__, expected="a string",
            )  # fmt: skip
