"""A decoding step as instructions: equal to the model's own in any company, and not used where a model is changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import glassformer as gf
from glassformer.generation import native_step as module
from glassformer.generation.native_step import NativeStep, NoInstructions, native_step
from glassformer.generation.steps import decode, prefill_rows
from glassformer.machine import native
from glassformer.model import Model
from glassformer.parts import few_rows
from glassformer.parts.core.site import edit_at, look_at
from glassformer.parts.forward_pass import Pass
from glassformer.parts.quantized import QuantizedLinear, quantize
from glassformer.parts.reparam import SigmaReparam
from glassformer.parts.residual.pre import Pre

from .test_few_rows import SANITIZED, runs_avx2

pytestmark = pytest.mark.skipif(not few_rows.kernel(), reason="no kernel for this processor, or no compiler here")

WRITTEN = [
    "llama@1m", "gpt2@1m", "bloom@1m", "falcon@1m", "gpt-neox@1m", "gemma-2-2b@1m", "qwen3@1m",
    "llama@1m+window:4", "llama@1m+softcap:5+sinks", "llama@1m+qknorm:full", "llama@1m+qknorm:each_head",
    "llama@1m+parallel", "llama@1m+gqa:2+sandwich", "llama@1m+post", "llama@1m+deepnorm", "llama@1m+geglu",
    "llama@1m+relu2", "llama@1m+respost", "llama@1m+noresidual", "llama@1m+mqa+nonorm", "llama@1m+mup:16",
    "llama@1m+mixer.gated=true", "llama@1m+mixer.value_dim=24", "llama@1m+mixer.clip=0.1",
    "gpt2@1m+d_model=36+heads=3",
]  # fmt: skip
"""Models with instructions for every part."""


def model_of(expression: str, dtype: torch.dtype = torch.float32) -> Model:
    """Returns a model with random norms and biases."""
    torch.manual_seed(0)
    model: Model = gf.preset(f"{expression}+vocab_size=300").build().to(dtype).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.add_(torch.randn(weight.shape).to(dtype) / 10)
    return model


def unlike(model: Model, definition: Model, lengths: list[int], steps: int = 6, dtype: Any = None) -> float:
    """Returns the largest distance of the step's logits from those of `definition`, of the length of these, for rows
    that have read `lengths` tokens."""
    draw, rows = torch.Generator().manual_seed(1), len(lengths)
    step, worst = NativeStep(model), 0.0
    with torch.inference_mode():
        prompts = [torch.randint(model.vocab_size, (length,), generator=draw) for length in lengths]
        mine, theirs = (model.init_state(rows, 32, dtype) for _ in range(2))
        for state in (mine, theirs):
            prefill_rows(definition, prompts, state)
        assert step.serves(mine)
        for _ in range(steps):
            tokens = torch.randint(model.vocab_size, (rows, 1), generator=draw)
            expected, found = definition(tokens, theirs)[:, -1].float(), step(model, tokens, mine)
            worst = max(worst, float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max()))
        assert mine.length == theirs.length and (mine.rows is None or torch.equal(mine.rows, theirs.rows))
    return worst


@pytest.mark.parametrize("expression", WRITTEN)
def test_a_step_is_the_model_s_own(expression: str) -> None:
    model = model_of(expression)
    assert unlike(model, model, [9]) < 2e-5
    assert unlike(model, model, [3, 9, 1]) < 2e-5


@settings(max_examples=10, deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3), (3, 1)]),
    width=st.sampled_from([2, 6, 8, 18, 24]),
    hidden=st.integers(1, 40),
    layers=st.integers(1, 3),
    words=st.sampled_from(["", "+window:3", "+alibi", "+qknorm", "+interleaved", "+bias"]),
)
def test_native_step_serves_widths_of_partial_vectors(
    heads: tuple[int, int], width: int, hidden: int, layers: int, words: str
) -> None:
    n, g = heads
    fields = f"+mixer.n_heads={n}+mixer.n_kv_heads={g}+mixer.head_dim={width}+ffn.hidden={hidden}+layers={layers}"
    words = {"+interleaved": "+mixer.position.pairing=interleaved", "+bias": "+mixer.bias=true+ffn.bias=true"}.get(
        words, words
    )
    model = model_of(f"llama@0.1m+d_model=20{fields}{words}")
    assert unlike(model, model, [2, 5], 4) < 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_narrow_states_are_read_as_they_were_written(dtype: torch.dtype) -> None:
    """Both round the same vectors, but for ties that fall to another side: one unit of the last of 8 bits."""
    model = model_of("llama@1m+gqa:2")
    assert unlike(model, model, [4, 11], dtype=dtype) < 2e-3


def widened(model: Model, packed: Model) -> Model:
    """Gives a model in fp32 the values that packed matrices have."""
    for path, part in packed.named_modules():
        if isinstance(part, QuantizedLinear) and path != "head.packed":
            model.get_submodule(path).weight.copy_(part.weight)  # type: ignore[operator, union-attr]
    head: Any = packed.head.packed
    if head is not None:
        model.head.weight, model.head.tied = torch.nn.Parameter(head.weight, requires_grad=False), False
    return model


@pytest.mark.parametrize("kind", ["bf16 weights", "int8", "int4"])
@pytest.mark.parametrize("expression", ["llama@1m", "gpt2@1m", "falcon@1m+d_model=72+heads=3"])
def test_packed_weights_are_multiplied_to_fp32(kind: str, expression: str) -> None:
    """Against the same values in fp32, without the roundings to bf16 that eager operations make on their way."""
    model, wide = model_of(expression, torch.bfloat16), model_of(expression, torch.bfloat16).float()
    if kind != "bf16 weights":
        quantize(model, kind)
        wide = widened(wide, model)
    assert unlike(model, wide, [9, 4], dtype=torch.float32) < 1e-3


@pytest.mark.parametrize("expression", ["llama@1m", "bloom@1m+window:4"])
@pytest.mark.parametrize("kind", ["", "int8", "int4"])
def test_a_row_has_the_same_bits_in_any_company(expression: str, kind: str) -> None:
    model = model_of(expression, torch.bfloat16)
    if kind:
        quantize(model, kind)
    step, before = NativeStep(model), torch.get_num_threads()
    tokens = torch.randint(model.vocab_size, (7, 1), generator=torch.Generator().manual_seed(2))
    found: list[Tensor] = []
    with torch.inference_mode():
        for threads, rows in ((1, [0, 1, 2, 3, 4, 5, 6]), (2, [3]), (2, [3, 0, 5, 6]), (1, [5, 3])):
            torch.set_num_threads(threads)
            try:
                state = model.init_state(len(rows), 24)
                prefill_rows(model, [torch.arange(1 + row) for row in rows], state)
                for _ in range(3):
                    y = step(model, tokens[rows], state)
            finally:
                torch.set_num_threads(before)
            found.append(y[rows.index(3)])
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize(
    "expression", ["llama@1m+gqa:2", "bloom@1m+window:4", "llama@1m+window:4", "gpt2@1m", "llama@1m+mixer.gated=true"]
)
@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
def test_tokens_read_at_once_have_the_bits_of_tokens_read_one_by_one(expression: str, kind: str) -> None:
    model = model_of(expression, torch.float32 if kind == "fp32" else torch.bfloat16)
    if kind != "fp32":
        quantize(model, kind)
    step, tokens = NativeStep(model), torch.randint(300, (1, 11), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        for start, rewind in ((0, 0), (1, 3), (7, 10)):
            states = [model.init_state(1, 32, rewind=rewind) for _ in range(3)]
            for state in states:
                if start:
                    model(torch.arange(start)[None], state)
            each = torch.cat([step(model, tokens[:, i : i + 1], states[0]) for i in range(11)])
            assert torch.equal(step(model, tokens, states[1], every=True), each)
            assert torch.equal(step(model, tokens, states[2]), each[-1:])
            assert all(state.length == start + 11 for state in states)
            after = [step(model, tokens[:, :1], state) for state in states]
            assert torch.equal(after[1], after[0]) and torch.equal(after[2], after[0])
            expected = model(tokens, fresh := model.init_state(1, 32, rewind=rewind)) if not start else None
            if expected is not None and kind == "fp32":
                assert float((each - expected[0]).norm() / each.norm()) < 2e-5 and fresh.length == 11


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_nan_stays_in_its_row(odd: float) -> None:
    model = model_of("llama@1m")
    step, tokens = NativeStep(model), torch.tensor([[1], [2], [3]])
    with torch.inference_mode():
        whole, spoilt = (model.init_state(3, 16) for _ in range(2))
        for state in (whole, spoilt):
            model(torch.ones(3, 4, dtype=torch.long), state)
        spoilt.layers[0].tensors()["v"][1, :, 2] = odd
        before, after = step(model, tokens, whole), step(model, tokens, spoilt)
    assert after[1].isnan().all() and torch.equal(before[[0, 2]], after[[0, 2]])


@pytest.mark.parametrize("scaling", ["", "+yarn:4", "+dynamic_ntk:4", "+mixer.position.pairing=interleaved"])
def test_turns_at_every_length_are_those_of_the_encoding(scaling: str) -> None:
    model = model_of(f"llama@0.1m+context=200{scaling}")
    rotary: Any = model.layers[0].mixer.position  # type: ignore[union-attr]
    table = module._Turns([rotary], Pass(0, 512), 512)._held[0]
    for length in (0, 1, 7, 199, 255, 511):
        pass_ = Pass(length, length + 1) if not model.settled else Pass(0, 512)
        each = [module._by_row(one)[-1 if not model.settled else length] for one in rotary.tables(pass_)]
        assert all(torch.equal(one[length], meant) for one, meant in zip(table, each, strict=True))


@pytest.mark.parametrize("words", ["", "+dynamic_ntk:4"])
def test_a_text_grows_past_the_first_table(words: str) -> None:
    model = model_of(f"llama@0.1m+context=200{words}")
    step, tokens = NativeStep(model), torch.tensor([[1], [2]])
    with torch.inference_mode():
        mine, theirs = (model.init_state(2, 300) for _ in range(2))
        for state in (mine, theirs):
            prefill_rows(model, [torch.arange(253), torch.arange(3)], state)
        for _ in range(5):
            found, expected = step(model, tokens, mine), model(tokens, theirs)[:, -1]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", ["", "+embedding.scale=3.3"])
def test_rows_of_the_table_have_the_bits_of_the_embedding(words: str, dtype: torch.dtype) -> None:
    model, tokens = model_of(f"llama@0.1m{words}", dtype), torch.tensor([[7], [0], [299]])
    step = NativeStep(model)
    assert step.begin is None and step.listed[0].kind == module.EMBED
    step.listed = (module._Instruction * 1)(step.listed[0])
    step.logits = step.program.instructions[0]["out"]
    with torch.inference_mode():
        found = step(model, tokens, model.init_state(3, 4))
        assert torch.equal(found, model.embedding(tokens, Pass(0, 1))[:, 0].float())


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.integers(1, 150), st.integers(0, 5), st.randoms(use_true_random=False))
def test_largest_logits_are_torch_s(rows: int, width: int, kinds: int, draw: Any) -> None:
    values = [-float("inf"), 0.0, 1.5, -0.0, float("inf"), float("nan")][: kinds + 1]
    logits = torch.tensor([[draw.choice(values) for _ in range(width)] for _ in range(rows)])
    best, tokens = logits.max(-1)
    found = module.largest(logits)
    assert found is not None and torch.equal(found[0], tokens) and torch.equal(found[1], ~best.isfinite())
    wide = torch.cat([logits, torch.full((rows, 3), 9.0)], 1)[:, :width]
    assert all(torch.equal(one, meant) for one, meant in zip(module.largest(wide), found, strict=True))  # type: ignore[arg-type]


# The eager path serves


def served(model: Model, rows: int = 1) -> bool:
    with torch.inference_mode():
        return native_step(model, model.init_state(rows, 16)) is not None


@pytest.mark.parametrize("expression", ["llama@1m+mamba", "llama@1m+moe:4:2", "llama@1m+retention", "llama@1m+mla"])
def test_parts_without_instructions_are_left_to_the_eager_path(expression: str) -> None:
    model = model_of(expression)
    with pytest.raises(NoInstructions):
        NativeStep(model)
    assert not served(model)


class Scaled(Pre):
    """A wiring with a learned number, which a list of instructions would fix."""

    def feed(self, x: Tensor, ffn: Any) -> Tensor:
        assert self.ffn_norm is not None
        return x + self.gain * ffn(self.ffn_norm(x))


def test_a_learned_number_of_a_wiring_is_not_fixed() -> None:
    model = model_of("llama@1m")
    layer: Any = model.layers[0]
    layer.residual = Scaled(layer.residual.mixer_norm, layer.residual.ffn_norm)
    layer.residual.gain = torch.nn.Parameter(torch.tensor(2.0), requires_grad=False)
    with pytest.raises(NoInstructions):
        NativeStep(model)


def test_hooks_looks_and_edits_reach_every_step() -> None:
    model = model_of("llama@1m")
    assert served(model)
    hook = model.layers[1].mixer.register_forward_hook(lambda *_: None)  # type: ignore[union-attr, operator]
    assert not served(model)
    hook.remove()
    assert served(model)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not served(model)
    hook.remove()
    assert served(model)
    layer: Any = model.layers[1]
    layer.forward = layer.forward
    assert not served(model)
    del layer.forward
    site: Any = model.layers[0].mixer.z  # type: ignore[union-attr]
    with look_at([(site, lambda *_: None)]):
        assert not served(model)
    with edit_at([(site, lambda z: 0 * z)]):
        assert not served(model)
    assert served(model)


def test_gradients_and_training_are_the_model_s_own() -> None:
    model = model_of("llama@1m")
    state = model.init_state(1, 16)
    assert native_step(model, state) is None
    model.train()
    assert not served(model)


def test_replaced_part_or_tensor_has_new_instructions() -> None:
    model, tokens = model_of("llama@1m"), torch.tensor([[5]])

    def decoded() -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            assert served(model)
            return decode(model, tokens, model.init_state(1, 16)), model(tokens, model.init_state(1, 16))[:, -1]

    first, _ = decoded()
    with torch.no_grad():
        model.layers[0].ffn.up_proj.weight.mul_(2)  # type: ignore[union-attr, operator]
    second, expected = decoded()
    torch.testing.assert_close(second, expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(first, second)
    model.to(torch.bfloat16)
    third, expected = decoded()
    assert float((third - expected.float()).norm() / third.norm()) < 0.03
    model.float()
    model.layers[0].mixer = model_of("llama@1m+qknorm").layers[1].mixer  # type: ignore[union-attr]
    torch.testing.assert_close(*decoded(), rtol=1e-4, atol=1e-5)
    output: Any = model.layers[0].mixer.output  # type: ignore[union-attr]
    output.reparam = SigmaReparam(output.in_features, output.outs)
    assert not served(model)


def test_replaced_codes_have_new_instructions() -> None:
    model, tokens = model_of("llama@1m", torch.bfloat16), torch.tensor([[5]])
    quantize(model, "int8")
    with torch.inference_mode():
        first = decode(model, tokens, model.init_state(1, 16))
    up: Any = model.layers[0].ffn.up_proj  # type: ignore[union-attr]
    up.packed = up.packed.flip(0)
    with torch.inference_mode():
        assert not torch.equal(decode(model, tokens, model.init_state(1, 16)), first)
    up.packed.data = up.packed.flip(0)
    with torch.inference_mode():
        assert torch.equal(decode(model, tokens, model.init_state(1, 16)), first)


def test_a_full_state_and_an_unknown_token_are_refused_as_by_the_model() -> None:
    model = model_of("llama@1m")
    with torch.inference_mode():
        state = model.init_state(1, 4)
        model(torch.ones(1, 4, dtype=torch.long), state)
        with pytest.raises(gf.RequestError) as refusal:
            decode(model, torch.tensor([[1]]), state)
        assert refusal.value.field == "state.max_len"
        with pytest.raises(IndexError):
            decode(model, torch.tensor([[model.vocab_size]]), model.init_state(1, 4))


def test_without_a_kernel_the_model_decodes_as_before(tmp_path: Path) -> None:
    script = (
        "import torch, glassformer as gf\n"
        "from glassformer.generation.native_step import native_step\n"
        "model = gf.preset('llama@0.1m').build().eval()\n"
        "with torch.inference_mode(): print(native_step(model, model.init_state(1, 8)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, native.SWITCH: native.NONE}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "None", done.stderr


@runs_avx2
@pytest.mark.slow
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """The tests above, with C++ that checks its own reads and writes."""
    target = tmp_path / "step.so"
    native.build(module.SOURCE, target, (*SANITIZED, *native.KERNELS["avx2"].options, "-fPIC", "-shared"))
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    script = (
        "import ctypes, sys, pytest\n"
        "from glassformer.generation import native_step\n"
        "from glassformer.machine import native\n"
        "found = native.shared_object\n"
        f"watched = ctypes.CDLL({str(target)!r})\n"
        "native.shared_object = lambda one, *rest: watched if one == native_step.SOURCE else found(one, *rest)\n"
        f"chosen = ['-q', '-p', 'no:cacheprovider', {__file__!r}, '-k', 'own or widths or odd or narrow']\n"
        "sys.exit(pytest.main(chosen))\n"
    )
    env = {**os.environ, "LD_PRELOAD": ":".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "100%" in done.stdout, (done.stdout + done.stderr)[-3000:]
