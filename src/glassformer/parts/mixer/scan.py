"""Selective scan: a linear recurrence whose decay and input depend on the token. Gu & Dao 2023, 2312.00752.

    h_t = exp(dt_t A) h_{t-1} + dt_t u_t B_t        y_t = sum_p C_t h_t

c channels, with p separate states each: u, dt, y (b, s, c), B, C (b, s, p), A (p, c), negative. States are (b, p, c),
channels innermost, because a sum over p then adds rows. `fresh` (b, s) is True at the first token of a sequence, where
h_{t-1} is zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, library

from glassformer.parts.mixer.chunked import as_operator
from glassformer.parts.mixer.installed import computed
from glassformer.parts.precision import exact, full_precision
from glassformer.parts.region import region

CHUNK = 8
"""Number of tokens whose states are recomputed together in the backward pass; one state of each chunk is kept
(docs/log.md)."""
VALUES_PER_BLOCK = 1 << 22
QUERIES_PER_BLOCK = 128


def naive_scan(
    u: Float[Tensor, "b s c"],
    dt: Float[Tensor, "b s c"],
    a: Float[Tensor, "p c"],
    b: Float[Tensor, "b s p"],
    c: Float[Tensor, "b s p"],
    h: Float[Tensor, "b p c"],
    fresh: Bool[Tensor, "#b s"] | None = None,
) -> tuple[Float[Tensor, "b s c"], Float[Tensor, "b p c"]]:
    """Returns (y, last state) of the selective scan by its definition, token by token."""
    ys = []
    for t in range(u.shape[1]):
        decay = torch.exp(dt[:, t, None] * a)
        if fresh is not None:
            decay = torch.where(fresh[:, t, None, None], 0.0, decay)
        h = decay * h + (dt[:, t] * u[:, t])[:, None] * b[:, t, :, None]
        ys.append((c[:, t, :, None] * h).sum(1))
    return torch.stack(ys, dim=1), h


def selective_scan(
    u: Float[Tensor, "b s c"],
    dt: Float[Tensor, "b s c"],
    a: Float[Tensor, "p c"],
    b: Float[Tensor, "b s p"],
    c: Float[Tensor, "b s p"],
    h: Float[Tensor, "b p c"] | None = None,
    fresh: Bool[Tensor, "#b s"] | None = None,
) -> tuple[Float[Tensor, "b s c"], Float[Tensor, "b p c"]]:
    """Returns (y, last state), the result of `naive_scan`, from the state h, or from zero without h; keeps one state in
    `CHUNK` for the backward pass, which recomputes the others.

    Nothing is divided by a product of decays, and every exponent is dt A <= 0 of one token: no length overflows. Tokens
    follow one another in a loop of small steps, which suits a CPU; on a GPU each is several launches, and an installed
    kernel may compute the scan from zero (`installed.py`), if no gradient is recorded, because its last state has no
    gradient."""
    if h is None and not torch.is_grad_enabled():
        theirs = _theirs(u, dt, a, b, c, fresh)
        if theirs is not None:
            return theirs
    return _ours(u, dt, a, b, c, h, fresh)


def scan_from_zero(
    u: Float[Tensor, "b s c"],
    dt: Float[Tensor, "b s c"],
    a: Float[Tensor, "p c"],
    b: Float[Tensor, "b s p"],
    c: Float[Tensor, "b s p"],
    fresh: Bool[Tensor, "#b s"] | None = None,
) -> Float[Tensor, "b s c"]:
    """Returns y of `selective_scan` from a state of zero, without the last state; an installed GPU kernel may compute
    it, with gradients too."""
    theirs = _theirs(u, dt, a, b, c, fresh)
    return (_ours(u, dt, a, b, c, None, fresh) if theirs is None else theirs)[0]


def _theirs(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, fresh: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    if u.shape[1] == 1:
        return None
    return computed("selective_scan", _ours, u=u, dt=dt, a=a, b=b, c=c, h=None, fresh=fresh)


def _ours(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, h: Tensor | None = None, fresh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if h is None:
        h = a.new_zeros(len(u), *a.shape)
    if u.shape[1] == 1:
        return naive_scan(u, dt, a, b, c, h, fresh)
    keep = None if fresh is None else (~fresh).to(u.dtype).expand(u.shape[:2])
    y, states = (_operator if as_operator() else _scan)(dt, dt * u, a, b, c, h, keep)
    return y, states[-1]


def gated_scan(
    log_decay: Float[Tensor, "b s c"],
    x: Float[Tensor, "b s c"],
    h: Float[Tensor, "b c"] | None = None,
    fresh: Bool[Tensor, "#b s"] | None = None,
) -> tuple[Float[Tensor, "b s c"], Float[Tensor, "b c"]]:
    """Returns (all h, last h) of the recurrence h_t = exp(log_decay_t) h_{t-1} + x_t: a scan with one state per
    channel."""
    (b, s, c), one = x.shape, x.new_ones(len(x), x.shape[1], 1)
    h = x.new_zeros(b, c) if h is None else h
    keep = None if fresh is None else (~fresh).to(x.dtype).expand(b, s)
    if s == 1:
        decay = torch.exp(log_decay[:, 0])
        h = h * (decay if keep is None else decay * keep) + x[:, 0]
        return h[:, None], h
    y, states = (_operator if as_operator() else _scan)(-log_decay, x, -x.new_ones(1, c), one, one, h[:, None], keep)
    return y, states[-1, :, 0]


def _scan(
    dt: Tensor, x: Tensor, a: Tensor, b: Tensor, c: Tensor, h: Tensor, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (y, states) of the scan: the states before each chunk and after the last. `x` is dt u (b, s, c); `keep`
    is 0 at the first token of a sequence, else 1, or None for no such tokens."""
    ys, states = [], [h]
    with full_precision(dt):
        for at in _chunks(dt):
            y, h = _chunk(h, dt[:, at], x[:, at], a, b[:, at], c[:, at], None if keep is None else keep[:, at])
            ys.append(y)
            states.append(h)
    return torch.cat(ys, dim=1), torch.stack(states)


