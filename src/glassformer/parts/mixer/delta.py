"""The gated delta rule: a recurrence that corrects its matrix state, rather than adding to it. Yang et al. 2024,
2412.06464.

    S' = exp(a_t) S_{t-1}        S_t = S' + k_t (beta_t (v_t - S'^T k_t))^T        y_t = S_t^T q_t

q, k (b, s, g, K), v and y (b, s, n, V), beta and a (b, s, n), S (b, n, K, V), g dividing n: head i reads q and k of
group i // (n/g). a <= 0 is the logarithm of the decay. `fresh` (b, s) or (1, s) is True at the first token of a
sequence, where S_{t-1} is zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, library

from glassformer.parts.mixer.chunked import CHUNK, LEAST_LOG, Factors, as_operator, by_chunk, by_token, whole_chunks
from glassformer.parts.mixer.installed import computed
from glassformer.parts.precision import full_precision, wide

VALUES_PER_BLOCK = 1 << 22
VALUES_AT_ONCE = 1 << 18
"""Largest number of elements of the token pairs and values of chunks that are computed together, so that they fit in
cache."""


def naive_delta_rule(
    q: Float[Tensor, "b s g k"],
    k: Float[Tensor, "b s g k"],
    v: Float[Tensor, "b s n v"],
    beta: Float[Tensor, "b s n"],
    log_decay: Float[Tensor, "b s n"],
    state: Float[Tensor, "b n k v"] | None = None,
    fresh: Bool[Tensor, "#b s"] | None = None,
) -> tuple[Float[Tensor, "b s n v"], Float[Tensor, "b n k v"]]:
    """Returns (y, last state) of the gated delta rule by its definition, token by token."""
    q, k, v, beta, log_decay = map(wide, (q, k, v, beta, log_decay))
    b, s, n = v.shape[:3]
    q, k = (x.repeat_interleave(n // x.shape[2], dim=2) for x in (q, k))
    h = v.new_zeros(b, n, q.shape[3], v.shape[3]) if state is None else state
    ys = []
    for t in range(s):
        h = h * torch.exp(log_decay[:, t])[..., None, None]
        if fresh is not None:
            h = torch.where(fresh[:, t, None, None, None], 0.0, h)
        key = k[:, t, :, :, None]
        h = h + key * (beta[:, t, :, None] * (v[:, t] - (key * h).sum(2)))[:, :, None]
        ys.append((q[:, t, :, :, None] * h).sum(2))
    return torch.stack(ys, dim=1), h


def delta_rule(
    q: Float[Tensor, "b s g k"],
    k: Float[Tensor, "b s g k"],
    v: Float[Tensor, "b s n v"],
    beta: Float[Tensor, "b s n"],
    log_decay: Float[Tensor, "b s n"],
    state: Float[Tensor, "b n k v"] | None = None,
    fresh: Bool[Tensor, "#b s"] | None = None,
    chunk: int | None = None,
) -> tuple[Float[Tensor, "b s n v"], Float[Tensor, "b n k v"]]:
    """Returns (y, last state), the result of `naive_delta_rule` at least in fp32, by matmuls over chunks of tokens
    (Yang et al. 2024, 2406.06484). The updates w written by the tokens of a chunk solve one triangular system:

        (1 + A) w = beta (v - S k)      A_ij = beta_i (k_i . k_j) exp(a_{j+1} + ... + a_i),  j < i

    with the state S before the chunk, decayed to each token. For the backward pass it keeps its inputs and one state of
    each chunk, and computes the rest again. The last chunk may be shorter. Without `chunk`, an installed GPU kernel may
    compute it (`installed.py`)."""
    length = CHUNK if chunk is None else chunk
    q, k, v, beta, log_decay = map(wide, (q, k, v, beta, log_decay))
    b, s, n = v.shape[:3]
    if chunk is None and s > 1:
        ours = partial(delta_rule, chunk=CHUNK)
        theirs = computed("delta_rule", ours, q=q, k=k, v=v, beta=beta, log_decay=log_decay, state=state, fresh=fresh)
        if theirs is not None:
            return theirs
    if state is None:
        state = v.new_zeros(b, n, q.shape[3], v.shape[3])
    if s == 1:
        return naive_delta_rule(q, k, v, beta, log_decay, state, fresh)
    run, ys = _operator if as_operator() else _chunks, []
    for at in whole_chunks(s, length):
        part, size = None if fresh is None else fresh[:, at], min(length, at.stop - at.start)
        y, states = run(q[:, at], k[:, at], v[:, at], beta[:, at], log_decay[:, at], state, part, size)
        state = states[-1]
        ys.append(y)
    return ys[0] if len(ys) == 1 else torch.cat(ys, dim=1), state


# Below, tensors are (c, b, g, r, l, ...): c chunks of l tokens, r = n/g heads of a group; states (c, b, g, r, K, V).


class _Chunks(NamedTuple):
    """Intermediate tensors of c chunks of l tokens, for the forward and the backward pass.

    q, k (c, b, g, 1, l, K)      v (c, b, g, r, l, V)      beta, since, until (c, b, g, r, l, 1)
    near (c, b, g, r, l, l)      q_i . k_j, decayed, j <= i
    met (c, b, g, r, l, l)       beta_i (k_i . k_j), decayed; undefined on and above the diagonal
    solved (c, b, g, r, l, l)    (1 + A)^-1
    reads (c, b, g, r, l, K)     coefficients of the state in w = written - reads S
    written (c, b, g, r, l, V)
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    since: Tensor
    until: Tensor
    over: Tensor
    inner: Tensor
    near: Tensor
    met: Tensor
    solved: Tensor
    reads: Tensor
    written: Tensor

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, fresh: Tensor | None, at: slice,
        length: int,
    ) -> _Chunks:  # fmt: skip
        """Returns the intermediate tensors of the chunks formed by the tokens `at`, which are whole chunks of
        `length`."""
        g, (q, k, v, beta) = q.shape[2], (x[:, at] for x in (q, k, v, beta))
        f = Factors.of(log_decay[:, at], None if fresh is None else fresh[:, at], g, length, v)
        q, k = (by_chunk(x, g, length).transpose(3, 4).contiguous() for x in (q, k))
        v, beta = (by_chunk(x, g, length).transpose(3, 4).contiguous() for x in (v, beta[..., None]))
        since, until, over = (x.transpose(3, 4) for x in (f.since, f.until, f.over))
        met = (k @ k.mT) * f.inner * beta
        one = torch.eye(met.shape[-1], dtype=met.dtype, device=met.device).expand_as(met)
        solved = torch.linalg.solve_triangular(met, one, upper=False, unitriangular=True)
        near = (q @ k.mT) * f.inner
        return cls(
            q, k, v, beta, since, until, over, f.inner, near, met, solved,
            solved @ (k * (beta * since)), solved @ (v * beta),
        )  # fmt: skip


