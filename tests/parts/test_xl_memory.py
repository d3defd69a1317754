"""Transformer-XL's attention against the paper's own way to compute it, and its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import glassformer as gf
from glassformer.parts.forward_pass import Pass
from glassformer.parts.kernel import Auto, Banded, Naive
from glassformer.parts.mixer import XLMemory
from glassformer.parts.mixer.xl_memory import waves
from tests.refused import refused

KERNELS = {"naive": Naive, "banded": Banded, "blocks of 2": lambda: Banded(2), "auto": Auto}
SIZE = "layers=2+d_model=32+heads=4+vocab_size=61+context=64"


def moved(memory: int, kernel: str = "naive") -> XLMemory:
    made = torch.Generator().manual_seed(1)
    mixer = XLMemory(12, 3, 5, memory, bias=True, kernel=KERNELS[kernel]()).double()
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.add_(torch.randn(weight.shape, generator=made, dtype=weight.dtype), alpha=0.3)
    return mixer


def published(mixer: XLMemory, x: Tensor, before: Tensor) -> Tensor:
    """Returns attention as appendix B computes it: q against all of W_R R, then rows moved (`rel_shift`), head by head.
    `before` (b, p, d): the memory, which gets no gradient."""
    n, h, s, p = mixer.n_heads, mixer.head_dim, x.shape[1], before.shape[1]
    hidden, t = torch.cat([before.detach(), x], dim=1), s + p
    q = mixer.q_proj(x).unflatten(-1, (n, h))
    k, v = (part.unflatten(-1, (n, h)) for part in mixer.kv_proj(hidden).chunk(2, dim=-1))
    r = mixer.distance(waves(torch.arange(t - 1, -1, -1.0, dtype=torch.float64), mixer.d_model)).unflatten(-1, (n, h))
    content = torch.einsum("bsnh,btnh->bnst", q + mixer.content_bias, k)
    position = torch.einsum("bsnh,tnh->bnst", q + mixer.distance_bias, r)
    padded = torch.cat([position.new_zeros(*position.shape[:3], 1), position], dim=3)
    position = padded.reshape(*position.shape[:2], t + 1, s)[:, :, 1:].reshape(position.shape)
    gap = torch.arange(p, t)[:, None] - torch.arange(t)
    hidden_from = (gap < 0) | (gap > mixer.visibility.window - 1)
    scores = ((content + position) / h**0.5).masked_fill(hidden_from, -torch.inf)
    return mixer.output(torch.einsum("bnst,btnh->bsnh", scores.softmax(-1), v).flatten(-2))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("memory", [3, 50])
def test_segments_and_their_memory_are_the_papers(memory: int, kernel: str):
    """Three segments trained one after the other with one state: outputs, the gradient of every weight, and that of
    each segment, which the next ones do not reach."""
    mixer = moved(memory, kernel)
    x = [torch.randn(2, size, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(size)).requires_grad_()
         for size in (7, 5, 1)]  # fmt: skip
    over: list[Any] = [*x, *mixer.parameters()]
    state, start, found, wanted = mixer.init_state(2, 13, torch.float64), 0, [], []
    for i, part in enumerate(x):
        end = start + part.shape[1]
        found.append(mixer(part, Pass(start, end), state))
        wanted.append(published(mixer, part, torch.cat([part.new_zeros(2, 0, 12), *x[:i]], dim=1)))
        torch.testing.assert_close(found[-1], wanted[-1])
        start = end
    for mine, theirs in zip(
        torch.autograd.grad(sum(y.sin().sum() for y in found), over),
        torch.autograd.grad(sum(y.sin().sum() for y in wanted), over), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("kernel", ["naive", "banded", "auto"])
def test_packed_documents_and_given_positions(kernel: str):
    mixer, x = moved(4, kernel).eval(), torch.randn(2, 9, 12, dtype=torch.float64)
    documents = torch.tensor([[1] * 4 + [2] * 5]).expand(2, -1)
    with torch.no_grad():
        packed = mixer(x, Pass(0, 9, documents=documents))
        torch.testing.assert_close(packed, torch.cat([mixer(x[:, :4]), mixer(x[:, 4:])], dim=1))
        moved_on = Pass(0, 9, ids=torch.arange(9) + 5, given=(torch.arange(9) + 5).expand(2, -1))
        torch.testing.assert_close(mixer(x, moved_on), mixer(x))


def test_its_memory_is_hidden_states():
    """d numbers a token, m + 1 tokens at most; what has left it is forgotten."""
    config = gf.preset(f"llama@1m+{SIZE}+xl_memory:6")
    model = config.build(seed=0).eval()
    for length in (4, 7, 30):
        assert (
            model.init_state(1, length).nbytes
            == 2 * min(length, 7) * 32 * 4
            == config.state_bytes(length, torch.float32)
        )
    tokens = torch.randint(61, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        full = model(tokens)
        for sizes in ([1] * 30, [30], [11, 1, 1, 17]):
            state = model.init_state(2, 30)
            parts = [model(part, state) for part in tokens.split(sizes, dim=1)]
            torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=1e-4, atol=1e-5)
        with refused(code="unsupported", field="length"):
            state.truncate(4)
        changed = tokens.clone()
        changed[:, 0] = (changed[:, 0] + 1) % 61
        after = model(changed)
        assert torch.equal(after[:, 13:], full[:, 13:]) and not torch.equal(after[:, 12], full[:, 12])  # 2 layers of 6


def test_xl_memory_refuses_unsupported_settings():
    for change, code, field in (
        ("mixer.memory=0", "range", "stack.0.blocks.0.mixer.memory"),
        ("d_model=33+head_dim=8", "range", "d_model"),
        ("mup", "conflict", "mup"),
        ("window:8", "unsupported", "mixer.visibility"),
    ):
        with refused(code=code, field=field):
            gf.preset(f"llama@1m+{SIZE}+xl_memory:6+{change}").build()


class Written(TorchDispatchMode):
    """Mode that sums the sizes of the tensors that operations write."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not func.is_view:
            self.elements += made.numel()
        return made


def test_work_of_training_grows_with_the_length():
    mixer, written = moved(15, "blocks of 2").double(), []
    for length in (64, 512):
        x = torch.randn(1, length, 12, dtype=torch.float64, requires_grad=True)
        with Written() as mode:
            mixer(x).sum().backward()
        written.append(mode.elements / length)
    assert written[1] < 1.5 * written[0]  # gradients as long as the text for each block: 6.9 times
