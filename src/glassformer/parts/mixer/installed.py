"""Kernels of installed libraries that compute a recurrence on a GPU: flash-linear-attention (`fla-core`) and
`mamba-ssm`.

`KERNELS` has the adapters: arguments and outputs are those of an operation of this package, in its layout and scale. No
kernel is trusted: before the first call of a kind (device, sizes, with or without a state, with or without borders) it
computes a small random input, and its outputs and gradients must equal those of this package's twin (`TOLERANCE`). A
kernel that deviates or fails is named in a warning, with the package, its version and the deviation, and this process
computes that operation by the twin from then on. The kernels' fp32 matmuls have 10 bits (TF32) on GPUs with such
matmuls.

The twin also computes calls that a kernel does not support, calls in torch's deterministic mode (the kernels' backward
passes add up in any order), calls under a compiler, for which the twin is one operator, and all calls with
GLASSFORMER_KERNELS=0.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from glassformer.errors import shown
from glassformer.parts.precision import full_precision

SWITCH = "GLASSFORMER_KERNELS"
"""Environment variable; 0 disables the kernels of libraries."""
DEVICES = {"cuda"}
"""Types of devices on which the kernels of libraries run."""
TOLERANCE = {torch.float32: 5e-3}
"""Mapping {dtype of the inputs: largest allowed deviation |library - twin| / |twin| (Euclidean norm) of an output or a
gradient}: the bound of fla's own tests, and ten times the rounding of TF32. A wrong scale or layout deviates by a tenth
and more."""
DUAL_CHUNK = 256
"""Number of tokens in a chunk of `mamba_chunk_scan_combined`: the value in mamba-ssm's own module."""

Given = Mapping[str, Tensor | None]
"""Mapping {name of an argument of an operation: its tensor, or None}."""
Outputs = tuple[Tensor, Tensor]
"""Tuple of the results of an operation: y (b, s, ...) and the last state (b, ...)."""


@dataclass(frozen=True)
class Theirs:
    """Function of an installed library that computes an operation of this package, with facts about it; it takes the
    operation's arguments."""

    package: str
    """Name of the installed distribution (package) that contains the function."""
    call: Callable[..., Outputs]
    tokens: int
    """Number of tokens in a trial: a few chunks of the function, the last one not full."""
    serves: Callable[[Given], bool] = lambda given: True
    state_learns: bool = True
    """True if the function computes the gradient of the last state."""


def computed(name: str, ours: Callable[..., Outputs], **given: Tensor | None) -> Outputs | None:
    """Returns the result of the operation `name` for the arguments `given`, computed by a library; None if no library
    serves them, so that the caller computes the operation by `ours`, the twin. The first call of a kind compares the
    library with `ours` on samples of the arguments; `ours` must not call `computed`."""
    if torch.compiler.is_compiling() or not _may(given):
        return None
    theirs, device = KERNELS[name], _first(given).device
    if (name, device) in _refused or _version(theirs.package) is None or not theirs.serves(given):
        return None
    kind = name, device, *((key, None if x is None else _sizes(key, x)) for key, x in given.items())
    if kind not in _tried:
        try:
            _try(theirs, ours, given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _refused.add((name, device))
            about = f"{theirs.package} {_version(theirs.package)} is not used for {name} on {device}"
            warnings.warn(f"{about}, which is computed by our own from here on: {shown(error, 200)}")
            return None
        _tried.add(kind)
    with full_precision(_first(given)):  # errors pass: torch's checkpoints end a pass by one
        return theirs.call(**given)


_tried: set[tuple[Any, ...]] = set()
"""Kinds of calls (operation, device, sizes of the arguments) whose trial has succeeded, so that the library computes
them."""
_refused: set[tuple[str, torch.device]] = set()


class Deviation(Exception):
    """Error of a trial: the result of a library deviates from that of this package's twin."""


@cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _may(given: Given) -> bool:
    """Returns True if a library may compute a call with these arguments: they are on a GPU of a type in `DEVICES` and
    have a dtype with a tolerance, deterministic mode is off, and the environment variable allows libraries."""
    floats = [x for x in given.values() if x is not None and x.is_floating_point()]
    return (
        floats[0].device.type in DEVICES
        and all(x.dtype in TOLERANCE and not isinstance(x, FakeTensor) for x in floats)
        and not torch.are_deterministic_algorithms_enabled()
        and os.environ.get(SWITCH) != "0"
    )


def _first(given: Given) -> Tensor:
    return next(x for x in given.values() if x is not None)


# Trials

STATES = ("state", "h")
DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "k": lambda x: F.normalize(x, dim=-1),
    "beta": torch.sigmoid,
    "dt": lambda x: x.exp() / 4,
    "a": lambda x: -x.exp(),
    "log_decay": lambda x: -(x - 2).exp(),
    "fresh": lambda x: _borders(x > 2),
}
"""Mapping {name of an argument: function that makes its samples from normal numbers}, for arguments that are not
normally distributed: keys of length one, decays from almost 0 to almost 1, marks of first tokens about every forty
tokens."""


