"""What a ring keeps: how far it goes back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glassformer.expression import preset
from glassformer.model import Model

VOCAB = 31


def windowed() -> Model:
    size = f"layers=2+d_model=32+heads=4+vocab_size={VOCAB}+context=64+init=gpt2+init.std=0.2"
    return preset(f"llama@1m+{size}+window:5").build(seed=0).eval()


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
        with pytest.raises(ValueError, match="forgotten"):  # what it would need was overwritten before it went back
            state.truncate(12)
        again = torch.cat([tokens[:, :16], draw(9, 1)], dim=1)
        parts = [model(part, state) for part in again[:, 16:].split([3, 1, 5], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(again)[:, 16:], rtol=1e-5, atol=1e-5)
        state.truncate(0)
        torch.testing.assert_close(model(again[:, :7], state), model(again[:, :7]), rtol=1e-5, atol=1e-5)


def test_every_way_back_that_is_allowed_is_right():
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


def test_a_ring_is_no_longer_than_its_window_where_nobody_goes_back():
    model = windowed()
    assert {layer.slots for layer in model.init_state(1, 40).layers} == {5}
    assert {layer.slots for layer in model.init_state(1, 40, rewind=4).layers} == {9}
