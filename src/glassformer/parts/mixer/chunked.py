"""Linear recurrences with a matrix S as state, for linear attention, retention and state space duals.

    S_t = exp(a_t) S_{t-1} + k_t v_t^T        y_t = q_t S_t

q, k (b, s, g, K), v and y (b, s, n, V), S (b, n, K, V), g dividing n: head i reads q and k of group i // (n/g). The
decay's logarithm a <= 0 is one number per head and token (b, s, n), one per head (n,), or None for no decay. `fresh`
(b, s) or (1, s) is True at the first token of a sequence, where S_{t-1} is zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, library

from glassformer.parts.mixer.installed import computed
from glassformer.parts.precision import exact, finest_dtype, full_precision, wide

CHUNK = 64
"""Number of tokens in a chunk. Pairs of tokens of a chunk are computed by one matrix, and one state of each chunk is
kept (docs/log.md)."""
LEAST_LOG = -60.0
"""Minimum logarithm of a decay: 1e-26 of a state is negligible, and sums of logarithms stay precise."""
PAIRS_PER_BLOCK = 1 << 18
"""Largest number of elements of the matrices of token pairs of those chunks that are computed together
(docs/log.md)."""
VALUES_PER_BLOCK = 1 << 22


def as_operator() -> bool:
    """Returns True if a recurrence should be called as a custom operator of torch, which has a gradient and is one step
    for a compiler. False in eager inference, because the first call loads torch's whole compiler, which is slow."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling()


def whole_chunks(s: int, length: int) -> list[slice]:
    """Returns slices that divide s tokens: one of all whole chunks of `length` tokens, and one of the remaining tokens,
    if any remain."""
    full = s - s % length
    return [at for at in (slice(0, full), slice(full, s)) if at.start < at.stop]


