"""S4D against its definition, closed forms and the paper's; the mixer around it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glassformer.parts.mixer import s4
from glassformer.parts.mixer.s4 import S4, ChunkFactors, convolution, kernel_of, naive_convolution

KINDS = [(False, "zoh"), (False, "bilinear"), (True, "zoh"), (True, "bilinear")]


def moved(d: int = 3, d_state: int = 4, real: bool = False, discretization: str = "zoh", seed: int = 0) -> S4:
    """A mixer whose every parameter was moved off its start."""
    mixer = S4(d, d_state, real, discretization).double()  # type: ignore[arg-type]
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.add_(torch.randn(weight.shape, generator=made, dtype=weight.dtype), alpha=0.3)
        mixer.log_dt.add_(2.0)
    return mixer


def starts(b: int, s: int, seed: int) -> Tensor:
    return torch.rand(b, s, generator=torch.Generator().manual_seed(seed)) < 0.2


@given(
    st.sampled_from(KINDS), st.integers(1, 2), st.integers(1, 14), st.sampled_from([1, 3, 4, 64]), st.booleans(),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_chunks_are_the_definition(kind: tuple[bool, str], b: int, s: int, chunk: int, cut: bool, begun: bool):
    """Outputs, the last state and every gradient are equal for any document starts, from a state and from nothing."""
    mixer, made = moved(3, 4, *kind), torch.Generator().manual_seed(s)
    u = torch.randn(b, s, 3, generator=made, dtype=torch.float64, requires_grad=True)
    h = torch.randn(b, 3, 4, generator=made, dtype=torch.float64, requires_grad=True) if begun else None
    fresh = starts(b, s, s) if cut else None
    leaves = [u, *([h] if h is not None else []), *(w for w in mixer.parameters() if w is not None)]
    found = []
    for fast in (False, True):
        system = mixer.system()
        if fast:
            y, last = convolution(u, ChunkFactors.of(*system, min(chunk, s)), h, fresh)
        else:
            y, last = naive_convolution(u, *system, h, fresh)
        gradients = torch.autograd.grad(y.sin().sum() + last.cos().sum(), leaves, allow_unused=True)
        found.append([y, last, *(g for g in gradients if g is not None)])
    assert len(found[0]) == len(found[1])
    for mine, wanted in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_its_kernel_is_that_of_the_paper(kind: tuple[bool, str]):
    """2 Re sum_n C_n Bb_n Ab_n^l, with the powers computed as exponentials (S4D, listing 1)."""
    real, discretization = kind
    mixer = moved(3, 6, real, discretization)
    dt, a = mixer.log_dt.exp()[:, None], -mixer.A_log.exp()
    c: Tensor = mixer.C
    if mixer.A_imag is not None:
        a, c = torch.complex(a, mixer.A_imag), torch.complex(mixer.C[:, :3], mixer.C[:, 3:])
    ab = torch.exp(dt * a) if discretization == "zoh" else (1 + dt * a / 2) / (1 - dt * a / 2)
    bb = (ab - 1) / a if discretization == "zoh" else dt / (1 - dt * a / 2)
    places = torch.arange(20)
    wanted = torch.stack([(c * bb * ab ** int(place)).sum(-1) for place in places], dim=-1)
    wanted = wanted if real else 2 * wanted.real
    torch.testing.assert_close(kernel_of(*mixer.system(), 20), wanted)
    u = torch.randn(1, 20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y, _ = convolution(u, ChunkFactors.of(*mixer.system(), 8))
    full = torch.nn.functional.conv1d(u.mT, wanted.flip(-1)[:, None], padding=19, groups=3)[..., :20].mT
    torch.testing.assert_close(y, full)


def test_s4_initial_weights_are_the_published_ones():
    """S4D-Lin and S4D-Real; only the map decays."""
    lin, real = S4(8, 6), S4(8, 5, real=True)
    assert lin.A_imag is not None and real.A_imag is None
    torch.testing.assert_close(lin.A_imag[3], torch.tensor([0.0, math.pi, 2 * math.pi]))
    torch.testing.assert_close(lin.A_log.exp(), torch.full((8, 3), 0.5))
    torch.testing.assert_close(real.A_log.exp(), torch.arange(1.0, 6.0).expand(8, 5))
    assert math.log(1e-3) <= lin.log_dt.min() and lin.log_dt.max() <= math.log(0.1)


def test_steps_of_any_size_stay_finite():
    for real, discretization in KINDS:
        mixer = S4(4, 8, real, discretization)  # type: ignore[arg-type]
        with torch.no_grad():
            mixer.log_dt.copy_(torch.tensor([-60.0, -3.0, 3.0, 60.0]))
        x = torch.randn(1, 150, 4, generator=torch.Generator().manual_seed(0))
        y = mixer(x)
        y.sum().backward()
        assert y.isfinite().all()
        assert all(w.grad is not None and w.grad.isfinite().all() for w in mixer.parameters())


def test_s4_output_does_not_depend_on_chunk_length(monkeypatch: pytest.MonkeyPatch):
    mixer, x = moved(), torch.randn(2, 30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outs = []
    for chunk in (64, 7):
        monkeypatch.setattr(s4, "CHUNK", chunk)
        outs.append(mixer(x))
    torch.testing.assert_close(outs[0], outs[1])
