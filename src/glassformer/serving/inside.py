"""The inside of a model next to its answer: what a request may ask for, and the values of each token.

Inside    fields of a request
Insight   observer that collects the values while the text is computed
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
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
from glassformer.parts.core.running import running, thread
from glassformer.serving.body import Body
from glassformer.serving.wire import dumps
from glassformer.text.spelling import Spelling

MOST_SITES = 64
"""Largest number of sites of a request."""
LARGEST = 64 << 10
"""Largest number of bytes of the site values of one token."""
LARGEST_TEXT = 4 << 20
"""Largest number of bytes of the values of all tokens of a text."""
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
        self._left, self._full = LARGEST_TEXT, False
        self._taps: dict[bool, dict[str, Any]] = {}
        """Fields of the thread's state while values are edited, and, for True, also seen."""

    def watching(self, seen: bool) -> AbstractContextManager[None]:
        """Returns a context that ablates the components of `edit`, and, if `seen`, records the last position of each
        pass. Its functions are found once, because a search of a model's sites takes as long as a layer."""
        seen &= not self._full
        if seen not in self._taps:
            names = dict.fromkeys([*self._sites, *self._streams] if seen else ())
            with ExitStack() as stack:
                if self._edits:
                    stack.enter_context(edit(self.model, *self._edits))
                if names:
                    stack.enter_context(looking(self.model, {name: partial(self._take, name) for name in names}))
                self._taps[seen] = {"taps": thread.now.taps, "eagerly": thread.now.eagerly}
        return running(**self._taps[seen])

    def _take(self, name: str, x: Tensor, first: int, total: int) -> None:
        site = self._sites.get(name)
        axis = 1 if site is None else site.axes.index("s")
        if first + x.shape[axis] == total:  # only the part with the last position; batch is 1
            self._seen[name] = x.select(axis, -1)[0].to(torch.float32, copy=True)  # a view would keep all positions

    def token(self, token: int, logits: Tensor) -> Iterator[None]:
        """Adds the values of a new token, drawn from `logits` (v,); yields after each place."""
        found: dict[str, Any] = {"id": token, "token": self.spelling.text(token)}
        if self.asked.entropy:
            p = logits.float().softmax(-1)
            found["entropy"] = _number(torch.special.entr(p).sum().item())
        brief = found.copy()
        if self._streams and not self._full:
            found["lens"] = []
            for name in self._streams:
                found["lens"].append(self._lens(name, token))
                yield
        if self._sites and not self._full:
            found["sites"], left, omitted = {}, LARGEST, list[str]()
            for name in self._sites:
                value = self._value(name)
                left -= len(dumps(value))
                if left < 0:
                    omitted.append(name)
                else:
                    found["sites"][name] = value
                yield
            if omitted:
                found["omitted"] = omitted
        self._left -= len(dumps(found))
        if self._full or self._left < 0:
            self._full = bool(self._streams or self._sites)
            kinds = [kind for kind, names in (("lens", self._streams), ("sites", self._sites)) if names]
            found = brief | ({"omitted": kinds} if kinds else {})
        self._seen = {}
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
