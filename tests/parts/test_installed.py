"""Kernels of libraries behind our recurrences. No GPU here: modules of the libraries' names compute by their documented
formulas, in their layouts and scales, token by token, on the CPU; tests of the real ones run if they are installed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import metadata
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import glassformer as gf
from glassformer.parts.mixer import installed
from glassformer.parts.mixer.chunked import CHUNK, chunked_linear_attention, state_space_dual
from glassformer.parts.mixer.delta import delta_rule
from glassformer.parts.mixer.scan import scan_from_zero, selective_scan

# What the libraries say of their functions


def selective_scan_fn(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, return_last_state: bool = False
) -> tuple[Tensor, Tensor]:
    """mamba_ssm: u, delta (B D L), A (D N), B, C (B N L); the last state (B D N) has no gradient."""
    x, ys = u.new_zeros(*u.shape[:2], A.shape[1]), []
    for i in range(u.shape[2]):
        x = torch.exp(delta[:, :, i, None] * A) * x + (delta[:, :, i] * u[:, :, i])[..., None] * B[:, None, :, i]
        ys.append((x * C[:, None, :, i]).sum(-1))
    assert return_last_state
    return torch.stack(ys, -1), x.detach()


def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, *,
    initial_states: Tensor | None = None, seq_idx: Tensor | None = None, return_final_states: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """mamba_ssm: x (b l h p), dt (b l h), A (h), B, C (b l g n), states (b h p n), seq_idx (b l) int32."""
    assert chunk_size & (chunk_size - 1) == 0 and return_final_states
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.shape == dt.shape[:2])
    b, c = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (B, C))
    h = x.new_zeros(*x[:, 0].shape, B.shape[3]) if initial_states is None else initial_states
    ys, before = [], torch.zeros(len(x), dtype=torch.int32)
    for t in range(x.shape[1]):
        h = h * torch.exp(dt[:, t] * A)[..., None, None]
        if seq_idx is not None:
            h, before = h * (seq_idx[:, t] == before)[:, None, None, None], seq_idx[:, t]
        h = h + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        ys.append((h * c[:, t, :, None]).sum(-1))
    return torch.stack(ys, 1), h


def by_sequence(
    step: Callable[..., tuple[Tensor, Tensor]], state: Tensor | None, cu_seqlens: Tensor | None, *given: Tensor
) -> tuple[Tensor, Tensor]:
    """fla: with cu_seqlens, one row of sequences one after the other, and a state (N H K V) for each."""
    if cu_seqlens is None:
        return step(state, *given)
    assert all(len(x) == 1 for x in given) and (state is None or len(state) == len(cu_seqlens) - 1)
    assert cu_seqlens[0] == 0 and cu_seqlens[-1] == given[0].shape[1]
    made = [
        step(None if state is None else state[i : i + 1], *(x[:, a:b] for x in given))
        for i, (a, b) in enumerate(pairwise(cu_seqlens.tolist()))
    ]
    return torch.cat([y for y, _ in made], 1), torch.cat([h for _, h in made])


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """fla: q, k [B T H K], v [B T H V], g [B T H], the default scale 1 / sqrt(K)."""
    assert q.shape[:3] == v.shape[:3] and output_final_state
    scale = k.shape[-1] ** -0.5 if scale is None else scale

    def step(h: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        h, ys = k.new_zeros(*k[:, 0].shape, v.shape[-1]) if h is None else h, []
        for t in range(q.shape[1]):
            h = h * g[:, t].exp()[..., None, None] + k[:, t, :, :, None] * v[:, t, :, None]
            ys.append((scale * q[:, t, :, :, None] * h).sum(-2))
        return torch.stack(ys, 1), h

    return by_sequence(step, initial_state, cu_seqlens, q, k, v, v.new_zeros(v.shape[:3]) if g is None else g)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """fla: q, k [B T H K], v [B T HV V], g (a logarithm) and beta [B T HV], the scale as above."""
    assert v.shape[2] % q.shape[2] == 0 and output_final_state
    scale, r = k.shape[-1] ** -0.5 if scale is None else scale, v.shape[2] // q.shape[2]

    def step(h: Tensor | None, *given: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = given
        q, k = (x.repeat_interleave(r, 2) for x in (q, k))
        h, ys = v.new_zeros(*k[:, 0].shape, v.shape[-1]) if h is None else h, []
        for t in range(q.shape[1]):
            h = h * g[:, t].exp()[..., None, None]
            new = (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], h)) * beta[:, t, :, None]
            h = h + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
            ys.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], h))
        return torch.stack(ys, 1), h

    return by_sequence(step, initial_state, cu_seqlens, q, k, v, g, beta)


FUNCTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "selective_scan": ("mamba_ssm.ops.selective_scan_interface", selective_scan_fn),
    "state_space_dual": ("mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined),
    "linear_attention": ("fla.ops.simple_gla", chunk_simple_gla),
    "delta_rule": ("fla.ops.gated_delta_rule", chunk_gated_delta_rule),
}
OPERATIONS = tuple(FUNCTIONS)
Put = Callable[..., list[int]]


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """put(operation, bent): the library's module with its function, which `bent` changes; its calls are counted. What
    libraries may compute is what is put there, on the CPU, after trials of a few tokens."""
    monkeypatch.setattr(installed, "DEVICES", {"cpu"})
    monkeypatch.setattr(installed, "_tried", set())
    monkeypatch.setattr(installed, "_refused", set())
    there: dict[str, str] = {}
    monkeypatch.setattr(installed, "_version", there.get)
    few = {name: replace(theirs, tokens=23) for name, theirs in installed.KERNELS.items()}
    monkeypatch.setattr(installed, "KERNELS", few)

    def one(operation: str, bent: Callable[[Any], Any] = lambda made: made) -> list[int]:
        path, function = FUNCTIONS[operation]
        calls: list[int] = []

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(args[0].shape[0])
            return bent(function(*args, **kwargs))

        steps = path.split(".")
        for i in range(1, len(steps) + 1):
            name = ".".join(steps[:i])
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
        monkeypatch.setattr(sys.modules[path], function.__name__, counted, raising=False)
        there[few[operation].package] = "9.9"
        return calls

    yield one


def called(
    operation: str, state: bool = False, cut: bool = False, s: int = 31, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Returns y, the last state if any, and the gradients of all arguments, of a call of our operation."""
    draw = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=dtype)

    def step(*shape: int) -> Tensor:
        return (normal(*shape) / 2).exp() / 4

    b, g, n, wide, h = 2, 2, 4, 5, 3
    fresh = torch.rand(b, s, generator=draw) < 0.15 if cut else None
    given: dict[str, Tensor] = {
        "selective_scan": lambda: {
            "u": normal(b, s, n), "dt": step(b, s, n), "a": -step(wide, n), "b": normal(b, s, wide),
            "c": normal(b, s, wide), **({"h": normal(b, wide, n)} if state else {}),
        },
        "state_space_dual": lambda: {
            "u": normal(b, s, n, h), "dt": step(b, s, n), "a": -step(n), "b": normal(b, s, g, wide),
            "c": normal(b, s, g, wide), **({"state": normal(b, n, wide, h)} if state else {}),
        },
        "linear_attention": lambda: {
            "q": normal(b, s, g, wide), "k": normal(b, s, g, wide), "v": normal(b, s, n, h),
            "log_decay": -step(n) if cut else -step(b, s, n), **({"state": normal(b, n, wide, h)} if state else {}),
        },
        "delta_rule": lambda: {
            "q": normal(b, s, g, wide), "k": torch.nn.functional.normalize(normal(b, s, g, wide), dim=-1),
            "v": normal(b, s, n, h), "beta": normal(b, s, n).sigmoid(), "log_decay": -step(b, s, n),
            **({"state": normal(b, n, wide, h)} if state else {}),
        },
    }[operation]()  # fmt: skip
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    if operation == "selective_scan" and not state:
        outputs = [scan_from_zero(**leaves, fresh=fresh)]
    else:
        outputs = list(
            {
                "selective_scan": selective_scan, "state_space_dual": state_space_dual,
                "linear_attention": chunked_linear_attention, "delta_rule": delta_rule,
            }[operation](**leaves, fresh=fresh)
        )  # fmt: skip
    loss = torch.stack([out.sin().sum() for out in outputs]).sum()
    return [*outputs, *torch.autograd.grad(loss, list(leaves.values()))]


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("state", [False, True], ids=["", "state"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_library_kernel_equals_our_operation(operation: str, state: bool, cut: bool, put: Put):
    """By its own formula, in outputs, states and gradients; tried once, then called once each."""
    wanted = called(operation, state, cut)
    calls = put(operation)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = called(operation, state, cut)
        called(operation, state, cut)
    same(found, wanted)
    serves = operation != "selective_scan" or not (state or cut)
    assert len(calls) == (3 if serves else 0)


def test_a_prompt_is_scanned_from_zero(put: Put):
    """The library's scan also gives the state after a prompt, without gradient, so it serves only if no gradient is
    recorded."""
    draw = torch.Generator().manual_seed(0)
    u, dt, b, c = (torch.randn(2, 19, width, generator=draw) for width in (4, 4, 3, 3))
    given = u, dt.exp(), -torch.ones(3, 4), b, c
    wanted = selective_scan(*given)
    calls = put("selective_scan")
    assert torch.equal(selective_scan(*given)[1], wanted[1]) and not calls
    with torch.inference_mode():
        same(list(selective_scan(*given)), list(wanted))
    assert len(calls) == 2


BENT: dict[str, Callable[[tuple[Tensor, Tensor]], Any]] = {
    "scale": lambda made: (made[0] * 1.02, made[1]),
    "state": lambda made: (made[0], made[1].mT if made[1].shape[-1] == made[1].shape[-2] else made[1] * 1.1),
    "gradient": lambda made: (made[0].detach() + 0.5 * (made[0] - made[0].detach()), made[1]),
    "nan": lambda made: (made[0] * torch.nan, made[1]),
    "shape": lambda made: (made[0][..., :1], made[1]),
}


@pytest.mark.parametrize("fault", BENT)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_deviating_library_is_named_and_not_used(operation: str, fault: str, put: Put):
    wanted = called(operation)
    calls = put(operation, BENT[fault])
    package = installed.KERNELS[operation].package
    said = rf"{package} 9\.9 is not used for {operation} on cpu"
    said += "" if fault == "shape" else r".* deviates by \S+ of it; 0\.005 is allowed"
    with pytest.warns(UserWarning, match=said):
        found = called(operation)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = called(operation)
    for one in (found, again):
        assert all(torch.equal(x, y) for x, y in zip(one, wanted, strict=True))
    assert len(calls) == 1


@pytest.mark.parametrize("operation", OPERATIONS)
def test_failing_library_is_named_and_not_used(operation: str, put: Put):
    def fail(made: Any) -> Any:
        raise RuntimeError("selective_scan_cuda is not installed")

    wanted = called(operation)
    calls = put(operation, fail)
    with pytest.warns(UserWarning, match=r"9\.9 is not used .* selective_scan_cuda is not installed"):
        found = called(operation)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True)) and len(calls) == 1


