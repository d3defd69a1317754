"""Cross-entropy of a linear head, without the logits of the whole batch.

With `z_loss` every token adds z_loss (log Z)^2, Z = sum of exp(logits): it bounds the logits, whose drift softmax
ignores (PaLM, Chowdhery et al. 2022, 2204.02311, section 5; 1e-4 there). With `smoothing` e the target is 1 - e for the
correct token plus e / v for each of the v tokens, so that a model need not be certain (Szegedy et al. 2016, 1512.00567,
section 7; 0.1 in Vaswani et al. 2017). With a `vocabulary` the logits are those of the tokens of one tensor-parallel
rank ("owner"), and the loss is that of all tokens: the largest logit, the sum of exp and the target's logit are
combined over owners, three numbers for each row (Shoeybi et al. 2019, 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.parts import fused_loops
from glassformer.parts.core.owner import Vocabulary
from glassformer.parts.first_order import first_order
from glassformer.parts.precision import at_hand, wide

IGNORED = -100
_ROWS_ROUNDED = 128
"""Multiple to which the number of rows with a target is padded by other rows, so that compiled code meets few
shapes."""
_VALUES_PER_CHUNK = 1 << 20
_LEAST_ROWS = 512  # with fewer, adding up the weight's gradient costs more than the logits


def rows_with_targets(targets: Tensor) -> Tensor | None:
    """Returns the indices (n,), ascending among the b s tokens, of the tokens whose target is not -100: in masked
    language modelling, everything after the last mixer needs to be computed only for these. Other tokens pad n to a
    multiple of 128, at least 128. None if all tokens would be selected, or if n is not known in advance: to a compiler,
    and on other devices than CPUs."""
    if type(targets) is not Tensor or not at_hand(targets):
        return None
    ignored = targets.flatten() == IGNORED
    rows = max(1, -(-int((~ignored).sum()) // _ROWS_ROUNDED)) * _ROWS_ROUNDED
    if rows >= len(ignored):
        return None
    return ignored.to(torch.uint8).argsort(stable=True)[:rows].sort().values


def naive_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    reduction: str = "mean",
    z_loss: float = 0.0,
    smoothing: float = 0.0,
    vocabulary: Vocabulary | None = None,
) -> Tensor:
    """Returns the cross-entropy in nats of logits softcap(x W^T + b) by its definition: x (N, d), weight W (v, d),
    targets (N,), bias (v,). Keeps all logits (N, v) in fp32. With `reduction="none"`, losses (N,)."""
    logits = wide(F.linear(x, weight, bias))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if vocabulary is not None:
        return _of_owned(logits, targets, reduction, z_loss, smoothing, vocabulary)
    return _of_logits(logits, targets, reduction, z_loss, smoothing)


def _of_owned(
    logits: Tensor, targets: Tensor, reduction: str, z_loss: float, smoothing: float, vocabulary: Vocabulary
) -> Tensor:
    """Returns the cross-entropy over the tokens of the whole vocabulary, from the logits (N, last - first) of this
    tensor-parallel rank's tokens."""
    counted = targets != IGNORED
    place, here = vocabulary.here(targets.where(counted, -1))
    log_z = vocabulary.log_z(logits)[:, 0]
    loss = log_z - vocabulary.leave(logits.gather(-1, place[:, None])[:, 0] * here)
    if smoothing:
        loss = loss.lerp(log_z - vocabulary.leave(logits.sum(-1)) / vocabulary.size, smoothing)
    if z_loss:
        loss = loss + z_loss * log_z.square()
    loss = loss * counted
    return loss if reduction == "none" else _mean(loss.sum(), counted.sum())


def _mean(total: Tensor, count: Tensor) -> Tensor:
    """Returns total / count; for a count of 0 it is NaN, like torch's cross-entropy, with a gradient of 0."""
    return (total / count.clamp(min=1)).where(count > 0, torch.nan)


def cross_entropy(
    logits: Tensor, targets: Tensor, reduction: str = "mean", z_loss: float = 0.0, smoothing: float = 0.0
) -> Tensor:
    """Returns the cross-entropy in nats of logits (b, s, v) and targets (b, s): the mean over targets that are not
    -100, or with `reduction="none"` losses (b, s)."""
    loss = _of_logits(wide(logits).flatten(0, -2), targets.flatten(), reduction, z_loss, smoothing)
    return loss if reduction == "mean" else loss.view_as(targets)


def _of_logits(logits: Tensor, targets: Tensor, reduction: str, z_loss: float, smoothing: float) -> Tensor:
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction=reduction, label_smoothing=smoothing)
    if not z_loss:
        return loss
    counted = targets != IGNORED
    squares = logits.logsumexp(-1).square() * counted
    return loss + z_loss * (_mean(squares.sum(), counted.sum()) if reduction == "mean" else squares)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    reduction: str = "mean",
    z_loss: float = 0.0,
    smoothing: float = 0.0,
    vocabulary: Vocabulary | None = None,
) -> Tensor:
    """Returns the loss of `naive_linear_cross_entropy`, with the logits of only a few rows in memory at a time.

    With `reduction="mean"` the gradients are computed together with the loss, chunk by chunk. `reduction="none"`
    returns (N,) losses, zero for ignored targets."""
    if reduction == "mean":
        return _LinearCrossEntropy.apply(x, weight, targets, bias, softcap, z_loss, smoothing, vocabulary)
    if reduction != "none":
        raise ValueError(f"reduction={reduction!r}: use mean or none")
    rows = _chunk(weight, vocabulary)
    how = (bias, softcap, "none", z_loss, smoothing, vocabulary)
    parts = zip(x.split(rows), targets.split(rows), strict=True)
    return torch.cat([naive_linear_cross_entropy(a, weight, b, *how) for a, b in parts])


