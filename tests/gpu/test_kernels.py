"""Every kernel on a GPU is the definition in fp64, in outputs and gradients, and `auto` takes the ones it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel import AttentionCall, Auto, Banded, Direct, Flex, Kernel, Naive, ScoreBias, Sdpa, softcap
from glassformer.parts.position import Alibi
from glassformer.parts.visibility import Bidirectional, Causal, SameDocument, SlidingWindow
from glassformer.parts.visibility.bigbird import BigBird
from glassformer.parts.visibility.chunked import Chunked
from glassformer.parts.visibility.dilated import Dilated
from glassformer.parts.visibility.longformer import Longformer
from glassformer.parts.visibility.prefix import Prefix
from tests import gpu as gpu
from tests.parts.test_kernel_calls import RADIUS, relative

KERNELS: dict[str, Kernel] = {
    "naive": Naive(),
    "sdpa": Sdpa(),
    "banded": Banded(),
    "direct": Direct(),
    "flex": Flex(),
    "auto": Auto(),
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}
"""|mine - theirs| / |theirs|."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(t: int) -> Tensor:
    return torch.randint(0, 4, (2, t), generator=torch.Generator().manual_seed(4)).sort(dim=1).values


CALLS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "causal": lambda s, t: {"visibility": Causal()},
    "all": lambda s, t: {"visibility": Bidirectional()},
    "window": lambda s, t: {"visibility": SlidingWindow(40)},
    "documents": lambda s, t: {"visibility": SameDocument(Causal(), ids(t))},
    "bidirectional documents": lambda s, t: {"visibility": SameDocument(Bidirectional(), ids(t))},
    "alibi": lambda s, t: {"visibility": Causal(), "bias": "alibi"},
    "softcap": lambda s, t: {"visibility": Causal(), "bias": softcap(2.0)},
    "softcap in a window": lambda s, t: {"visibility": SlidingWindow(40), "bias": softcap(2.0)},
    "alibi and softcap": lambda s, t: {"visibility": Causal(), "bias": "alibi and softcap"},
    "learned": lambda s, t: {"visibility": Causal(), "bias": "learned"},
    "sinks": lambda s, t: {"visibility": Causal(), "sinks": random(4, seed=8)},
    "sinks in a window": lambda s, t: {"visibility": SlidingWindow(40), "sinks": random(4, seed=8)},
    "sinks of documents": lambda s, t: {"visibility": SameDocument(Causal(), ids(t)), "sinks": random(4, seed=8)},
    "longformer": lambda s, t: {"visibility": Longformer(40, 3)},
    "bigbird": lambda s, t: {"visibility": BigBird(16, 2)},
    "dilated": lambda s, t: {"visibility": Dilated(20, 3)},
    "chunked": lambda s, t: {"visibility": Chunked(64)},
    "prefix": lambda s, t: {"visibility": Prefix(50)},
    "scaled": lambda s, t: {"visibility": Causal(), "scale": 0.05},
    "elsewhere": lambda s, t: {
        "visibility": SameDocument(Causal(), ids(t + 9)),
        "index": (torch.arange(t - s + 9, t + 9), torch.arange(t) + 9),
    },
}  # fmt: skip


def moved(given: Any, device: str) -> Any:
    """Returns an argument of a call on a device, with the tensors that its visibility holds."""
    if isinstance(given, Tensor):
        return given.to(device)
    if isinstance(given, tuple):
        return tuple(moved(one, device) for one in given)
    if isinstance(given, SameDocument):
        return SameDocument(given.inner, given.documents.to(device))
    return given


def arguments(which: str, s: int, t: int, device: str) -> dict[str, Any]:
    """Arguments of a call except q, k, v."""
    given = {name: moved(value, device) for name, value in CALLS[which](s, t).items()}
    bias = given.get("bias")
    if isinstance(bias, str):
        slopes = Alibi(4).bias(Pass(t - s, t, device))
        table = relative(random(2 * RADIUS + 1, 4, seed=7).to(device))
        made = {"alibi": slopes, "alibi and softcap": ScoreBias.chain(slopes, softcap(2.0)), "learned": table}
        given["bias"] = made[bias]
    return given