# one operator, so that a compiler of the model does not unroll the tokens into its graph
_operator = library.custom_op(
    "glassformer::selective_scan",
    _scan,
    mutates_args=(),
    schema="(Tensor dt, Tensor x, Tensor a, Tensor b, Tensor c, Tensor h, Tensor? keep) -> (Tensor, Tensor)",
)


@_operator.register_fake
def _(dt, x, a, b, c, h, keep=None):
    return torch.empty_like(dt), h.new_empty(len(_chunks(dt)) + 1, *h.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _scan_grad(ctx: Any, dy: Tensor | None, dstates: Tensor | None) -> tuple[Tensor | None, ...]:
    dt, x, a, b, c, h, keep, states = ctx.saved_tensors
    dy = torch.zeros_like(dt) if dy is None else dy
    g, da = torch.zeros_like(h), torch.zeros_like(h)
    parts: list[tuple[Tensor, ...]] = []
    with full_precision(dt):
        for i, at in reversed(list(enumerate(_chunks(dt)))):
            if dstates is not None:
                g = g + dstates[i + 1]
            kept = None if keep is None else keep[:, at]
            g, da, *of_inputs = _chunk_grad(
                g, da, states[i], dt[:, at], x[:, at], a, b[:, at], c[:, at], kept, dy[:, at]
            )
            parts.append(tuple(of_inputs))
    if dstates is not None:
        g = g + dstates[0]
    ddt, dx, db, dc = (torch.cat(pieces, dim=1) for pieces in zip(*reversed(parts), strict=True))
    return ddt, dx, da.sum(0), db, dc, g, None


_operator.register_autograd(_scan_grad, setup_context=_save)


def _chunks(dt: Tensor) -> list[slice]:
    return [slice(first, first + CHUNK) for first in range(0, dt.shape[1], CHUNK)]


@region
def _chunk(
    h: Tensor, dt: Tensor, x: Tensor, a: Tensor, b: Tensor, c: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns (y, h): the outputs of one chunk and the state after the chunk, from the state h before the chunk.
    Matmuls have one row, so that the whole loop fuses."""
    decay, given, ys = _decay(dt, a, keep), b[..., None] * x[:, :, None], []
    for t in range(dt.shape[1]):
        h = torch.addcmul(given[:, t], decay[:, t], h)
        ys.append(torch.matmul(c[:, t, None], h))
    return torch.cat(ys, dim=1), h


@region
def _chunk_grad(
    g: Tensor, da: Tensor, h: Tensor, dt: Tensor, x: Tensor, a: Tensor, b: Tensor, c: Tensor,
    keep: Tensor | None, dy: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Returns the gradients for one chunk: of the state h before it; `da` (b, p, c) with the chunk's share added; and
    of dt, x, b and c. `g` is the gradient of the state after the chunk."""
    decay, given, states = _decay(dt, a, keep), b[..., None] * x[:, :, None], [h]
    for t in range(dt.shape[1]):
        states.append(torch.addcmul(given[:, t], decay[:, t], states[t]))
    ddt, dx, db, dc = [], [], [], []
    for t in reversed(range(dt.shape[1])):
        g = torch.addcmul(g, c[:, t, :, None], dy[:, t, None])
        dc.append(torch.matmul(states[t + 1], dy[:, t, :, None]))
        db.append(torch.matmul(g, x[:, t, :, None]))
        dx.append(torch.matmul(b[:, t, None], g))
        g = g * decay[:, t]
        moved = g * states[t]  # gradient of dt A
        ddt.append((moved * a).sum(1, keepdim=True))
        da = torch.addcmul(da, moved, dt[:, t, None])
    rows = [torch.cat(pieces[::-1], dim=1) for pieces in (ddt, dx)]
    return g, da, *rows, *(torch.cat(pieces[::-1], dim=2).transpose(1, 2) for pieces in (db, dc))


def _decay(dt: Tensor, a: Tensor, keep: Tensor | None) -> Tensor:
    """Returns the decay of each state at each token, exp(dt A) (b, s, p, c); 0 for the first token of a sequence."""
    decay = torch.exp(dt[:, :, None] * a)
    return decay if keep is None else decay * keep[:, :, None, None]


# States and effective attention, which the scan never stores


@torch.no_grad()
def states(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, h: Tensor, fresh: Tensor | None = None
) -> Iterator[tuple[int, Float[Tensor, "b r c p"]]]:
    """Yields (first position, states h_t of the r positions from there, (b, r, c, p)), in bounded memory."""
    rows = max(1, VALUES_PER_BLOCK // h.numel())
    for first in range(0, u.shape[1], rows):
        made = []
        for t in range(first, min(first + rows, u.shape[1])):
            at = slice(t, t + 1)
            _, h = naive_scan(u[:, at], dt[:, at], a, b[:, at], b[:, at], h, None if fresh is None else fresh[:, at])
            made.append(h)
        yield first, torch.stack(made, dim=1).transpose(2, 3)


@torch.no_grad()
def effective_attention(
    dt: Float[Tensor, "b s c"],
    a: Float[Tensor, "p c"],
    b: Float[Tensor, "b s p"],
    c: Float[Tensor, "b s p"],
    age: Tensor | None = None,
) -> Iterator[tuple[int, Float[Tensor, "b c r s"]]]:
    """Yields (first query, block of r queries of the map) with y_t = sum_j map[t, j] u_j for a scan from zero:

        map_c[t, j] = sum_p C_t exp(A (dt_{j+1} + ... + dt_t)) dt_j B_j  for j <= t, else 0

    Ali et al. 2024, 2403.01590. `age` (b or 1, s): number of earlier tokens in each token's sequence; tokens before
    that sequence have weight 0. The decay over a distance is the product of those up to and from the block's start, so
    every exponent stays <= 0 and the keys before the block take one matmul. Memory: one block."""
    batch, s, channels = dt.shape
    place = torch.arange(s, device=dt.device)
    begins = (place - (place if age is None else age)).expand(batch, s)  # first token that each one attends to
    clock = exact(dt).cumsum(1).transpose(1, 2)  # (b, c, s): differences are exponents of decays
    rate, source = a.t()[:, None], (dt[..., None] * b[:, :, None]).transpose(1, 2)  # (c, 1, p), (b, c, s, p)
    rows = min(QUERIES_PER_BLOCK, max(1, VALUES_PER_BLOCK // (batch * channels * s)))
    for first in range(0, s, rows):
        at, last = slice(first, first + rows), min(first + rows, s)
        now = clock[:, :, at]
        block = dt.new_zeros(batch, channels, last - first, s)
        if first:
            before = clock[:, :, first - 1, None]
            since = torch.exp((now - before).to(dt)[..., None] * rate) * c[:, None, at]  # (b, c, r, p)
            until = torch.exp((before - clock[:, :, :first]).to(dt)[..., None] * rate) * source[:, :, :first]
            block[..., :first] = torch.matmul(since, until.transpose(2, 3))
        gap = (now[..., None] - now[:, :, None]).to(dt).clamp(min=0)  # (b, c, r, r)
        for state in range(a.shape[0]):
            decay = torch.exp(gap * rate[..., state, None])
            block[..., first:last] += c[:, None, at, None, state] * decay * source[:, :, None, at, state]
        seen = (place <= place[at, None]) & (place >= begins[:, at, None])  # (b, r, s)
        yield first, block.where(seen[:, None], 0.0)