def _blocks(v: Tensor, length: int) -> list[slice]:
    """Returns slices that divide the s tokens of v into blocks of whole chunks, which are computed together."""
    b, s, n, width = v.shape
    step = length * max(1, VALUES_AT_ONCE // (b * n * length * max(length, width)))
    return [slice(first, min(first + step, s)) for first in range(0, s, step)]


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor, fresh: Tensor | None, length: int
) -> tuple[Tensor, Tensor]:
    """Returns (y, states) of whole chunks: the states before each chunk and after the last, (c + 1, b, n, K, V)."""
    states, ys = [state.unflatten(1, (q.shape[2], -1))], []
    with full_precision(q):
        for at in _blocks(v, length):
            c = _Chunks.of(q, k, v, beta, log_decay, fresh, at, length)
            ws, kept, first = [], (c.k * c.until).mT, len(states) - 1
            for i in range(len(kept)):
                ws.append(c.written[i] - c.reads[i] @ states[-1])
                states.append(states[-1] * c.over[i] + kept[i] @ ws[i])
            y = torch.addcmul(c.near @ torch.stack(ws), c.q @ torch.stack(states[first:-1]), c.since)
            ys.append(by_token(y.transpose(3, 4)))
    return ys[0] if len(ys) == 1 else torch.cat(ys, dim=1), torch.stack(states).flatten(2, 3)


# one operator, so that a compiler of the model does not unroll the chunks into its graph
_operator = library.custom_op(
    "glassformer::delta_rule",
    _chunks,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor log_decay, Tensor state, Tensor? fresh, int length)"
    " -> (Tensor, Tensor)",
)