def test_out_of_memory_in_a_library_is_raised_unchanged(put: Put):
    def fail(made: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    put("delta_rule", fail)
    with pytest.raises(torch.OutOfMemoryError):
        called("delta_rule")


def test_library_is_called_only_if_permitted(put: Put, monkeypatch: pytest.MonkeyPatch):
    """Not in fp64, which it has not, nor where the user does not want it, nor where sums are to have one order, nor on
    another device."""
    calls = put("linear_attention")
    called("linear_attention", dtype=torch.float64)
    with monkeypatch.context() as without:
        without.setenv(installed.SWITCH, "0")
        called("linear_attention")
    try:
        torch.use_deterministic_algorithms(True)
        called("linear_attention")
    finally:
        torch.use_deterministic_algorithms(False)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(installed, "DEVICES", {"cuda"})
        called("linear_attention")
    called("linear_attention", s=1)
    assert not calls
    called("linear_attention")
    assert len(calls) == 2


def test_new_sizes_are_tried_again(put: Put):
    calls = put("delta_rule")
    for s in (31, 12):
        called("delta_rule", s=s)
    assert len(calls) == 3
    called("delta_rule", state=True)
    assert len(calls) == 5


def test_a_pass_that_is_computed_again_may_be_the_first(put: Put):
    """The trial happens only in the first pass, and saves no tensor there that the second pass lacks."""
    calls, q = put("linear_attention"), torch.randn(1, 12, 2, 3, requires_grad=True)
    y = checkpoint(lambda x: chunked_linear_attention(x, x, x)[0], q, use_reentrant=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = torch.autograd.grad(y.sum(), q)
    (wanted,) = torch.autograd.grad(chunked_linear_attention(q, q, q, chunk=CHUNK)[0].sum(), q)
    same([found], [wanted])
    assert len(calls) == 3


@pytest.mark.parametrize("word", ["mamba", "mamba2", "gated_deltanet", "linear_attention", "retention"])
def test_models_call_them(word: str, put: Put):
    """Models call the libraries in training and for a prompt, whose state continues, and in packed rows if the library
    supports them."""
    model = gf.preset(f"llama@1m+layers=2+d_model=32+heads=4+vocab_size=61+context=64+{word}").build(seed=0)
    tokens = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([1] * 7 + [2] * 13).expand(2, -1)

    def run() -> list[Tensor]:
        state = model.init_state(2, 32)
        with torch.no_grad():
            read = [model(tokens, state), model(tokens[:, :1], state)]
            read.append(model(tokens, documents=documents))
        loss = model.loss(tokens, tokens.roll(-1, 1))
        return [*read, *torch.autograd.grad(loss, list(model.parameters()))]

    wanted = run()
    calls = {operation: put(operation) for operation in OPERATIONS}
    same(run(), wanted)
    own = {"mamba": "selective_scan", "mamba2": "state_space_dual", "gated_deltanet": "delta_rule"}
    assert {name for name, made in calls.items() if made} == {own.get(word, "linear_attention")}


def there(package: str) -> bool:
    try:
        return bool(metadata.version(package)) and torch.cuda.is_available()
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("state", [False, True], ids=["", "state"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_installed_libraries_equal_our_operations(operation: str, state: bool, cut: bool):
    """The trial passes on a GPU with the package installed, for sizes that models have."""
    theirs = installed.KERNELS[operation]
    if not there(theirs.package):
        pytest.skip(f"needs a GPU and {theirs.package}")
    ours: dict[str, Any] = {
        "state_space_dual": partial(state_space_dual, chunk=CHUNK), "delta_rule": partial(delta_rule, chunk=CHUNK),
        "linear_attention": partial(chunked_linear_attention, chunk=CHUNK), "selective_scan": selective_scan,
    }  # fmt: skip
    b, s, g, n, wide, h = 2, 4, 2, 4, 64, 64
    sizes: dict[str, dict[str, tuple[int, ...]]] = {
        "selective_scan": {"u": (b, s, h), "dt": (b, s, h), "a": (16, h), "b": (b, s, 16), "c": (b, s, 16)},
        "state_space_dual": {"u": (b, s, n, h), "dt": (b, s, n), "a": (n,), "b": (b, s, g, wide), "c": (b, s, g, wide)},
        "linear_attention": {"q": (b, s, g, wide), "k": (b, s, g, wide), "v": (b, s, n, h), "log_decay": (b, s, n)},
        "delta_rule": {
            "q": (b, s, g, wide), "k": (b, s, g, wide), "v": (b, s, n, h), "beta": (b, s, n), "log_decay": (b, s, n),
        },
    }  # fmt: skip
    given: dict[str, Tensor | None] = {key: torch.empty(size, device="cuda") for key, size in sizes[operation].items()}
    held = "h" if operation == "selective_scan" else "state"
    given[held] = torch.empty(b, n, wide, h, device="cuda") if state else None
    given["fresh"] = torch.zeros(b, s, dtype=torch.bool, device="cuda") if cut else None
    if not theirs.serves(given):
        pytest.skip("no call of the library's")
    installed._try(theirs, ours[operation], given)