def naive_linear_attention(
    q: Float[Tensor, "b s g k"],
    k: Float[Tensor, "b s g k"],
    v: Float[Tensor, "b s n v"],
    log_decay: Tensor | None = None,
    state: Float[Tensor, "b n k v"] | None = None,
    fresh: Bool[Tensor, "#b s"] | None = None,
) -> tuple[Float[Tensor, "b s n v"], Float[Tensor, "b n k v"]]:
    """Returns (y, last state) of the recurrence by its definition, token by token."""
    q, k, v = wide(q), wide(k), wide(v)
    b, s, n = v.shape[:3]
    q, k = (x.repeat_interleave(n // x.shape[2], dim=2) for x in (q, k))
    h = v.new_zeros(b, n, q.shape[3], v.shape[3]) if state is None else state
    ys = []
    for t in range(s):
        if log_decay is not None:
            h = h * torch.exp(wide(log_decay if log_decay.dim() == 1 else log_decay[:, t]))[..., None, None]
        if fresh is not None:
            h = torch.where(fresh[:, t, None, None, None], 0.0, h)
        h = h + k[:, t, :, :, None] * v[:, t, :, None]
        ys.append((q[:, t, :, :, None] * h).sum(2))
    return torch.stack(ys, dim=1), h


def chunked_linear_attention(
    q: Float[Tensor, "b s g k"],
    k: Float[Tensor, "b s g k"],
    v: Float[Tensor, "b s n v"],
    log_decay: Tensor | None = None,
    state: Float[Tensor, "b n k v"] | None = None,
    fresh: Bool[Tensor, "#b s"] | None = None,
    chunk: int | None = None,
) -> tuple[Float[Tensor, "b s n v"], Float[Tensor, "b n k v"]]:
    """Returns (y, last state), the result of `naive_linear_attention` at least in fp32, by matmuls over chunks of
    tokens (Dao & Gu 2024, 2405.21060, section 6): pairs within a chunk, and the state before it.

    Work and memory are linear in s. For the backward pass it keeps its inputs and one state of each chunk, and computes
    the pairs again. Every exponent is a sum of logarithms <= 0: nothing overflows. The last chunk may be shorter.
    Without `chunk`, an installed GPU kernel may compute it (`installed.py`)."""
    length = CHUNK if chunk is None else chunk
    q, k, v, log_decay = wide(q), wide(k), wide(v), None if log_decay is None else wide(log_decay)
    b, s, n = v.shape[:3]
    if chunk is None and s > 1:
        ours = partial(chunked_linear_attention, chunk=CHUNK)
        theirs = computed("linear_attention", ours, q=q, k=k, v=v, log_decay=log_decay, state=state, fresh=fresh)
        if theirs is not None:
            return theirs
    if state is None:
        state = v.new_zeros(b, n, q.shape[3], v.shape[3])
    if s == 1:
        return naive_linear_attention(q, k, v, log_decay, state, fresh)
    r = n // q.shape[2]
    run, ys = _operator if as_operator() else _chunks, []
    within = state.unflatten(1, (-1, r)).transpose(2, 3)  # (b, g, K, r, V)
    for at in whole_chunks(s, length):
        parts = _part(log_decay, at), within, _part(fresh, at)
        y, states = run(q[:, at], k[:, at], v[:, at], *parts, min(length, at.stop - at.start))
        within = states[-1]
        ys.append(y)
    return ys[0] if len(ys) == 1 else torch.cat(ys, dim=1), within.transpose(2, 3).flatten(1, 2)


def state_space_dual(
    u: Float[Tensor, "b s n h"],
    dt: Float[Tensor, "b s n"],
    a: Float[Tensor, " n"],
    b: Float[Tensor, "b s g p"],
    c: Float[Tensor, "b s g p"],
    state: Float[Tensor, "b n p h"] | None = None,
    fresh: Bool[Tensor, "#b s"] | None = None,
    chunk: int | None = None,
) -> tuple[Float[Tensor, "b s n h"], Float[Tensor, "b n p h"]]:
    """Returns (y, last state) of the selective scan with one decay per head:

        S_t = exp(dt_t a) S_{t-1} + dt_t b_t u_t^T        y_t = c_t S_t

    a < 0 < dt. Without `chunk`, an installed GPU kernel may compute it (`installed.py`)."""
    u, dt, a, b, c = map(wide, (u, dt, a, b, c))
    if chunk is None and u.shape[1] > 1:
        ours = partial(state_space_dual, chunk=CHUNK)
        theirs = computed("state_space_dual", ours, u=u, dt=dt, a=a, b=b, c=c, state=state, fresh=fresh)
        if theirs is not None:
            return theirs
    return chunked_linear_attention(c, b, u * dt[..., None], dt * a, state, fresh, chunk)


def two_sided_linear_attention(
    q: Float[Tensor, "b s n k"],
    k: Float[Tensor, "b s n k"],
    v: Float[Tensor, "b s n v"],
    fresh: Bool[Tensor, "#b s"] | None = None,
) -> Float[Tensor, "b s n v"]:
    """Returns y_t = q_t S, with S the sum of k_j v_j^T over all tokens of t's sequence: earlier ones, later ones, and
    itself once."""
    if fresh is None:
        with full_precision(q):
            return torch.einsum("bsnk,bnkv->bsnv", q, torch.einsum("bsnk,bsnv->bnkv", k, v))
    before, _ = chunked_linear_attention(q, k, v, fresh=fresh)
    ends = F.pad(fresh[:, 1:], (0, 1), value=True).flip(1)
    after, _ = chunked_linear_attention(q.flip(1), k.flip(1), v.flip(1), fresh=ends)
    return before + after.flip(1) - (q * k).sum(-1, keepdim=True) * v


# Below, tensors are (c, b, g, l, ...): c chunks of l tokens. Values end in (r, V), the r = n/g heads of a group, so
# that one matmul serves them all; states in (K, r, V).


@dataclass(frozen=True)
class Factors:
    """Decay factors within each chunk, the share of a token or state that is left at a later token; axes have size one
    if all entries are equal.

    inner (c, b, g, r, l, l)      of token j at token t, 0 if j is invisible to t
    since (c, b, g, l, r, 1)      of the state before the chunk at token t
    until (c, b, g, l, r, 1)      of token j after the chunk
    over (c, b, g, 1, r, 1)       of the state before the chunk, after it
    """

    inner: Tensor
    since: Tensor
    until: Tensor
    over: Tensor

    @classmethod
    def of(cls, log_decay: Tensor | None, fresh: Tensor | None, groups: int, length: int, like: Tensor) -> Factors:
        sums = like.new_zeros(1, 1, 1, 1, length)  # (c, b, g, r, l): sums of logarithms from the first token
        if log_decay is not None:
            # in fp64 if available: factors of near tokens are small differences of sums that may be large
            fine = finest_dtype(like)
            a = log_decay.to(fine).clamp(min=LEAST_LOG)
            if a.dim() == 1:
                sums = a.view(1, 1, groups, -1, 1) * torch.arange(1, length + 1, device=a.device)
            else:
                sums = by_chunk(a[..., None], groups, length)[..., 0].transpose(3, 4).cumsum(4)
        gaps, left = (sums[..., :, None] - sums[..., None, :]).to(like.dtype), (sums[..., -1:] - sums).to(like.dtype)
        sums = sums.to(like.dtype)
        since, over = sums, sums[..., -1:]
        seen = torch.ones(length, length, dtype=torch.bool, device=like.device).tril()
        if fresh is not None:  # tokens of one document only
            begun = (
                fresh.unflatten(1, (-1, length)).transpose(0, 1).int().cumsum(2)[:, :, None, None]
            )  # (c, b, 1, 1, l)
            seen = seen & (begun[..., :, None] == begun[..., None, :])
            since, over = (x.masked_fill(begun[..., -x.shape[4] :] > 0, -torch.inf) for x in (since, over))
            left = left.masked_fill(begun < begun[..., -1:], -torch.inf)
        since, until, over = (x.exp().transpose(3, 4)[..., None] for x in (since, left, over))
        return cls(gaps.masked_fill(~seen, -torch.inf).exp(), since, until, over)


def by_chunk(x: Tensor, groups: int, length: int) -> Tensor:
    """Reshapes tokens x (b, s, n, w) to chunks (c, b, g, l, r, w): c chunks of l = `length` tokens, r heads in each of
    g = `groups` groups."""
    return x.unflatten(2, (groups, -1)).unflatten(1, (-1, length)).permute(1, 0, 3, 2, 4, 5)


def by_token(x: Tensor) -> Tensor:
    """Reshapes chunks x (c, b, g, l, r, w) to tokens (b, s, n, w), the inverse of `by_chunk`."""
    return x.permute(1, 0, 3, 2, 4, 5).flatten(3, 4).flatten(1, 2)


def _carried(given: Tensor, over: Tensor, first: Tensor) -> Tensor:
    """Returns the states (c + 1, ...) of the recurrence over chunks S_{i+1} = over_i S_i + given_i along the first
    axis, from S_0 = first."""
    states = given.new_empty(len(given) + 1, *given.shape[1:])
    states[0] = first
    for i, each in enumerate(over.expand(len(given), *over.shape[1:])):
        torch.addcmul(given[i], states[i], each, out=states[i + 1])
    return states


def _blocks(v: Tensor, length: int) -> list[slice]:
    """Returns slices that divide the s tokens of v into blocks of chunks, which are computed together, so that their
    matrices of token pairs fit in cache."""
    b, s, n, _ = v.shape
    step = length * max(1, PAIRS_PER_BLOCK // (b * n * length * length))
    return [slice(first, min(first + step, s)) for first in range(0, s, step)]


def _part(x: Tensor | None, at: slice) -> Tensor | None:
    """Returns the part of x (decays, or marks of first tokens) for the tokens `at`; x itself if it has no axis of
    tokens; None for None."""
    return x if x is None or x.dim() == 1 else x[:, at]


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor, fresh: Tensor | None, length: int
) -> tuple[Tensor, Tensor]:
    """Returns (y, states) of whole chunks: the states before each chunk and after the last, (c + 1, ...)."""
    y, states = torch.empty_like(v), [state[None]]
    with full_precision(q):
        for at in _blocks(v, length):
            part = _part(log_decay, at), states[-1][-1], _part(fresh, at)
            y[:, at], after = _block(q[:, at], k[:, at], v[:, at], *part, length)
            states.append(after)
    return y, torch.cat(states)


def _block(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor, fresh: Tensor | None, length: int
) -> tuple[Tensor, Tensor]:
    """Returns (y, states) of some chunks that are computed together; `states` are the states after each chunk."""
    g = q.shape[2]
    f = Factors.of(log_decay, fresh, g, length, v)
    q, k = (by_chunk(x, g, length).squeeze(4).contiguous() for x in (q, k))
    v = by_chunk(v, g, length).contiguous()
    given = (k.mT @ (v * f.until).flatten(-2)).unflatten(-1, v.shape[-2:])
    states = _carried(given, f.over, state)
    near = ((q @ k.mT)[:, :, :, None] * f.inner) @ v.transpose(3, 4)
    far = (q @ states[:-1].flatten(-2)).unflatten(-1, v.shape[-2:])
    return by_token(torch.addcmul(near.transpose(3, 4), far, f.since)), states[1:]


# one operator, so that a compiler of the model does not unroll the chunks into its graph
_operator = library.custom_op(
    "glassformer::chunked_linear_attention",
    _chunks,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor state, Tensor? fresh, int length)"
    " -> (Tensor, Tensor)",
)


@_operator.register_fake
def _(q, k, v, log_decay, state, fresh, length):
    return torch.empty_like(v), state.new_empty(v.shape[1] // length + 1, *state.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, log_decay, _, fresh, ctx.length = inputs
    ctx.save_for_backward(q, k, v, log_decay, fresh, output[1])


def _grad(ctx: Any, dy: Tensor | None, dstates: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, log_decay, fresh, states = ctx.saved_tensors
    length, decays = ctx.length, ctx.needs_input_grad[3]
    dy = torch.zeros_like(v) if dy is None else dy
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    da = torch.zeros_like(log_decay) if log_decay is not None and decays else None
    ds = torch.zeros_like(states[0]) if dstates is None else dstates[-1]  # of the state after the block
    with full_precision(q):
        for at in reversed(_blocks(v, length)):
            some = slice(at.start // length, at.stop // length)
            given = None if dstates is None else dstates[some]
            decay, begins, before = _part(log_decay, at), _part(fresh, at), states[some]
            one = _block_grad(q[:, at], k[:, at], v[:, at], decay, begins, before, dy[:, at], given, ds, length, decays)
            dq[:, at], dk[:, at], dv[:, at], of_decay, ds = one
            if da is not None and of_decay is not None:
                if da.dim() == 1:
                    da += of_decay.sum((0, 1))
                else:
                    da[:, at] = of_decay
    if da is not None:
        da = da.where(log_decay > LEAST_LOG, 0.0)
    return dq, dk, dv, da, ds, None, None


def _block_grad(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, fresh: Tensor | None, states: Tensor, dy: Tensor,
    dstates: Tensor | None, ds: Tensor, length: int, decays: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Returns the gradients of q, k, v, of the decays by token (None if `decays` is False), and of the state before the
    chunks. Inputs: the gradients `dy` of y, `dstates` of the states before each chunk (None for zero), and `ds` of the
    state after the last chunk."""
    g = q.shape[2]
    f = Factors.of(log_decay, fresh, g, length, v)
    q, k = (by_chunk(x, g, length).squeeze(4).contiguous() for x in (q, k))
    v, dy = (by_chunk(x, g, length).contiguous() for x in (v, dy))
    heads, before = v.shape[-2:], states.flatten(-2)
    far = dy * f.since
    read = (q.mT @ far.flatten(-2)).unflatten(-1, heads)
    read = read if dstates is None else read + dstates
    every = _carried(read.flip(0), f.over.flip(0), ds).flip(0)  # of each state, with those of the earlier ones added
    after = every[1:].flatten(-2)
    pairs, dpairs = q @ k.mT, dy.transpose(3, 4) @ v.transpose(3, 4).mT  # dpairs (c, b, g, r, l, l)
    left, taken = pairs[:, :, :, None] * f.inner, (k @ after).unflatten(-1, heads)
    dv = (left.mT @ dy.transpose(3, 4)).transpose(3, 4) + taken * f.until
    da = None
    if log_decay is not None and decays:
        met = dpairs * left
        seen = ((q @ before).unflatten(-1, heads) * far).sum(-1).transpose(3, 4)
        gave = (taken * f.until * v).sum(-1).transpose(3, 4)
        dsums = met.sum(-1) - met.sum(-2) + seen - gave  # (c, b, g, r, l)
        dsums[..., -1] += gave.sum(-1) + (states * every[1:]).sum((3, 5)) * f.over[:, :, :, 0, :, 0]
        da = by_token(dsums.flip(-1).cumsum(-1).flip(-1).transpose(3, 4)[..., None])[..., 0]
    dpairs = (dpairs * f.inner).sum(3)
    dq = dpairs @ k + far.flatten(-2) @ before.mT
    dk = dpairs.mT @ q + (v * f.until).flatten(-2) @ after.mT
    return by_token(dq[..., None, :]), by_token(dk[..., None, :]), by_token(dv), da, every[0]


_operator.register_autograd(_grad, setup_context=_save)


# Effective attention, which is never stored


@torch.no_grad()
def linear_attention_map(
    q: Float[Tensor, "b s n k"],
    k: Float[Tensor, "b s n k"],
    log_decay: Tensor | None = None,
    age: Tensor | None = None,
    causal: bool = True,
) -> Iterator[tuple[int, Float[Tensor, "b n r s"]]]:
    """Yields (first query, block of r queries of the map) with y_t = sum_j map[t, j] v_j for a recurrence from zero:

        map[t, j] = q_t . k_j exp(a_{j+1} + ... + a_t)  for j <= t, else 0

    `age` (1 or b, s): number of earlier tokens in each token's sequence; tokens of other sequences have weight 0.
    Memory: one block."""
    q, k = wide(q), wide(k)
    b, s, n, _ = q.shape
    place = torch.arange(s, device=q.device)
    begins = (place - (place if age is None else age)).expand(b, s)  # first token that each one attends to
    clock = None
    if log_decay is not None:
        a = exact(log_decay).clamp(min=LEAST_LOG)
        clock = (a.expand(b, s, n) if a.dim() == 1 else a).cumsum(1).transpose(1, 2)  # (b, n, s)
    rows = max(1, VALUES_PER_BLOCK // (b * n * s))
    for first in range(0, s, rows):
        at = slice(first, first + rows)
        block = torch.einsum("brnk,bsnk->bnrs", q[:, at], k)
        if clock is not None:
            gap = (clock[:, :, at, None] - clock[:, :, None]).clamp(max=0).to(block)
            block = block * gap.exp()
        seen = begins[:, None] == begins[:, at, None]  # (b, r, s)
        if causal:
            seen = seen & (place <= place[at, None])
        yield first, block.where(seen[:, None], 0.0)
