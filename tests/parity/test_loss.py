"""The chunked cross-entropy of a linear head is F.cross_entropy of its logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.parts import loss as loss_module
from glassformer.parts.loss import IGNORED, linear_cross_entropy, naive_linear_cross_entropy

ROWS, WIDTH, VOCAB = 11, 6, 13


@pytest.fixture(params=["one chunk", "four chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "four chunks":
        monkeypatch.setattr(loss_module, "_VALUES_PER_CHUNK", 3 * VOCAB)


def inputs(dtype: torch.dtype, bias: bool, ignore: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    draw = torch.Generator().manual_seed(0)
    x, weight, b = (torch.randn(n, generator=draw, dtype=dtype) for n in ((ROWS, WIDTH), (VOCAB, WIDTH), VOCAB))
    targets = torch.randint(VOCAB, (ROWS,), generator=draw)
    if ignore:
        targets[[0, 4, 5, 10]] = IGNORED
    return x, weight, targets, b if bias else None


def reference(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, cap: float | None, reduction: str
) -> Tensor:
    logits = x @ weight.T if bias is None else x @ weight.T + bias
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return F.cross_entropy(logits, targets, reduction=reduction)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("function", [linear_cross_entropy, naive_linear_cross_entropy])
def test_loss_and_gradients(function, bias: bool, cap: float | None, ignore: bool, reduction: str) -> None:
    x, weight, targets, b = inputs(torch.float64, bias, ignore)
    leaves = [leaf.requires_grad_() for leaf in (x, weight, b) if leaf is not None]
    mine, theirs = (f(x, weight, targets, b, cap, reduction) for f in (function, reference))
    torch.testing.assert_close(mine, theirs)
    upstream = torch.randn_like(mine)
    grads = [torch.autograd.grad(end, leaves, upstream) for end in (mine, theirs)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(("bias", "cap"), [(False, None), (True, 2.0)])
def test_gradcheck(bias: bool, cap: float | None) -> None:
    x, weight, targets, b = inputs(torch.float64, bias, ignore=True)
    leaves = [leaf.requires_grad_() for leaf in (x, weight, b) if leaf is not None]
    assert torch.autograd.gradcheck(lambda x, w, b=None: linear_cross_entropy(x, w, targets, b, cap), leaves)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_frozen_inputs(frozen: str) -> None:
    """A frozen head or a frozen trunk gets no gradient and takes none from the other."""
    x, weight, targets, _ = inputs(torch.float64, False, True)
    leaf = weight if frozen == "x" else x
    leaf.requires_grad_()
    grads = [
        torch.autograd.grad(f(x, weight, targets, None, None, "mean"), leaf)[0]
        for f in (linear_cross_entropy, reference)
    ]
    torch.testing.assert_close(*grads)


def test_half_precision() -> None:
    """bf16 products, fp32 softmax: closer to the fp32 loss than bf16 can resolve at this size."""
    x, weight, targets, _ = inputs(torch.float32, False, True)
    wanted = reference(x.bfloat16().float(), weight.bfloat16().float(), targets, None, None, "mean")
    mine = linear_cross_entropy(x.bfloat16(), weight.bfloat16(), targets)
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine, wanted, rtol=2e-3, atol=0)


def test_no_target_at_all() -> None:
    """Every target ignored: not a number, as in torch."""
    x, weight, targets, _ = inputs(torch.float64, False, False)
    targets[:] = IGNORED
    assert linear_cross_entropy(x, weight, targets).isnan()
    assert reference(x, weight, targets, None, None, "mean").isnan()