@_operator.register_fake
def _(q, k, v, beta, log_decay, state, fresh, length):
    return torch.empty_like(v), state.new_empty(v.shape[1] // length + 1, *state.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, _, fresh, ctx.length = inputs  # the state before the first chunk is among those returned
    ctx.save_for_backward(*tensors, fresh, output[1])


def _grad(ctx: Any, dy: Tensor | None, dstates: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, beta, log_decay, fresh, states = ctx.saved_tensors
    g, length, parts = q.shape[2], ctx.length, list[tuple[Tensor, ...]]()
    dy = torch.zeros_like(v) if dy is None else dy
    dstates = None if dstates is None else dstates.unflatten(2, (g, -1))
    states = states.unflatten(2, (g, -1))
    ds = torch.zeros_like(states[0]) if dstates is None else dstates[-1]
    with full_precision(q):
        for at in reversed(_blocks(v, length)):
            c = _Chunks.of(q, k, v, beta, log_decay, fresh, at, length)
            first, last = at.start // length, at.stop // length
            given = None if dstates is None else dstates[first:last]
            *of_inputs, ds = _block_grad(c, dy[:, at], states[first:last], ds, given)
            parts.append(tuple(of_inputs))
    dq, dk, dv, dbeta, da = (torch.cat(pieces, dim=1) for pieces in zip(*reversed(parts), strict=True))
    return dq, dk, dv, dbeta, da.where(log_decay > LEAST_LOG, 0.0), ds.flatten(1, 2), None, None


def _block_grad(c: _Chunks, dy: Tensor, before: Tensor, ds: Tensor, dstates: Tensor | None) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k, v, beta and the decays, and of the state before a block of chunks `c`. Inputs:
    `dy`, the gradient of y; `before`, the states before the chunks; `ds`, the gradient of the state after the block;
    `dstates`, further gradients of the states before the chunks (None for zero)."""
    g, length = c.q.shape[2], c.q.shape[4]
    dy = by_chunk(dy, g, length).transpose(3, 4).contiguous()
    dnear = c.near.mT @ dy
    given = (c.q * c.since).mT @ dy - c.reads.mT @ dnear
    kept, every = c.k * c.until, [ds]  # gradients of the states, the last one first
    for i in reversed(range(len(given))):
        ds = ds * c.over[i] + given[i] - c.reads[i].mT @ (kept[i] @ ds)
        if dstates is not None:
            ds = ds + dstates[i]
        every.append(ds)
    after = torch.stack(every[-2::-1])
    w = c.written - c.reads @ before
    taken = (c.k @ after) * c.until
    dx = c.solved.mT @ (dnear + taken)  # of beta (v - S k)
    old = (c.k @ before) * c.since
    dmet = -(dx @ w.mT).tril(-1)
    dpairs = dy @ w.mT
    moved = dmet * c.met + dpairs * c.near  # of the sums of logarithms between two tokens
    read = ((c.q @ before) * c.since * dy).sum(-1) - (dx * c.beta * old).sum(-1)
    gave = (taken * w).sum(-1)
    dsums = moved.sum(-1) - moved.sum(-2) + read - gave  # (c, b, g, r, l)
    dsums[..., -1] += gave.sum(-1) + (before * after).sum((-1, -2)) * c.over[..., 0, 0]
    da = dsums.flip(-1).cumsum(-1).flip(-1)
    dmet = dmet * c.inner
    dbeta = (dx * (c.v - old)).sum(-1) + (dmet * (c.k @ c.k.mT)).sum(-1)
    dpairs, dkk = (dpairs * c.inner).sum(3, keepdim=True), (dmet * c.beta).sum(3, keepdim=True)
    dq = dpairs @ c.k + ((dy * c.since) @ before.mT).sum(3, keepdim=True)
    far = (w * c.until) @ after.mT - (dx * (c.beta * c.since)) @ before.mT
    dk = dpairs.mT @ c.q + (dkk + dkk.mT) @ c.k + far.sum(3, keepdim=True)
    dq, dk, dv = (by_token(x.transpose(3, 4)) for x in (dq, dk, dx * c.beta))
    dbeta, da = (by_token(x.transpose(3, 4)[..., None])[..., 0] for x in (dbeta, da))
    return dq, dk, dv, dbeta, da, ds


_operator.register_autograd(_grad, setup_context=_save)


# Effective attention, which is never stored


@torch.no_grad()
def delta_rule_map(
    q: Float[Tensor, "b s n k"],
    k: Float[Tensor, "b s n k"],
    beta: Float[Tensor, "b s n"],
    log_decay: Float[Tensor, "b s n"],
    fresh: Tensor | None = None,
) -> Iterator[tuple[int, Float[Tensor, "b n r s"]]]:
    """Yields (first query, block of r queries of the map) with y_t = sum_j map[t, j] v_j for a recurrence from zero:
    because y is linear in v, the rule is applied to unit vectors v_j. Memory: one block and a state (b, n, K, s)."""
    b, s, n, width = k.shape
    rows = min(s, max(1, VALUES_PER_BLOCK // (b * n * s)))
    state = k.new_zeros(b, n, width, s)
    for first in range(0, s, rows):
        at = slice(first, first + rows)
        units = torch.eye(s, dtype=k.dtype, device=k.device)[at, None].expand(b, -1, n, s)
        part = None if fresh is None else fresh[:, at]
        y, state = delta_rule(q[:, at], k[:, at], units, beta[:, at], log_decay[:, at], state, part)
        yield first, y.transpose(1, 2)
