"""Mamba-2, the gated delta rule and the RG-LRU against their published classes, step by step against at once; initial
weights, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

import glassformer as gf
from glassformer.errors import RequestError
from glassformer.parts.forward_pass import Pass
from glassformer.parts.mixer import GRU, LSTM, RGLRU, S4, Conv, GatedDeltaNet, Mamba2
from glassformer.parts.mup import parameter_groups
from tests.refused import refused

D = 24


def moved(module: nn.Module) -> Any:
    """Every parameter moved off its start; fp32 as the published classes cast to it."""
    made = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn(weight.shape, generator=made), alpha=0.3)
    return module.eval()


def compare(mine: nn.Module, theirs: nn.Module, names: dict[str, Any], s: int) -> None:
    """Outputs, the gradient of x, and that of every parameter: `names` says ours -> what theirs are in our layout."""
    x = torch.randn(2, s, D, generator=torch.Generator().manual_seed(1))
    probe = torch.randn(2, s, D, generator=torch.Generator().manual_seed(2))
    found = []
    for module in (mine, theirs):
        given = x.clone().requires_grad_()
        y = module(given)
        (y * probe).sum().backward()
        found.append((y, given.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.detach().abs().max()))
    scale = max(float(weight.grad.abs().max()) for weight in theirs.parameters())  # type: ignore[union-attr]
    for name, weight in mine.named_parameters():
        wanted = names[name](lambda one: theirs.get_parameter(one).grad)
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, wanted, rtol=1e-4, atol=2e-5 * scale, msg=name)


@pytest.mark.parametrize(("s", "groups"), [(150, 1), (64, 2), (5, 3)])
def test_mamba2_is_the_published_class(s: int, groups: int):
    config = transformers.Mamba2Config(
        hidden_size=D, num_heads=12, head_dim=4, n_groups=groups, state_size=6, chunk_size=32, num_hidden_layers=1,
        time_step_limit=(0.02, 0.7),
    )  # fmt: skip
    theirs = moved(Mamba2Mixer(config, 0))
    mine = Mamba2(D, 6, 4, groups, dt_least=0.02, dt_most=0.7)
    names = {name: (lambda of, name=name, shape=w.shape: of(name).view(shape)) for name, w in mine.named_parameters()}
    mine.load_state_dict({name: names[name](theirs.get_parameter) for name in names})
    compare(mine.eval(), theirs, names, s)


def laid_out(g: int, n: int, h: int, hv: int) -> dict[str, Any]:
    """Returns functions from the published maps, whose rows are grouped by KV head, to ours."""

    def qkvz(w: Tensor) -> list[Tensor]:
        parts = w.view(g, -1, *w.shape[1:]).split((h, h, n // g * hv, n // g * hv), dim=1)
        return [part.flatten(0, 1) for part in parts]

    def ba(w: Tensor) -> list[Tensor]:
        return [part.flatten(0, 1) for part in w.view(g, -1, *w.shape[1:]).chunk(2, dim=1)]

    same = ("conv1d.weight", "dt_bias", "A_log", "norm.weight", "out_proj.weight")
    return {
        "in_proj.weight": lambda of: torch.cat([*qkvz(of("in_proj_qkvz.weight")), *ba(of("in_proj_ba.weight"))]),
        **{name: (lambda of, name=name: of(name)) for name in same},
    }


@pytest.mark.parametrize(("s", "g", "n"), [(150, 2, 2), (64, 1, 3), (5, 2, 4)])
def test_gated_deltanet_is_the_published_class(s: int, g: int, n: int):
    config = transformers.Qwen3NextConfig(
        hidden_size=D, linear_num_key_heads=g, linear_num_value_heads=n, linear_key_head_dim=6,
        linear_value_head_dim=5, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    theirs = moved(Qwen3NextGatedDeltaNet(config, 0))
    mine, names = GatedDeltaNet(D, g, 6, n, 5), laid_out(g, n, 6, 5)
    mine.load_state_dict({name: names[name](theirs.get_parameter) for name in names})
    compare(mine.eval(), theirs, names, s)


@pytest.mark.parametrize(("s", "n"), [(37, 3), (5, 1)])
def test_rglru_is_the_published_class(s: int, n: int):
    config = transformers.RecurrentGemmaConfig(
        hidden_size=D, lru_width=D, num_attention_heads=n, num_hidden_layers=1, intermediate_size=8,
    )  # fmt: skip
    theirs, mine = RecurrentGemmaRecurrentBlock(config, 0), RGLRU(D, n)
    for weight in theirs.parameters():  # which it leaves as the memory was
        nn.init.normal_(weight, std=0.3)
    one_for_one = {
        "conv1d.weight": "conv_1d.weight", "conv1d.bias": "conv_1d.bias", "Lambda": "rg_lru.recurrent_param",
        "out_proj.weight": "linear_out.weight", "out_proj.bias": "linear_out.bias",
        **{f"{mine}_gate.{leaf}": f"rg_lru.{name}_gate_{leaf}" for mine, name in (("r", "recurrent"), ("i", "input"))
           for leaf in ("weight", "bias")},
    }  # fmt: skip
    shapes = {name: weight.shape for name, weight in mine.named_parameters()}
    names: dict[str, Any] = {
        ours: (lambda of, name=name, shape=shapes[ours]: of(name).view(shape)) for ours, name in one_for_one.items()
    }
    for leaf in ("weight", "bias"):
        names[f"in_proj.{leaf}"] = lambda of, leaf=leaf: torch.cat([of(f"linear_{one}.{leaf}") for one in "xy"])
    mine.load_state_dict({name: names[name](theirs.get_parameter) for name in names})

    class Called(nn.Module):
        """The published class, called with only an input."""

        def __init__(self) -> None:
            super().__init__()
            self.block = theirs

        def forward(self, x: Tensor) -> Tensor:
            return theirs(x, torch.arange(x.shape[1])[None].expand(len(x), -1), None, use_cache=False)[0]

    inside = {name: (lambda of, get=get: get(lambda one: of(f"block.{one}"))) for name, get in names.items()}
    compare(mine.eval(), Called(), inside, s)


MIXERS = {
    "mamba2": lambda: Mamba2(D, 5, 8, 2),
    "gated_deltanet": lambda: GatedDeltaNet(D, 2, 4, 4, 3),
    "rglru": lambda: RGLRU(D, 3, 30),
    "lstm": lambda: LSTM(D, 20),
    "gru": lambda: GRU(D, 20, bias=False),
    "conv": lambda: Conv(D, 5),
    "s4": lambda: S4(D, 6),
    "s4 real": lambda: S4(D, 5, real=True, discretization="bilinear"),
}


@pytest.mark.parametrize("name", MIXERS)
def test_recurrent_state_continues_and_rewinds(name: str):
    """Read in any pieces, taken back by any number of tokens up to `rewind`, and read on: as if read at once."""

    @given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 7))
    @settings(max_examples=12, deadline=None)
    def run(pieces: list[int], rewind: int) -> None:
        mixer, s = moved(MIXERS[name]()).double(), sum(pieces)
        x = torch.randn(2, s + 4, D, dtype=torch.float64)
        with torch.no_grad():
            full, memory, read = mixer(x), mixer.init_state(2, s + 4, torch.float64, rewind=rewind), 0
            for size in pieces:
                piece = mixer(x[:, read : read + size], Pass(read, read + size), memory)
                torch.testing.assert_close(piece, full[:, read : read + size])
                read += size
            back = max(0, s - rewind)
            memory.truncate(back)
            torch.testing.assert_close(mixer(x[:, back:], Pass(back, s + 4), memory), full[:, back:])
        if s > rewind + 1:
            with refused(code="unsupported", field="length"):
                memory.truncate(1)

    run()


@pytest.mark.parametrize("name", MIXERS)
def test_documents_longer_than_a_chunk_are_separate_sequences(name: str):
    """In outputs and in the gradient of every parameter."""
    mixer, lengths = moved(MIXERS[name]()).double(), [70, 1, 3, 130]
    x = torch.randn(2, sum(lengths), D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    documents = torch.repeat_interleave(torch.tensor([4, 9, 1, 2]), torch.tensor(lengths)).expand(2, -1)
    packed = mixer(x, Pass(0, x.shape[1], documents=documents))
    apart = torch.cat([mixer(part) for part in x.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, apart)
    weights = list(mixer.parameters())
    for mine, wanted in zip(*(torch.autograd.grad(y.sin().sum(), weights) for y in (packed, apart)), strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("name", MIXERS)
def test_no_token_changes_the_past_of_many_chunks(name: str):
    mixer = moved(MIXERS[name]()).double()
    x = torch.randn(1, 200, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = mixer(x)
        for j in (0, 63, 64, 100, 199):
            changed = x.clone()
            changed[:, j] += 1e3
            after = mixer(changed)
            torch.testing.assert_close(after[:, :j], before[:, :j], rtol=0, atol=1e-13)
            assert not torch.equal(after[:, j], before[:, j])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MIXERS)
def test_recurrences_in_16_bits_sum_in_fp32(name: str, dtype: torch.dtype):
    """Steps so large that sums of products would leave the range of fp16, and rounding would add up in bf16."""
    mixer = moved(MIXERS[name]())
    x = 8 * torch.randn(1, 500, D, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, narrow = mixer(x), mixer.to(dtype)(x.to(dtype))
        state = mixer.init_state(1, 500, dtype)
        steps = [mixer(x[:, i : i + 1].to(dtype), Pass(i, i + 1), state) for i in range(40)]
    assert narrow.dtype == dtype and narrow.isfinite().all()
    assert float((narrow.float() - wanted).norm() / wanted.norm()) < (0.02 if dtype == torch.float16 else 0.1)
    assert float((torch.cat(steps, 1).float() - wanted[:, :40]).norm() / wanted[:, :40].norm()) < 0.1


def test_initial_rates_and_steps_are_the_published_ones():
    """-A between 1 and 16, steps spread evenly in their logarithm, and nothing but matrices decays."""
    for mixer in (Mamba2(512, dt_min=0.01, dt_max=0.05), GatedDeltaNet(512, 128, 4, dt_min=0.01, dt_max=0.05)):
        rates = mixer.A_log.detach().exp()
        assert rates.min() >= 1 and rates.max() <= 16
        steps = nn.functional.softplus(mixer.dt_bias).log()
        assert math.log(0.01) <= steps.min() + 1e-4 and steps.max() <= math.log(0.05) + 1e-4
        decays = {id(weight) for weight in parameter_groups(mixer, 1.0, 0.1, {})[0]["params"]}
        found = {name for name, weight in mixer.named_parameters() if id(weight) in decays}
        assert found == {"in_proj.weight", "out_proj.weight"}
    s4 = S4(8, 6)
    decays = {id(weight) for weight in parameter_groups(s4, 1.0, 0.1, {})[0]["params"]}
    assert {name for name, weight in s4.named_parameters() if id(weight) in decays} == {"out_proj.weight"}


@pytest.mark.parametrize(
    ("expression", "code", "field"),
    [
        ("mamba2+mixer.head_dim=48", "range", "mixer.head_dim"),
        ("mamba2+mixer.n_groups=3", "range", "mixer.n_groups"),
        ("mamba2+mixer.d_state=0", "range", "stack.0.blocks.0.mixer.d_state"),
        ("mamba2+mixer.dt_least=2+mixer.dt_most=1", "conflict", "stack.0.blocks.0.mixer.dt_least"),
        ("mamba2+mixer.dt_min=1", "conflict", "stack.0.blocks.0.mixer.dt_min"),
        ("mamba2+mixer.dt_least=-1", "range", "stack.0.blocks.0.mixer.dt_least"),
        ("mamba2+mup", "conflict", "mup"),
        ("mamba2+gqa:2", "unsupported", "mixer.n_kv_heads"),
        ("gated_deltanet+mixer.n_v_heads=6", "range", "mixer.n_v_heads"),
        ("gated_deltanet+mixer.n_heads=5", "range", "n_heads"),
        ("gated_deltanet+mixer.head_dim=0", "range", "stack.0.blocks.0.mixer.head_dim"),
        ("gated_deltanet+mixer.d_conv=1", "range", "stack.0.blocks.0.mixer.d_conv"),
        ("gated_deltanet+mup", "conflict", "mup"),
        ("s4+mixer.d_state=5", "range", "stack.0.blocks.0.mixer.d_state"),
        ("s4+mixer.d_state=0", "range", "stack.0.blocks.0.mixer.d_state"),
        ("s4+mixer.dt_max=1e-4", "conflict", "stack.0.blocks.0.mixer.dt_min"),
        ("s4+mixer.discretization=euler", "unknown", "stack.0.blocks.0.mixer.discretization"),
        ("s4+mup", "conflict", "mup"),
        ("rglru+mixer.n_heads=5", "range", "mixer.n_heads"),
        ("rglru+mixer.width=0", "range", "stack.0.blocks.0.mixer.width"),
        ("rglru+mup", "conflict", "mup"),
    ],
)
def test_wrong_requests_are_refused_in_a_sentence(expression: str, code: str, field: str):
    with refused(code=code, field=field):
        gf.preset(f"llama@1m+{expression}")


def test_a_module_made_by_hand_refuses_too():
    for make in (lambda: Mamba2(24, 4, 7), lambda: S4(8, 3), lambda: GatedDeltaNet(24, 2, 4, 3)):
        with pytest.raises(RequestError):
            make()