def results(
    kernel: Kernel, which: str, s: int, t: int, g: int, h: int, device: str, dtype: torch.dtype, to: torch.dtype,
    width: int | None = None, learns: bool = True,
) -> list[Tensor]:  # fmt: skip
    """Returns z, and the gradients of all inputs that learn; inputs are rounded to `dtype`, computed in `to`."""
    shapes = [(2, s, 4, h), (2, t, g, h), (2, t, g, width or h)]
    leaves = [random(*shape, seed=1 + i).to(dtype).to(device, to) for i, shape in enumerate(shapes)]
    given = arguments(which, s, t, device)
    if which == "learned":
        leaves.extend(given["bias"].parameters)
    if "sinks" in given:
        leaves.append(given["sinks"])
    if not learns:
        with torch.no_grad():
            return [kernel(AttentionCall(*leaves[:3], **given))]
    for leaf in leaves:
        leaf.requires_grad_()
    z = kernel(AttentionCall(*leaves[:3], **given))
    upstream = random(*z.shape, seed=5).to(dtype).to(device, z.dtype)
    return [z.detach(), *torch.autograd.grad(z, leaves, upstream)]


def compare(mine: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        a, b = a.detach().cpu().double(), b.detach().double()
        assert a.shape == b.shape and a.isfinite().all(), i
        error = float((a - b).norm() / b.norm().clamp(min=1e-30))
        assert error <= tolerance * (1 if i < 4 else 2.5), (i, error)  # a table and sinks are sums over many rows


def served(name: str, which: str, s: int) -> bool:
    if name == "sdpa":
        return "softcap" not in which
    if name == "flex":
        return which != "learned"
    return name != "direct" or s <= 64


SHAPES = {
    "square": (300, 300, 4, 64),
    "grouped": (256, 256, 2, 32),
    "one KV head": (129, 129, 1, 16),
    "later queries": (100, 300, 2, 64),
    "a draft": (5, 300, 2, 64),
    "a token": (1, 300, 2, 64),
    "of eight": (40, 40, 2, 8),
}


def tried(name: str, which: str, shape: str, dtype: torch.dtype) -> bool:
    """Returns True if a call is among those tried: FlexAttention compiles each one, which takes seconds."""
    if name not in ("flex", "auto") or shape in ("a token", "a draft", "of eight"):
        return name != "flex"
    other = which in ("window", "alibi", "sinks") and dtype == torch.bfloat16
    if name == "flex":
        return shape == "square" or other
    return {"square": dtype == torch.bfloat16, "grouped": dtype == torch.float32}.get(shape, other)


@pytest.fixture(autouse=True)
def compiled_anew() -> None:
    """Forgets compiled code: torch compiles eight forms of a function, and runs further ones eagerly."""
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("which", CALLS)
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_the_definition(name: str, which: str, shape: str, dtype: torch.dtype):
    s, t, g, h = SHAPES[shape]
    if not served(name, which, s) or not tried(name, which, shape, dtype):
        return
    mine = results(KERNELS[name], which, s, t, g, h, "cuda", dtype, dtype)
    theirs = results(Naive(), which, s, t, g, h, "cpu", dtype, torch.float64)
    compare(mine, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize("which", ["causal", "window", "sinks"])
@pytest.mark.parametrize("name", ["sdpa", "banded", "flex"])
@pytest.mark.parametrize(("h", "width"), [(64, 32), (48, 32), (32, 64), (80, 80), (192, 128)])
def test_values_of_another_width(name: str, which: str, h: int, width: int):
    """Latent attention has them; also head dimensions other than powers of two."""
    mine = results(KERNELS[name], which, 200, 200, 4, h, "cuda", torch.bfloat16, torch.bfloat16, width)
    theirs = results(Naive(), which, 200, 200, 4, h, "cpu", torch.bfloat16, torch.float64, width)
    compare(mine, theirs, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("which", ["causal", "window", "alibi", "softcap", "sinks", "documents"])
@pytest.mark.parametrize("name", ["sdpa", "banded", "flex"])
def test_long_rows(name: str, which: str, dtype: torch.dtype):
    """Softmax over more keys than a block of a GPU's threads holds at once, in place."""
    if not served(name, which, 3000):
        return
    mine = results(KERNELS[name], which, 3000, 3000, 2, 64, "cuda", dtype, dtype)
    exact = results(Naive(), which, 3000, 3000, 2, 64, "cuda", dtype, torch.float64)
    compare(mine, [x.cpu() for x in exact], TOLERANCE[dtype])


@pytest.mark.parametrize("which", CALLS)
def test_auto_reads_without_gradients(which: str):
    for s, t in ((100, 300), (1, 300)):
        mine = results(Auto(), which, s, t, 2, 64, "cuda", torch.bfloat16, torch.bfloat16, learns=False)
        theirs = results(Naive(), which, s, t, 2, 64, "cpu", torch.bfloat16, torch.float64, learns=False)
        compare(mine, theirs, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("which", ["causal", "window", "softcap", "sinks"])
@pytest.mark.parametrize("name", KERNELS)
def test_products_in_bf16_by_autocast(name: str, which: str):
    if not served(name, which, 300):
        return
    with torch.autocast("cuda", torch.bfloat16):
        mine = results(KERNELS[name], which, 300, 300, 2, 64, "cuda", torch.bfloat16, torch.bfloat16)
    theirs = results(Naive(), which, 300, 300, 2, 64, "cpu", torch.bfloat16, torch.float64)
    compare(mine, theirs, TOLERANCE[torch.bfloat16])


def test_flex_refuses_unsupported_calls():
    q = torch.zeros(1, 4, 1, 8, device="cuda")
    with pytest.raises(RequestError) as error:
        Flex()(AttentionCall(q, q, q, Causal()))
    assert (error.value.code, error.value.field) == ("conflict", "kernel")
    wide = torch.zeros(1, 4, 1, 64, device="cuda")
    with pytest.raises(RequestError):
        Flex()(AttentionCall(wide, wide, wide, Causal(), dropout=0.1))


@pytest.mark.parametrize(
    ("which", "asked", "name"),
    [
        ("causal", {}, "sdpa"),
        ("window", {}, "flex"),
        ("alibi", {}, "flex"),
        ("documents", {}, "flex"),
        ("softcap", {}, "flex"),
        ("sinks", {}, "flex"),
        ("window", {"dropout": 0.1}, "sdpa"),
        ("softcap", {"dropout": 0.1}, "banded"),
    ],
)
def test_auto_runs_the_kernel_it_names(which: str, asked: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch):
    """And that kernel computes it: by facts in tests/parts/test_kernel_calls.py, by a call here."""
    taken: list[str] = []
    for kernel in Auto.kernels.values():
        whole = type(kernel).attend

        def noted(self: Any, call: AttentionCall, whole: Any = whole) -> Tensor:
            taken.append(self.name)
            return whole(self, call)  # type: ignore[no-any-return]

        monkeypatch.setattr(type(kernel), "attend", noted)
    q = random(2, 300, 4, 64).to("cuda", torch.bfloat16).requires_grad_()
    given = arguments(which, 300, 300, "cuda")
    Auto()(AttentionCall(q, q, q, **given, **asked)).sum().backward()
    assert taken == [name] and q.grad is not None and q.grad.isfinite().all()


@pytest.mark.parametrize("name", ["naive", "sdpa", "banded", "direct"])
def test_dropout_keeps_the_expectation(name: str):
    q, k, v = (random(1, 5, n, 16, seed=n).cuda().expand(4000, -1, -1, -1) for n in (2, 1, 1))
    plain = KERNELS[name](AttentionCall(q, k, v, Causal()))[0]
    dropped = KERNELS[name](AttentionCall(q, k, v, Causal(), dropout=0.3))
    error = dropped.std(0) / 4000**0.5
    assert ((dropped.mean(0) - plain).abs() <= 5 * error + 1e-5).all()
    assert (dropped[0] != dropped[1]).any()
