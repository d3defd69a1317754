"""Linformer against its formula; what it refuses, and why."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import glassformer as gf
from glassformer.errors import RequestError
from glassformer.parts.forward_pass import Pass
from glassformer.parts.mixer import Linformer
from tests.refused import refused

SIZE = "layers=2+d_model=32+heads=4+vocab_size=61+context=64"


def definition(mixer: Linformer, x: Tensor) -> Tensor:
    """Returns Linformer attention over one document, head by head."""
    q, k, v = (part.unflatten(-1, (mixer.n_heads, -1)) for part in mixer.qkv(x).split(mixer.qkv.outs, dim=-1))
    z, s = torch.zeros_like(v), x.shape[1]
    for n in range(mixer.n_heads):
        e = mixer.E[n if len(mixer.E) > 1 else 0, :s]
        f = e if mixer.F is None else mixer.F[n if len(mixer.F) > 1 else 0, :s]
        scores = q[:, :, n] @ (e.t() @ k[:, :, n]).mT / mixer.head_dim**0.5
        z[:, :, n] = scores.softmax(-1) @ (f.t() @ v[:, :, n])
    return mixer.output(z.flatten(-2))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("share", ["each", "heads", "kv"])
def test_it_is_its_formula(share: str, packed: bool):
    """Outputs and every gradient are the formula's; packed documents are read as separate ones."""
    made = torch.Generator().manual_seed(1)
    mixer = Linformer(12, 3, length=11, keys=4, share=share, bias=True).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.add_(torch.randn(weight.shape, generator=made, dtype=weight.dtype), alpha=0.3)
    x = torch.randn(2, 9, 12, dtype=torch.float64, generator=made, requires_grad=True)
    documents = torch.tensor([[1] * 4 + [2] * 5, [0] * 2 + [1] * 6 + [3]]) if packed else None
    if packed:
        parts = [[definition(mixer, part) for part in x[row : row + 1].split(sizes, 1)] for row, sizes in
                 ((0, [4, 5]), (1, [2, 6, 1]))]  # fmt: skip
        wanted = torch.cat([torch.cat(row, dim=1) for row in parts])
    else:
        wanted = definition(mixer, x)
    found = mixer(x, Pass(0, 9, documents=documents))
    torch.testing.assert_close(found, wanted)
    over = [x, *mixer.parameters()]
    for mine, theirs in zip(
        torch.autograd.grad(found.sin().sum(), over), torch.autograd.grad(wanted.sin().sum(), over), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_causal_linformer_is_refused():
    """A request for one is refused with the reason, wherever it comes from."""
    with refused(code="conflict", field="mixer.visibility"):
        gf.preset(f"llama@1m+{SIZE}+linformer:8+causal")
    with refused(code="conflict", field="mixer.visibility"):
        gf.preset(f"llama@1m+{SIZE}+linformer:8+window:4")
    model = gf.preset(f"llama@1m+{SIZE}+linformer:8+bidirectional").build(seed=0)
    assert not model.causal
    with refused(code="conflict", field="mixer.kind"):
        model.init_state(1, 8)
    with pytest.raises(RequestError):
        gf.generate(model, tokens=torch.arange(4)[None], max_new_tokens=2)


def test_linformer_refuses_documents_beyond_its_length():
    mixer = Linformer(16, 2, length=8, keys=3)
    with refused(code="range", field="mixer.length"):
        mixer(torch.randn(1, 9, 16))
    packed = Pass(0, 12, documents=torch.tensor([[1] * 3 + [2] * 9]))
    with refused(code="range", field="mixer.length") as error:
        mixer(torch.randn(1, 12, 16), packed)
    assert error.value.value == 9
    assert mixer(torch.randn(1, 12, 16), Pass(0, 12, documents=torch.tensor([[1] * 5 + [2] * 7]))).isfinite().all()
    for change in ("mixer.keys=0", "mixer.length=0", "mixer.share=all", "mup"):
        with pytest.raises(RequestError):
            gf.preset(f"llama@1m+{SIZE}+linformer:8+{change}").build()
