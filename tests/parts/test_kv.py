"""Decode states of attention: how far a ring goes back, and the gradients of what is read through a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.core.site import edit_at
from tests.refused import refused

VOCAB = 31


def tiny(changes: str) -> Model:
    size = f"layers=2+d_model=32+heads=4+vocab_size={VOCAB}+context=64+init=gpt2+init.std=0.2"
    return preset(f"llama@1m+{size}+{changes}").build(seed=0).eval()


def windowed() -> Model:
    return tiny("window:5")


def draw(n: int, seed: int) -> Tensor:
    return torch.randint(VOCAB, (1, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sizes", [[20], [1] * 20, [7, 1, 12]])
def test_a_ring_goes_back_by_rewind_and_no_further(sizes: list[int]):
    model, tokens = windowed(), draw(20, 0)
    with torch.no_grad():
        state = model.init_state(1, 40, rewind=4)
        for part in tokens.split(sizes, dim=1):
            model(part, state)
        state.truncate(16)
        with refused(code="unsupported", field="length"):  # what it would need was overwritten before it went back
            state.truncate(12)
        again = torch.cat([tokens[:, :16], draw(9, 1)], dim=1)
        parts = [model(part, state) for part in again[:, 16:].split([3, 1, 5], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(again)[:, 16:], rtol=1e-5, atol=1e-5)
        state.truncate(0)
        torch.testing.assert_close(model(again[:, :7], state), model(again[:, :7]), rtol=1e-5, atol=1e-5)


def test_ring_state_equals_full_pass_after_every_allowed_rewind():
    model, tokens = windowed(), draw(24, 2)
    with torch.no_grad():
        full = model(tokens)
        for read in range(1, 24):
            for back in range(1, read):
                state = model.init_state(1, 40, rewind=3)
                model(tokens[:, :read], state)
                try:
                    state.truncate(read - back)
                except ValueError:
                    assert back > 3
                    continue
                state_logits = model(tokens[:, read - back :], state)
                torch.testing.assert_close(state_logits, full[:, read - back :], rtol=1e-5, atol=1e-5)


def test_ring_without_rewind_has_window_slots():
    model = windowed()
    assert {layer.slots for layer in model.init_state(1, 40).layers} == {5}
    assert {layer.slots for layer in model.init_state(1, 40, rewind=4).layers} == {9}


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten(), reduction="sum")


def gradients(model: Model, loss: Tensor) -> list[Tensor]:
    parameters = [*model.parameters()]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


@contextmanager
def keys_and_values(model: Model, edit: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, every k and v (b, s, g, h) of a pass is edit(k), edit(v)."""
    sites = [site for layer in model.layers for site in (layer.mixer.k, layer.mixer.v)]
    with edit_at((site, edit) for site in sites):
        yield


def full_pass(model: Model, tokens: Tensor, first: int, old: Callable = lambda x: x, new: Callable = lambda x: x):
    """Loss of the tokens from `first` on in one pass over all of them, with the k and v of those before detached."""
    with keys_and_values(model, lambda x: torch.cat((old(x[:, :first]).detach(), new(x[:, first:])), dim=1)):
        return loss_of(model(tokens)[:, first:], tokens[:, first:])


@pytest.mark.parametrize("changes", ["gqa:2", "gqa:2+window:5", "window:5+alibi", "softcap:5+window:64"])
@pytest.mark.parametrize("sizes", [[4, 3], [9, 1], [8, 6], [2, 1, 1], [3, 4, 1, 6]])
def test_tokens_read_through_a_state_have_the_gradients_of_a_full_pass(changes: str, sizes: list[int]):
    """The gradient is that of the sum of all chunks' losses, with the state of earlier chunks detached; one backward
    pass."""
    model, tokens = tiny(changes), draw(sum(sizes), 0)
    state, through, expected = model.init_state(1, 40), [], []
    for i, part in enumerate(tokens.split(sizes, dim=1)):
        first = sum(sizes[:i])
        through.append(loss_of(model(part, state), part))
        expected.append(full_pass(model, tokens[:, : first + sizes[i]], first))
    mine, theirs = gradients(model, sum(through)), gradients(model, sum(expected))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", ["gqa:2", "gqa:2+window:5"])
@pytest.mark.parametrize("s", [1, 4])
def test_gradients_through_state_of_rows_of_different_lengths(changes: str, s: int):
    model = tiny(changes)
    lengths = [9, 7]
    tokens = torch.cat((draw(9 + s, 1), draw(9 + s, 2)))
    state = model.init_state(2, 40, rewind=2)
    with torch.no_grad():
        model(tokens[:, :9], state)
    state.spread(lengths)
    rows = [tokens[i : i + 1, : length + s] for i, length in enumerate(lengths)]
    new = torch.cat([row[:, -s:] for row in rows])
    mine = gradients(model, loss_of(model(new, state), new))
    theirs = gradients(model, sum(full_pass(model, row, row.shape[1] - s) for row in rows))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def rounded(x: Tensor) -> Tensor:
    """x as an int8 state gives it back; its gradient is that of x."""
    scale = (x.detach().abs().amax(-1, keepdim=True) / 127).bfloat16().float()
    return x + ((x.detach() / scale).round().clamp(-127, 127) * scale - x).detach()


@pytest.mark.parametrize("s", [1, 4])
def test_gradients_pass_through_an_int8_state(s: int):
    model, tokens = tiny("gqa:2"), draw(9 + s, 3)
    state = model.init_state(1, 40, dtype=torch.int8)
    model(tokens[:, :9], state)
    loss = loss_of(model(tokens[:, 9:], state), tokens[:, 9:])
    expected = full_pass(model, tokens, 9, rounded, rounded)
    torch.testing.assert_close(loss, expected)
    for a, b in zip(gradients(model, loss), gradients(model, expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", ["gqa:2", "gqa:2+window:5"])
def test_reading_copies_no_state(changes: str):
    """Without gradients, queries attend to the state's memory itself."""
    model = tiny(changes)
    state, kept = model.init_state(1, 40), []
    append = type(state.layers[0]).append

    def watched(self, *args):
        out = append(self, *args)
        kept.append(out[0].untyped_storage().data_ptr() == self.k.values.untyped_storage().data_ptr())
        return out

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(type(state.layers[0]), "append", watched)
        for token in draw(12, 5).split(1, dim=1):
            model(token, state)
    assert all(kept) and len(kept) >= 24
