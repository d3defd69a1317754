"""Only tokens with a target are computed behind the last mixer: the same loss and gradients as of all tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.core.site import Site
from glassformer.parts.head import Head
from glassformer.parts.loss import IGNORED, cross_entropy, rows_with_targets

VOCAB, LENGTH = 97, 160
WIRINGS = ["", "+pre", "+post", "+parallel", "+parallel2", "+sandwich", "+respost", "+deepnorm", "+moe:4:2"]


def made(changes: str = "") -> Model:
    model = preset(f"bert@1m+vocab_size={VOCAB}+context={LENGTH}{changes}").build(seed=0).double()
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return model


def texts() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCAB, (3, LENGTH), generator=draw)
    return tokens, tokens.masked_fill(torch.rand(tokens.shape, generator=draw) > 0.15, IGNORED)


def gradients(model: Model, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("changes", WIRINGS)
def test_rows_equal_all_tokens(changes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (tokens, targets) = made(changes), texts()
    seen: list[int] = []
    given = Head.forward

    def counted(self: Head, x: Tensor, *rest: Any) -> Tensor:
        seen.append(x.shape[1])
        return given(self, x, *rest)

    monkeypatch.setattr(Head, "forward", counted)
    alone = model.loss(tokens, targets)
    ours = gradients(model, alone)
    monkeypatch.undo()
    naive = cross_entropy(model(tokens), targets)
    theirs = gradients(model, naive)
    assert seen == [128], "72 targets, filled up"
    torch.testing.assert_close(alone, naive, rtol=1e-12, atol=0)
    if "moe" not in changes:  # the loss that balances experts is in the gradient of `loss` alone
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_rows_are_those_with_a_target() -> None:
    _, targets = texts()
    rows = rows_with_targets(targets)
    assert rows is not None and len(rows) == 128 and rows.tolist() == sorted(set(rows.tolist()))
    assert set((targets.flatten() != IGNORED).nonzero()[:, 0].tolist()) <= set(rows.tolist())
    assert rows_with_targets(targets.clamp(min=0)) is None, "all of them"
    assert rows_with_targets(targets[:, :40]) is None, "fewer than a chunk"
    none = rows_with_targets(torch.full((4, 100), IGNORED))
    assert none is not None and len(none) == 128


def test_replaced_forward_receives_all_tokens() -> None:
    model, (tokens, targets) = made(), texts()
    seen: list[int] = []
    given = model.head.forward
    model.head.forward = lambda x, *rest: seen.append(x.shape[1]) or given(x, *rest)  # type: ignore[func-returns-value]
    model.loss(tokens, targets)
    assert seen == [LENGTH]


def test_observers_receive_all_tokens() -> None:
    model, (tokens, targets) = made(), texts()
    shapes: list[tuple[int, ...]] = []
    plain = model.loss(tokens, targets)
    for module in (model.layers[-1].ffn, model.layers[-1], model.final, model.head, model.logits):
        hook = module.register_forward_hook(lambda m, i, out: shapes.append(tuple(out.shape)))
        loss = model.loss(tokens, targets)
        hook.remove()
        torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0)
        if not isinstance(module, Site):
            continue
        assert shapes[-1][:2] == tokens.shape
    assert shapes[0][:2] == shapes[1][:2] == tokens.shape


def test_targets_of_another_length_are_refused_and_gradients_can_be_watched() -> None:
    model, (tokens, targets) = made(), texts()
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        model.loss(tokens, targets[:, :-1])
    shapes: list[tuple[int, ...]] = []
    hook = model.layers[-1].ffn.register_full_backward_hook(lambda m, i, out: shapes.append(tuple(out[0].shape)))
    model.loss(tokens, targets).backward()
    hook.remove()
    assert shapes[0][:2] == tokens.shape
