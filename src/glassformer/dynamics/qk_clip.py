"""QK-clip: after a step, the query and key weights of heads whose largest attention logit passed a threshold are scaled
down.

Kimi K2, 2507.20534, section 2.1: W_q and W_k of a head with largest logit S > tau are multiplied by sqrt(tau / S) each.
A logit is q k scale of a visible pair of query and key, before any bias and soft cap; S is the largest of a step's
training batch, over all microbatches.

Cost: |q| and |k| of every token, per layer. Their product bounds every logit of a head, and only layers whose bound
passes tau compute the logits, in blocks, in fp32: one more matmul of queries and keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.model import Model
from glassformer.parts.core.running import Look
from glassformer.parts.core.site import Site, look_at
from glassformer.parts.kernel.base import indices
from glassformer.parts.kernel.naive import VALUES_PER_BLOCK
from glassformer.parts.mixer import DotProduct
from glassformer.parts.precision import wide


class QKClip:
    """QK-clip for a whole model: records each head's largest logit in the forward pass, rescales W_q and W_k after the
    optimizer step.

    >>> clip = QKClip(model, 100.0)
    >>> with clip.looking():
    ...     model.loss(tokens, targets).backward()
    >>> optimizer.step()
    >>> clip.after_update()

    `threshold=None` disables recording and scaling."""

    def __init__(self, model: Model, threshold: float | None):
        refuse_clipping(model.config, threshold)
        self.threshold = threshold
        mixers: list[Any] = [layer.mixer for layer in model.layers]
        self.mixers: list[DotProduct] = [mixer.dot_product for mixer in mixers if mixer.dot_product is not None]
        self.peaks: dict[int, Tensor] = {}
        """Largest logit of each head, (n,), by the index in `mixers`; only of mixers that may have passed the
        threshold."""

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Records the largest logit of each head over all forward passes inside the context; earlier records are
        dropped."""
        self.peaks.clear()
        if self.threshold is None:
            yield
            return
        looks = list[tuple[Site, Look]]()
        for i, mixer in enumerate(self.mixers):
            looks += zip((mixer.q, mixer.k), self._looks(i, self.threshold), strict=True)
        with look_at(looks):
            yield

    def _looks(self, i: int, threshold: float) -> tuple[Look, Look]:
        queries, mixer = list[Tensor](), self.mixers[i]

        def look_q(q: Tensor, first: int, total: int) -> None:
            queries[:] = [q.detach()]

        def look_k(k: Tensor, first: int, total: int) -> None:
            q, k = queries.pop(), k.detach()
            if (largest_possible(mixer, q, k) > threshold).any():
                found = largest_logits(mixer, q, k)
                self.peaks[i] = torch.maximum(self.peaks.get(i, found), found)

        return look_q, look_k

    def after_update(self) -> None:
        """Scales down W_q and W_k of the heads whose largest logit passed the threshold."""
        for i, peaks in self.peaks.items():
            assert self.threshold is not None
            clip_heads(self.mixers[i], peaks, self.threshold)
        self.peaks.clear()


def refuse_clipping(config: ModelConfig, threshold: float | None) -> None:
    """Raises RequestError if a threshold is given and QK-clip does not apply: the model has no attention, its logits do
    not scale with W_q and W_k, or a reparametrisation sets their scale."""
    if threshold is None:
        return
    try:
        clipped = [block.mixer.can_clip_logits() for block in config.layers()]
    except RequestError as error:
        raise RequestError(
            f"qk_clip={threshold:g}: {error}", code=error.code, field=error.field, value=error.value
        ) from None
    if not any(clipped):
        raise RequestError(
            f"qk_clip={threshold:g} applies to attention, and the model has no attention; leave it out",
            code="unsupported", field="qk_clip", value=threshold,
        )  # fmt: skip
    if config.reparam is not None:
        raise RequestError(
            f"qk_clip={threshold:g}: reparam={config.reparam.kind} sets the scale of W_q and W_k; use one of them",
            code="conflict", field="reparam", value=config.reparam.kind,
        )  # fmt: skip


@torch.no_grad()
def largest_possible(mixer: DotProduct, q: Tensor, k: Tensor) -> Tensor:
    """Returns scale max|q| max|k| of each head, (n,), an upper bound of its logits. q (b, s, n, h), k (b, t, g, h)."""
    longest = [wide(x).norm(dim=-1).amax((0, 1)) for x in (q, k)]
    return mixer.scale * longest[0] * longest[1].repeat_interleave(len(longest[0]) // len(longest[1]))


@torch.no_grad()
def largest_logits(mixer: DotProduct, q: Tensor, k: Tensor) -> Tensor:
    """Returns the largest logit q k scale of each head, (n,), over the batch and all visible pairs. q (b, s, n, h), k
    (b, s, g, h), of whole sequences; computed by blocks of queries."""
    b, s, n, _ = q.shape
    k = wide(k).repeat_interleave(n // k.shape[2], dim=2)
    at = torch.arange(s, device=q.device)
    visibility = mixer.visibility.sized(s)
    found = torch.full((n,), float("-inf"), device=q.device, dtype=k.dtype)
    rows = max(1, VALUES_PER_BLOCK // (b * n * s))
    for first in range(0, s, rows):
        block = wide(q[:, first : first + rows])
        with torch.autocast(q.device.type, enabled=False):
            logits = torch.einsum("bsnh,btnh->bnst", block, k) * mixer.scale
        visible = visibility.visible(*indices(block, k, (at[first : first + rows], at)))
        found = torch.maximum(found, logits.masked_fill(~visible, float("-inf")).amax((0, 2, 3)))
    return found


@torch.no_grad()
def clip_heads(mixer: DotProduct, peaks: Tensor, threshold: float) -> Tensor:
    """Scales W_q, W_k and their biases in place, so that logits of head i shrink by f_i = min(1, tau / S_i); returns f.

    peaks (n,): S, the largest logit of each head. Query and key are scaled by sqrt(f) each. A key that several query
    heads share is scaled by the square root of the largest f among them (1 if one of them is not clipped), and each
    query by the rest of its f: f_i in total, for every head."""
    factors = torch.where(peaks > threshold, threshold / peaks, 1.0).to(mixer.queries.parameter.dtype)  # (n,)
    groups = factors.view(mixer.keys.heads or 1, -1)
    keys = groups.amax(1).sqrt()
    queries = (groups / keys[:, None]).flatten()
    for matrix, scales in ((mixer.queries, queries), (mixer.keys, keys)):
        matrix.within(matrix.parameter).mul_(scales[:, None, None])
        if matrix.bias is not None:
            matrix.within(matrix.bias).mul_(scales[:, None])
    return factors