def _borders(x: Tensor) -> Tensor:
    """Changes random marks of first tokens x (rows, tokens) in place, and returns them: the first row then starts a
    sequence at its first token, and the second row does not, so that it uses its initial state."""
    x[:, 0] = torch.arange(len(x)) == 0
    return x


def _sizes(key: str, x: Tensor) -> tuple[int, ...]:
    """Returns the sizes of an operation's argument `key` that do not depend on the number of rows and tokens."""
    if _of_model(key, x):
        return tuple(x.shape)
    return tuple(x.shape[1 if key in STATES else 2 :])


def _of_model(key: str, x: Tensor) -> bool:
    """Returns True if the argument `key` of an operation has neither rows nor tokens, because it is a weight of the
    model."""
    return key == "a" or x.dim() == 1


def _sample(key: str, x: Tensor, tokens: int, generator: torch.Generator) -> Tensor:
    """Returns a random tensor like the argument x, but with two rows of `tokens` tokens."""
    rows = () if _of_model(key, x) else (2,) if key in STATES else (2, tokens)
    drawn = torch.randn(*rows, *_sizes(key, x), generator=generator)
    made = DRAWN.get(key, lambda x: x)(drawn)
    return made.to(x.device, x.dtype).requires_grad_(x.is_floating_point())


def _try(theirs: Theirs, ours: Callable[..., Outputs], given: Given) -> None:
    """Raises Deviation if outputs or gradients of the library's function differ from those of the twin `ours` on random
    samples of the arguments, or an error of the library."""
    generator = torch.Generator().manual_seed(0)
    # without hooks, because those of an outer checkpoint would count tensors that its second pass does not keep
    alone = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), full_precision(_first(given)), alone:
        sample = {
            key: None if x is None else _sample(key, x, theirs.tokens, generator) for key, x in given.items()
        }  # fmt: skip
        learned = {key: x for key, x in sample.items() if x is not None and x.requires_grad}
        weights: list[Tensor] = []
        results = []
        for call in (ours, theirs.call):
            found = call(**sample)
            weights = weights or [torch.randn(x.shape, generator=generator).to(x) for x in found]
            both = list(zip(found, weights, strict=True))
            loss = torch.stack([(x * w).sum() for x, w in both[: 1 + theirs.state_learns]]).sum()
            gradients = torch.autograd.grad(loss, list(learned.values()))
            results.append([*found, *gradients])
    names = ["y", "the last state", *(f"the gradient of {key}" for key in learned)]
    off = {name: _deviation(mine, other) for name, mine, other in zip(names, *results, strict=True)}
    worst = max(off, key=lambda name: off[name])
    if not off[worst] <= TOLERANCE[_first(given).dtype]:
        raise Deviation(f"{worst} deviates by {off[worst]:.2g} of it; {TOLERANCE[_first(given).dtype]:g} is allowed")


def _deviation(ours: Tensor, theirs: Tensor) -> float:
    """Returns the relative deviation |theirs - ours| / |ours| of two tensors; infinity if `theirs` has another shape or
    values that are not finite."""
    ours, theirs = ours.detach(), theirs.detach()
    if ours.shape != theirs.shape or not bool(torch.isfinite(theirs).all()):
        return float("inf")
    return float((theirs - ours).norm() / ours.norm().clamp(min=torch.finfo(ours.dtype).tiny))


# Adapters


