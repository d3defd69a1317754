"""Sequences whose tokens several ranks share, against one process, in fp64."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from glassformer import generation
from glassformer.errors import RequestError
from glassformer.introspection import capture, edit
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parallel import context
from glassformer.parallel import tensor as tp
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.parallel.seams import Group, Seams
from tests.parallel.test_tensor import TINY, begin, draw
from tests.parallel.threads import as_threads
from tests.quick import quickly
from tests.refused import refused

CLOSE = 1e-13
SIZE = 13
"""Tokens of a sequence: no number of ranks divides it."""

MODELS = {
    "llama": f"llama@1m+{TINY}+gqa:2+qknorm:full+sinks+bias",
    "gpt2": f"gpt2@1m+{TINY}+z_loss=1e-3",
    "bloom": f"bloom@1m+{TINY}+softcap:20",
    "window": f"llama@1m+{TINY}+window:5+kernel=banded+untied",
    "latent": f"llama@1m+{TINY}+mla:12",
    "shared keys": f"llama@1m+{TINY}+share:2",
    "experts": f"llama@1m+{TINY}+moe:4:2+ffn.balance_loss=0.1+ffn.n_shared=1",
    "gain": f"llama@1m+{TINY}+gain+relbias",
}


def step(model: Model, documents: Tensor | None, finish: Any = lambda: None) -> tuple[list[float], dict[str, Tensor]]:
    """Returns the losses of five steps of AdamW, and the gradients of the first. The first rank has no target."""
    tokens, targets = draw(0, s=SIZE)
    targets[:, :5] = -100
    optimizer, losses, first = torch.optim.AdamW(model.parameters(), lr=5e-4), [], {}
    for _ in range(5):
        loss = model.loss(tokens, targets, documents)
        optimizer.zero_grad()
        loss.backward()
        finish()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(loss.item())
    return losses, first


def compare(expression: str, layout: str, packed: bool = False) -> float:
    """The largest difference of a loss, and of a gradient of the first step."""
    config = preset(expression)
    documents = (torch.arange(SIZE) // 5).expand(2, -1) if packed else None
    losses, gradients = step(begin(config.build(seed=0)), documents)

    def work(groups: ProcessGroups) -> tuple[list[float], dict[str, Tensor]]:
        model = begin(config.build(seed=0))
        if groups.group("tp") is not None:
            tp.divide(model, groups.group("tp"), groups.layout.sp)
        across = Group(groups.group("cp"))
        context.divide(model, groups.group("cp"))

        def finish() -> None:
            if model.division is not None:
                tp.sum_partial(model)
            for weight in model.parameters():
                if weight.grad is not None:
                    weight.grad = across.summed(weight.grad)

        local.own = across
        curve, found = step(model, documents, finish)
        if model.division is not None:
            found = {name: tp.division_of(model).join(name, gradient) for name, gradient in found.items()}
        return curve, found

    worst, local = [0.0], threading.local()
    shared = as_threads(layout, work, lambda x: local.own.summed(x))
    for curve, found in shared:
        worst += [abs(a - b) for a, b in zip(curve, losses, strict=True)]
        worst += [float((found[name] - wanted).abs().max()) for name, wanted in gradients.items()]
    return float(torch.tensor(worst).max())


@pytest.mark.parametrize("name", quickly(MODELS, lambda _, name: name == "llama"))
@pytest.mark.parametrize("packed", quickly([False, True], lambda _, packed: packed), ids=["", "packed"])
@pytest.mark.parametrize("layout", quickly(["cp=2", "cp=4", "cp=2,tp=2"], lambda _, layout: layout == "cp=2"))
def test_shared_sequences_are_learned_as_in_one_process(name: str, packed: bool, layout: str):
    if "tp" in layout and name == "llama":
        expression = MODELS[name].replace(":full", "")
    else:
        expression = MODELS[name]
    assert compare(expression, layout, packed) < CLOSE


@pytest.mark.slow
def test_with_both_kinds_of_shared_tokens():
    assert compare(MODELS["bloom"], "cp=2,tp=2,sp=1") < CLOSE


def test_captures_edits_and_tokens_equal_one_process():
    config, (tokens, targets) = preset(f"llama@1m+{TINY}+gqa:2"), draw(0, s=SIZE)

    def look(model: Model) -> dict[str, Tensor]:
        model = model.double().eval()
        found = capture(
            model, tokens, ["*.q", "*.k", "*.z", "*.hidden", "*.resid_mid", "*.out", "final_norm", "logits"]
        )
        with torch.no_grad(), edit(model, {"layers.0.mixer.z": lambda z: z.roll(1, 1)}):
            found["moved"] = model(tokens)
            found["each"] = model.loss(tokens, targets, reduction="none")
        found["written"] = generation.generate(model, tokens[:1, :4], max_new_tokens=6, temperature=0)
        return found

    whole = look(config.build(seed=0))

    def work(groups: ProcessGroups) -> dict[str, Tensor]:
        found = look(model := context.divide(config.build(seed=0), groups.group("cp")))
        with refused(code="conflict", field="sites"):
            capture(model, tokens, "*.pattern")
        return found

    for found in as_threads("cp=2", work):
        assert found.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("mamba", "the mixer of layer 0 is a Mamba"),
        ("retention", "the mixer of layer 0 is a Retention"),
        ("xl_memory:64", "the mixer of layer 0 is a XLMemory"),
        ("prefix:4", "see no later ones"),
        ("bidirectional", "see no later ones"),
        ("moe:4:2+ffn.capacity=1", "that of layer 0 does not"),
        ("residual.dropout=0.1", "without dropout"),
        ("head.pool=mean+head.classes=3", "this one pools them"),
    ],
)
def test_context_parallelism_refuses_unfit_models(change: str, message: str):
    config = preset(f"llama@1m+{TINY}+{change}")
    with pytest.raises(RequestError) as raised:
        context.check(config, 2)
    assert message in str(raised.value) and str(raised.value).endswith("use cp=1")
    context.check(config, 1)


def unweighted(self: Any, loss_of: Any, x: Tensor, targets: Tensor, reduction: str, added: Any) -> Tensor:
    """Returns the mean of the ranks' means; one rank has fewer targets."""
    return self.seams.leave(loss_of(x, self.own(targets), reduction) / self.seams.group.of)


@pytest.mark.parametrize(
    ("where", "what", "instead"),
    [(Seams, "gather", Seams.join), (context.Context, "loss", unweighted)],
    ids=["the gradients of gathered keys not summed", "a mean of means"],
)
def test_a_mistake_shows(where: Any, what: str, instead: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(where, what, instead)
    assert not compare(MODELS["gpt2"], "cp=2") < 1e-9


def test_keys_of_others_are_needed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(context.Context, "gather", lambda self, x: torch.cat([torch.zeros_like(x), x], 1))
    assert not compare(f"llama@1m+{TINY}", "cp=2") < 1e-9
