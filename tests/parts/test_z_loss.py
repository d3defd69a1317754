"""z_loss (log Z)^2 on top of the cross-entropy, while training and only then."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from glassformer.introspection import looking
from glassformer.naming import preset
from glassformer.parts.head import Head
from glassformer.parts.loss import linear_cross_entropy, naive_linear_cross_entropy
from tests.refused import refused

TINY = "layers=2+d_model=32+heads=4+vocab_size=61+context=64"
TOKENS = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(0))
TARGETS = TOKENS.roll(-1, 1).clone()
TARGETS[0, :4] = -100


def by_hand(logits: torch.Tensor, z_loss: float) -> torch.Tensor:
    """Over the targets that count."""
    counted = TARGETS.flatten() != -100
    log_z = logits.flatten(0, 1).exp().sum(-1).log()[counted]
    return F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten()) + z_loss * (log_z**2).mean()


@pytest.mark.parametrize("change", ["", "+tied", "+head.softcap=5", "+head.scale=0.5", "+head.bias=true"])
def test_it_is_the_mean_square_of_log_z(change: str):
    model = preset(f"llama@1m+{TINY}{change}+z_loss=0.3").build(seed=0)
    parameters = list(model.parameters())
    found, expected = model.loss(TOKENS, TARGETS), by_hand(model(TOKENS), 0.3)
    torch.testing.assert_close(found, expected)
    assert found > F.cross_entropy(model(TOKENS).flatten(0, 1), TARGETS.flatten()) + 0.3
    for a, b in zip(torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    each = model.loss(TOKENS, TARGETS, reduction="none")
    assert (each[0, :4] == 0).all()
    torch.testing.assert_close(each.sum() / (TARGETS != -100).sum(), found)


def test_z_loss_is_absent_in_evaluation():
    model = preset(f"llama@1m+{TINY}+z_loss=0.3").build(seed=0).eval()
    plain = preset(f"llama@1m+{TINY}").build(seed=0).eval()
    for reduction in ("mean", "none"):
        assert torch.equal(
            model.loss(TOKENS, TARGETS, reduction=reduction), plain.loss(TOKENS, TARGETS, reduction=reduction)
        )


def test_looking_at_the_logits_leaves_it_in_place():
    model = preset(f"llama@1m+{TINY}+z_loss=0.3").build(seed=0)
    plain = model.loss(TOKENS, TARGETS)
    with looking(model, {"logits": lambda x, first, total: None}):
        torch.testing.assert_close(model.loss(TOKENS, TARGETS), plain)


@pytest.mark.parametrize("cap", [None, 4.0])
def test_in_half_precision_too(cap: float | None):
    """Under autocast: the fused loss and its gradients, against the definition under the same."""
    x, weight = torch.randn(600, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    targets = torch.randint(0, 300, (600,))
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = (
            f(x, weight, targets, None, cap, z_loss=0.1) for f in (linear_cross_entropy, naive_linear_cross_entropy)
        )
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0)
    for a, b in zip(torch.autograd.grad(mine, [x, weight]), torch.autograd.grad(theirs, [x, weight]), strict=True):
        assert (a - b).norm() < 1e-2 * b.norm()


def test_it_pulls_log_z_towards_zero():
    """With nothing else to learn (a uniform source) the logits' constant, which the cross-entropy ignores, shrinks."""
    head, x = Head(5, 3, bias=True, z_loss=0.1), torch.zeros(1, 50, 3)
    targets = torch.arange(50)[None] % 5
    optimizer = torch.optim.SGD(head.parameters(), 0.5)

    def log_z() -> float:
        return head(x)[0, 0].logsumexp(-1).item()

    with torch.no_grad():
        head.bias.fill_(3.0)
    assert log_z() > 4
    for _ in range(400):
        optimizer.zero_grad()
        head(x, targets=targets).backward()
        optimizer.step()
    assert abs(log_z()) < 0.05
    torch.testing.assert_close(head(x)[0, 0].std(), torch.tensor(0.0), rtol=0, atol=1e-4)


def test_its_place_in_the_grammar():
    assert preset("llama@1m+z_loss=1e-4").head.z_loss == preset("llama@1m+head.z_loss=1e-4").head.z_loss == 1e-4
    assert preset("llama@1m+z_loss=1e-4").resolved() == preset("llama@1m").resolved()
    with refused(code="range", field="head.z_loss"):
        preset("llama@1m+z_loss=-1")