def _selective_scan(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, h: Tensor | None = None, fresh: Tensor | None = None
) -> Outputs:
    """Returns (y, last state) as `scan.selective_scan`, computed by mamba-ssm's `selective_scan_fn(u, delta, A, B, C)`,
    which has channels before tokens, A (c, p) and states (b, c, p), and starts from a state of zero."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn  # type: ignore[import-not-found]

    by_channel = (x.transpose(1, 2).contiguous() for x in (u, dt))
    by_state = (x.transpose(1, 2).contiguous() for x in (b, c))
    y, last = selective_scan_fn(*by_channel, a.t().contiguous(), *by_state, return_last_state=True)
    return y.transpose(1, 2), last.transpose(1, 2)


def _state_space_dual(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None, fresh: Tensor | None
) -> Outputs:
    """Returns (y, last state) as `chunked.state_space_dual`, computed by mamba-ssm's `mamba_chunk_scan_combined(x, dt,
    A, B, C, chunk_size)`, which has states (b, n, h, p). Tokens with equal `seq_idx` are one sequence; the initial
    state belongs to `seq_idx` 0."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined  # type: ignore[import-not-found]

    y, last = mamba_chunk_scan_combined(
        u, dt, a, b, c, DUAL_CHUNK,
        initial_states=None if state is None else state.mT.contiguous(),
        seq_idx=None if fresh is None else fresh.expand(u.shape[:2]).cumsum(1).int().contiguous(),
        return_final_states=True,
    )  # fmt: skip
    return y, last.mT


def _linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None, fresh: Tensor | None
) -> Outputs:
    """Returns (y, last state) as `chunked.chunked_linear_attention`, computed by fla's `chunk_simple_gla(q, k, v, g,
    scale=)`, the function behind fla's retention; it needs equally many heads of q, k and v, and a decay per token."""
    from fla.ops.simple_gla import chunk_simple_gla  # type: ignore[import-not-found]

    n = v.shape[2]
    q, k = (x.repeat_interleave(n // x.shape[2], dim=2) for x in (q, k))
    decays = () if log_decay is None else (log_decay.expand(v.shape[:3]),)

    def run(state: Tensor | None, borders: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *g: Tensor) -> Outputs:
        return chunk_simple_gla(
            q, k, v, *g, scale=1.0, initial_state=state, output_final_state=True, cu_seqlens=borders
        )

    return _by_sequence(run, state, fresh, q, k, v, *decays)


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor | None, fresh: Tensor | None
) -> Outputs:
    """Returns (y, last state) as `delta.delta_rule`, computed by fla's `chunk_gated_delta_rule(q, k, v, g, beta,
    scale)`."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

    def run(
        state: Tensor | None, borders: Tensor | None, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor
    ) -> Outputs:
        return chunk_gated_delta_rule(
            q, k, v, g=g, beta=beta, scale=1.0, initial_state=state, output_final_state=True, cu_seqlens=borders
        )

    return _by_sequence(run, state, fresh, q, k, v, beta, log_decay)


def _by_sequence(run: Callable[..., Outputs], state: Tensor | None, fresh: Tensor | None, *by_token: Tensor) -> Outputs:
    """Returns (y, last state) from run(state, borders, *by_token), where `run` calls a function of fla for rows with
    several sequences: all tokens are passed in one row, with the indices of the starts of sequences and of the end, and
    one state per sequence."""
    if fresh is None:
        return run(state, None, *by_token)
    b, s = by_token[0].shape[:2]
    begins = fresh.expand(b, s).clone()
    anew = begins[:, 0].clone()
    begins[:, 0] = True
    starts = begins.flatten().nonzero()[:, 0]
    sequence = begins.flatten().cumsum(0).view(b, s) - 1
    if state is not None:
        kept = state.masked_fill(anew.view(b, *[1] * (state.dim() - 1)), 0.0)
        state = state.new_zeros(len(starts), *state.shape[1:]).index_copy(0, sequence[:, 0], kept)
    borders = torch.cat([starts, starts.new_tensor([b * s])])
    y, last = run(state, borders, *(x.flatten(0, 1)[None] for x in by_token))
    return y[0].unflatten(0, (b, s)), last[sequence[:, -1]]


KERNELS = {
    "selective_scan": Theirs(
        "mamba-ssm", _selective_scan, 2100,
        lambda given: given["h"] is None and given["fresh"] is None, state_learns=False,
    ),
    "state_space_dual": Theirs("mamba-ssm", _state_space_dual, 600),
    "linear_attention": Theirs("fla-core", _linear_attention, 150),
    "delta_rule": Theirs("fla-core", _delta_rule, 150),
}  # fmt: skip
"""Mapping {operation: function of a library that computes it}, for `scan.selective_scan`, `chunked.state_space_dual`,
`chunked.chunked_linear_attention` and `delta.delta_rule`. mamba-ssm's scan processes at most 2,048 tokens at once."""