def _chunk(weight: Tensor, vocabulary: Vocabulary | None) -> int:
    """Returns the number of rows of x whose logits are in memory at a time, equal for every tensor-parallel rank."""
    tokens = weight.shape[0] if vocabulary is None else vocabulary.size
    return max(_LEAST_ROWS, _VALUES_PER_CHUNK // tokens)


def _joined(parts: list[Tensor]) -> Tensor | None:
    return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else None


def _added(total: Tensor | None, step: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return step.to(dtype or step.dtype) if total is None else total.add_(step)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        z_loss: float,
        smoothing: float,
        vocabulary: Vocabulary | None,
    ) -> Tensor:
        counted = targets != IGNORED
        count = counted.sum()
        some = count.clamp(min=1)  # without any target the gradient is 0, not 0 / 0
        rows = _chunk(weight, vocabulary)
        want_x, want_w, _, want_b, *_ = ctx.needs_input_grad
        total = torch.zeros((), dtype=wide(x[:0]).dtype, device=x.device)
        grad_x: list[Tensor] = []
        grad_w: Tensor | None = None
        grad_b: Tensor | None = None

        def gradients(part: Tensor, grad: Tensor) -> None:
            nonlocal grad_w, grad_b
            if want_x:
                grad_x.append((grad @ weight.to(grad.dtype)).to(x.dtype))
            if want_w:
                grad_w = _added(grad_w, grad.t() @ part.to(grad.dtype), weight.dtype)
            if want_b:
                grad_b = _added(grad_b, grad.sum(0, dtype=wide(grad[:0]).dtype))

        plain = softcap is None and vocabulary is None and not z_loss and not smoothing
        share = 1 / int(some) if plain and (want_x or want_w or want_b) and fused_loops.serves(x, weight) else 0.0
        chunks = zip(x.split(rows), targets.split(rows), counted.split(rows), strict=True)
        for part, target, keep in chunks:
            logits = F.linear(part, weight, bias)
            made = fused_loops.cross_entropy(logits, target, share) if share else None
            if made is not None:
                total = total + made.sum()
                gradients(part, logits)
                continue
            dtype, logits = logits.dtype, wide(logits)
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            place, minus = target.where(keep, 0)[:, None], smoothing - 1.0
            if vocabulary is None:
                log_z, right, size = logits.logsumexp(-1, keepdim=True), logits.gather(-1, place), logits.shape[-1]
                hit = torch.full_like(place, minus, dtype=logits.dtype)
            else:
                place, here = vocabulary.here(place)
                log_z, size = vocabulary.log_z(logits), vocabulary.size
                right = vocabulary.leave(logits.gather(-1, place) * here)
                hit = here.to(logits.dtype) * minus
            total = total + ((log_z - right)[:, 0] * keep).sum() * (1 - smoothing)
            if smoothing:
                mean = logits.mean(-1) if vocabulary is None else vocabulary.leave(logits.sum(-1)) / size
                total = total + ((log_z[:, 0] - mean) * keep).sum() * smoothing
            if z_loss:
                total = total + z_loss * (log_z[:, 0].square() * keep).sum()
            if not (want_x or want_w or want_b):
                continue
            # d loss / d logit = (softmax (1 + 2 z_loss log Z) - target) / count, through the cap 1 - (logit / cap)^2
            slope = None if softcap is None else 1.0 - (logits / softcap).square()
            grad = logits.sub_(log_z).exp_()  # in place: a chunk of logits is among the largest tensors of a step
            if z_loss:
                grad.mul_(1 + 2 * z_loss * log_z)
            grad.scatter_add_(-1, place, hit)
            if smoothing:
                grad -= smoothing / size
            if slope is not None:
                grad.mul_(slope)
            grad = grad.mul_(keep[:, None].to(grad.dtype) / some).to(dtype)
            del logits, slope
            gradients(part, grad)
            del grad
        if bias is not None and grad_b is not None:
            grad_b = grad_b.to(bias.dtype)
        ctx.save_for_backward(_joined(grad_x), grad_w, grad_b)
        ctx.at_hand = bool(share)  # in the memory of this process: reading a value waits for no device
        return _mean(total, count)

    @staticmethod
    @first_order
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (of_loss,), grads = upstream, ctx.saved_tensors
        if not (ctx.at_hand and of_loss.item() == 1):
            grads = [grad * of_loss if grad is not None else None for grad in grads]
        return grads[0], grads[1], None, grads[2], None, None, None, None
