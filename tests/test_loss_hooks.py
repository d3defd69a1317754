"""The loss of a model goes through `forward` of its modules, so that hooks (those of FSDP among them) fire."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.introspection import looking
from glassformer.model import Model
from glassformer.naming import preset

TINY = "layers=2+d_model=32+heads=4+vocab_size=64+context=16"
EXPRESSIONS = [f"llama+{TINY}+untied", f"gpt2+{TINY}", f"llama+{TINY}+moe:4:2+head.softcap=3+head.bias=true+tied"]


def built(expression: str) -> tuple[Model, Tensor, Tensor]:
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    return preset(expression).build(seed=0).double().train(), tokens[:, :-1], tokens[:, 1:].clone()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_module_is_called_once_in_a_loss(expression: str):
    """Pre-hooks and hooks of the model, the embedding, the layers, the final norm and the head."""
    model, inputs, targets = built(expression)
    calls: Counter[str] = Counter()
    parts: dict[str, nn.Module] = {
        "": model, "embedding": model.embedding, "head": model.head,
        **{f"layers.{i}": layer for i, layer in enumerate(model.layers)},
    }  # fmt: skip
    if model.final_norm is not None:
        parts["final_norm"] = model.final_norm
    for name, part in parts.items():
        part.register_forward_pre_hook(lambda *_, name=name: calls.update([f"before {name}"]))
        part.register_forward_hook(lambda *_, name=name: calls.update([f"after {name}"]))
    model.loss(inputs, targets).backward()
    expected = {f"{when} {name}" for when in ("before", "after") for name in parts}
    assert calls == Counter(dict.fromkeys(expected, 1))


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_loss_is_the_cross_entropy_of_the_logits(expression: str, reduction: str):
    """Value and gradients are those of torch's cross-entropy of the logits; a capture of the logits changes neither."""
    model, inputs, targets = built(expression.replace("moe:4:2", "moe:4:2+ffn.balance_loss=0"))
    targets[0, 3] = -100

    def gradients(loss: Tensor) -> tuple[Tensor, list[Tensor]]:
        return loss.detach(), list(torch.autograd.grad(loss.sum(), list(model.parameters())))

    logits = model(inputs)
    outside = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
    expected = gradients(outside if reduction == "mean" else outside.view_as(targets))
    torch.testing.assert_close(gradients(model.loss(inputs, targets, reduction=reduction)), expected)
    torch.testing.assert_close(gradients(model(inputs, targets=targets, reduction=reduction)), expected)
    seen: list[Tensor] = []
    with looking(model, {"logits": lambda x, *_: seen.append(x)}):
        watched = gradients(model.loss(inputs, targets, reduction=reduction))
    torch.testing.assert_close(watched, expected)
    torch.testing.assert_close(seen[0], logits)


def test_a_training_loss_keeps_no_logits():
    """No tensor of b s v values is made: rows go through the head in chunks."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            tensors = [one for one in torch.utils._pytree.tree_leaves(made) if torch.is_tensor(one)]
            largest = max([largest, *(one.numel() for one in tensors)])
            return made

    model = preset("llama+layers=1+d_model=8+heads=2+vocab_size=4096+context=512+hidden=16").build(seed=0)
    tokens = torch.zeros(4, 512, dtype=torch.int64)
    with Sizes():
        model.loss(tokens, tokens).backward()
    assert largest <= tokens.numel() * 4096 // 4


def test_model_has_device_dtype_and_vocabulary_size():
    model = preset(f"llama+{TINY}").build(seed=0).bfloat16()
    assert (model.vocab_size, model.device, model.dtype) == (64, torch.device("cpu"), torch.bfloat16)
    x = model.hidden_states(torch.zeros(1, 3, dtype=torch.int64))
    torch.testing.assert_close(model.unembed(x), model(torch.zeros(1, 3, dtype=torch.int64)))


def test_a_tied_head_asks_for_the_embedding():
    head = preset(f"gpt2+{TINY}").build(seed=0).head
    with pytest.raises(TypeError, match="embedding"):
        head(torch.zeros(1, 1, 32))
