"""The inside of a model next to its answer: what a request may ask for, and the values of each token.

Inside    fields of a request
Insight   observer that collects the values while the text is computed
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.introspection import choose, edit, looking
from glassformer.lens.logit_lens import unembed
from glassformer.lens.registry import ablation, check_edits
from glassformer.model import Model
from glassformer.serving.body import Body
from glassformer.serving.wire import dumps
from glassformer.text.spelling import Spelling

MOST_SITES = 64
"""Largest number of sites of a request."""
LARGEST = 64 << 10
"""Largest number of bytes of the site values of one token."""
MAPS = "st"

SiteName = Annotated[str, Field(min_length=1, max_length=128)]


class Inside(Body):
    """Values inside the model that an answer carries for each of its tokens."""

    sites: Annotated[list[SiteName], Field(max_length=MOST_SITES)] | None = None
    """Names of places in the model, or patterns such as layers.*.mixer.pattern; `GET /v1/models/NAME` lists them."""
    top: Annotated[int | None, Field(ge=1, le=32)] = None
    """Number of strongest entries of a place, and of tokens of the lens; 4 by default."""
    entropy: bool | None = None
    """Report the entropy of the model's distribution in nats."""
    lens: bool | None = None
    """Report the most likely tokens by the residual stream after each layer (logit lens)."""
    edit: Annotated[list[SiteName], Field(max_length=32)] | None = None
    """Components that this answer is computed without, such as layers.3.heads.1,2, layers.3.ffn or
    layers.3.neurons.7."""


class Insight:
    """Observer that collects values inside a model while one text is computed.

    Raises RequestError for a place or a component that the model lacks, and for too many places."""

    def __init__(self, asked: Inside, model: Model, config: ModelConfig, spelling: Spelling) -> None:
        self.asked, self.model, self.spelling = asked, model, spelling
        self.top = asked.top or 4
        self.tokens: list[dict[str, Any]] = []
        """Values of the new tokens, in order."""
        try:
            self._sites = choose(model, asked.sites) if asked.sites else {}
        except RequestError as problem:
            raise RequestError(str(problem), code=problem.code or "unknown", field="glass.sites") from None
        if odd := next((name for name, site in self._sites.items() if "s" not in site.axes), None):
            raise RequestError(f"{odd} has no value for each token", code="unsupported", field="glass.sites", value=odd)
        if len(self._sites) > MOST_SITES:
            raise RequestError(
                f"glass.sites names {len(self._sites)} places; at most {MOST_SITES} are reported",
                code="range", field="glass.sites", value=len(self._sites), expected=f"at most {MOST_SITES} places",
            )  # fmt: skip
        try:
            self._edits = [ablation(one) for one in asked.edit or ()]
            check_edits(config, self._edits)
        except RequestError as problem:
            raise RequestError(str(problem), code=problem.code or "unknown", field="glass.edit") from None
        self._streams = [f"layers.{i}.resid_post" for i in range(len(model.layers))] if asked.lens else []
        if self._streams:
            choose(model, self._streams)
        self._seen: dict[str, Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records the last position of each pass inside the context, and ablates the components of `edit`."""
        self._seen = {}
        looks = {name: partial(self._take, name) for name in dict.fromkeys([*self._sites, *self._streams])}
        with ExitStack() as stack:
            if self._edits:
                stack.enter_context(edit(self.model, *self._edits))
            if looks:
                stack.enter_context(looking(self.model, looks))
            yield

    def _take(self, name: str, x: Tensor, first: int, total: int) -> None:
        site = self._sites.get(name)
        axis = 1 if site is None else site.axes.index("s")
        if first + x.shape[axis] == total:  # only the part with the last position; batch is 1
            self._seen[name] = x.select(axis, -1)[0].float()

    def token(self, token: int, logits: Tensor) -> None:
        """Adds the values of a new token, drawn from `logits` (v,)."""
        found: dict[str, Any] = {"id": token, "token": self.spelling.text(token)}
        if self.asked.entropy:
            p = logits.float().softmax(-1)
            found["entropy"] = _number(torch.special.entr(p).sum().item())
        if self._streams:
            found["lens"] = [self._lens(name, token) for name in self._streams]
        if self._sites:
            found["sites"], left, omitted = {}, LARGEST, list[str]()
            for name in self._sites:
                value = self._value(name)
                left -= len(dumps(value))
                if left < 0:
                    omitted.append(name)
                else:
                    found["sites"][name] = value
            if omitted:
                found["omitted"] = omitted
        self.tokens.append(found)

    def _lens(self, name: str, token: int) -> dict[str, Any]:
        logits = unembed(self.model, self._seen[name].to(self.model.dtype)[None, None])[0, 0].float()
        p = logits.softmax(-1)
        best = p.topk(min(self.top, len(p)))
        return {
            "rank": 1 + int((logits > logits[token]).sum()),
            "top": [
                [self.spelling.text(int(i)), _number(float(value))]
                for i, value in zip(best.indices, best.values, strict=True)
            ],
        }

    def _value(self, name: str) -> dict[str, Any] | None:
        """Returns the entries of largest magnitude of site `name` at the last position, for each head if it has heads;
        None if the pass did not reach the site."""
        if name not in self._seen:
            return None
        x, axes = self._seen[name], self._sites[name].axes
        rows = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
        strong = rows.abs().topk(min(self.top, rows.shape[-1])).indices
        top = [[[int(i), _number(float(row[i]))] for i in indices] for row, indices in zip(rows, strong, strict=True)]
        found: dict[str, Any] = {"shape": list(x.shape), "top": top if x.dim() > 1 else top[0]}
        if not axes.endswith(MAPS):
            rms = [_number(float(row.pow(2).mean().sqrt())) for row in rows]
            found["rms"] = rms if x.dim() > 1 else rms[0]
        return found


def _number(value: float) -> float | None:
    """Returns a number rounded to five digits; None for NaN and infinity, which JSON lacks."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
