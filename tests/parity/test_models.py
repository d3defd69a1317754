"""Every preset computes what the published model computes: logits, loss, every gradient, cached decoding."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import glassformer as gf
from glassformer.architectures import PRESETS
from glassformer.model import Model
from glassformer.parts.region import compiled_regions, region

from .families import COMPOSED, PUBLISHED, ROLES, TINY, Tiny, close, pair, translate
from .published import CONFIGS, NO_CLASS

NAMES = [*PUBLISHED, *COMPOSED]


def tokens_of(size: Tiny, batch: int, length: int, seed: int) -> Tensor:
    return torch.randint(size.vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def compare(name: str, mine: Model, other: nn.Module, tokens: Tensor) -> None:
    """Logits, loss, and the gradients of a random functional of the logits and of the loss."""
    expected = other(tokens).logits
    close(mine(tokens), expected)
    probe = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    loss = F.cross_entropy(other(inputs).logits.flatten(0, 1), targets.flatten())
    close(mine.loss(inputs, targets), loss)
    for my_end, their_end in (
        ((mine(tokens) * probe).sum(), (expected * probe).sum()),
        (mine.loss(inputs, targets), loss),
    ):
        my_grads = torch.autograd.grad(my_end, list(mine.parameters()))
        their_grads = torch.autograd.grad(their_end, list(other.parameters()))
        paths = [path for path, _ in other.named_parameters()]
        wanted = translate(mine, name, dict(zip(paths, their_grads, strict=True)))
        for (path, _), grad in zip(mine.named_parameters(), my_grads, strict=True):
            try:
                close(grad, wanted[path])
            except AssertionError as error:
                raise AssertionError(f"gradient of {path}: {error}") from None


def test_table_is_complete() -> None:
    assert set(PUBLISHED) | set(CONFIGS) | NO_CLASS == set(PRESETS) and not set(PUBLISHED) & set(CONFIGS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes(name: str) -> None:
    """The preset has the sizes of the published config.json."""
    config = PRESETS[name]()
    block = next(config.layers())
    mixer = block.mixer
    have = {
        "layers": config.n_layers,
        "d": config.d_model,
        "n": getattr(mixer, "n_heads", None),
        "g": getattr(mixer, "n_kv_heads", None),
        "h": getattr(mixer, "head_dim", None),
        "p": getattr(mixer, "d_state", None),
        "conv": getattr(mixer, "d_conv", None),
        "f": block.ffn and block.ffn.width(config.ctx),
        "context": config.context,
        "window": getattr(getattr(mixer, "visibility", None), "window", None),
        "vocab": config.vocab_size,
    }
    want = {ROLES[key]: value for key, value in PUBLISHED[name][1].items() if key in ROLES}
    assert {key: have[key] for key in want} == want


@pytest.mark.parametrize(
    ("size", "batch", "length", "seed"), [(TINY[0], 2, 13, 0), (TINY[1], 1, 24, 1), (TINY[2], 3, 7, 2)]
)
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients(name: str, size: Tiny, batch: int, length: int, seed: int) -> None:
    mine, other = pair(name, size, seed)
    compare(name, mine, other, tokens_of(size, batch, length, seed))


BLOCKS = "banded+mixer.kernel.block=4"  # several of them


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        *product(("llama-3-8b", "mistral-7b", "bloom-560m", "falcon-7b"), ("naive", "sdpa", BLOCKS)),
        *product(("gemma-2",), ("naive", BLOCKS)),  # sdpa knows no softcap
    ],
)
def test_kernels(name: str, kernel: str) -> None:
    """Each kernel by name."""
    size = TINY[0]
    mine, other = pair(name, size, 5, change=f"+mixer.kernel={kernel}")
    compare(name, mine, other, tokens_of(size, 2, 22, 5))


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "bloom-560m", "falcon-40b", "mpt-7b", "gemma-2", "mamba-130m"])
def test_fused_regions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bodies that training compiles are run uncompiled, with their hand-written gradients."""
    monkeypatch.setattr(region, "__call__", lambda self, *args: self.body(*args))
    size = TINY[0]
    mine, other = pair(name, size, seed=4)
    with compiled_regions():
        compare(name, mine, other, tokens_of(size, 2, 13, 4))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gpt2", "+ffn.activation=gelu"),
        ("gpt2", "+norm.eps=1e-6"),
        ("llama-7b", "+norm.eps=1e-5"),
        ("llama-7b", "+position.pairing=interleaved"),
        ("llama-3-8b", "+position.base=10000"),
        ("mistral-7b", "+causal"),
        ("qwen3-8b", "+mixer.qk_norm.after_position=true"),
        ("qwen3-8b", "+mixer.qk_norm.norm.eps=1e-5"),
        ("bloom-7b1", "+mixer.position.max_bias=7.9"),
        ("bloom-7b1", "+ffn.activation=gelu"),
        ("falcon-7b", "+ffn.activation=gelu_tanh"),
        ("falcon-40b", "+pre"),
        ("gpt-neox-20b", "+pre"),
        ("gpt-neox-20b", "+position.fraction=0.5"),
        ("pythia-160m", "+ffn.activation=gelu_tanh"),
        ("mpt-7b", "+mixer.position=none"),
        ("gemma-2", "+norm.unit_offset=false"),
        ("gemma-2", "+softcap:3"),
        ("gemma-2", "+ffn.activation=gelu"),
        ("mamba-130m", "+norm.eps=1e-6"),
    ],
)
def test_a_wrong_wiring_is_seen(name: str, change: str) -> None:
    """The comparison can fail: the same weights in a model with one thing wrong."""
    size = TINY[0]
    mine, other = pair(name, size, change=change)
    with pytest.raises(AssertionError):
        compare(name, mine, other, tokens_of(size, 2, 13, 0))


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "llama-3-8b",
        "mistral-7b",
        "qwen3-0.6b",
        "bloom-560m",
        "falcon-7b",
        "falcon-40b",
        "pythia-160m",
        "mpt-7b",
        "mamba-130m",
    ],
)
def test_cached_decoding(name: str) -> None:
    """Greedy decoding of 8 tokens: their tokens and their logits; the prompt outgrows the window."""
    size = TINY[1]
    mine, other = pair(name, size, seed=3)
    tokens = tokens_of(size, 2, 9, 3)
    made = other.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=8,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert made.sequences[:, 9:].unique().numel() >= 2  # something to get wrong
    assert torch.equal(gf.generate(mine, tokens, max_new_tokens=8), made.sequences)

    state = mine.init_state(batch=2, max_len=17)
    with torch.no_grad():
        steps = [mine(tokens, state)] + [mine(made.sequences[:, at : at + 1], state) for at in range(9, 16)]
    for step, logits in zip(steps, made.logits, strict=True):
        close(step[:, -1], logits)
