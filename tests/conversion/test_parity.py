"""Every family, in and out: the published model and ours compute the same, and it loads its weights back from ours."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import glassformer as gf
from glassformer.conversion.exports import export_target
from glassformer.conversion.families import FAMILIES
from glassformer.conversion.weights import tensors
from glassformer.model import Model

from .cases import CASES, TWO_TOWERS
from .cases.base import Case

torch.set_num_threads(1)
TOLERANCE = 1e-5


def close(actual: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> float:
    """Asserts equality relative to the largest value; returns the error."""
    scale = expected.abs().max().clamp(min=1e-12)
    error = float(((actual - expected).abs().max() / scale).detach())
    assert error <= tolerance, f"{what}: relative error {error:.2e}"
    return error


def gradients(model: Model, family: str) -> dict[str, Tensor]:
    """Ours, under their names and in their layout."""
    ghost = copy.deepcopy(model)
    with torch.no_grad():
        for mine, real in zip(ghost.parameters(), model.parameters(), strict=True):
            assert real.grad is not None
            mine.copy_(real.grad)
    names, case = FAMILIES[family].names_of(model.config), CASES[family]
    kept = tuple(names.buffers.values()) or ("-",)  # which have no gradient
    found = {name: source for name, source in tensors(ghost, names).items() if not name.endswith(kept)}
    return case.gather({case.renamed.get(name, name): source() for name, source in found.items()})


def prove(family: str, fields: dict[str, Any], seed: int) -> dict[str, float]:
    """Asserts all properties of one model; returns the errors by name."""
    other = CASES[family].model(fields, seed)
    draw = torch.Generator().manual_seed(seed)
    tokens = drawn(CASES[family], other.config, draw)
    with TemporaryDirectory() as place:
        other.save_pretrained(f"{place}/theirs")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an unread field is an error
            loaded = gf.load(f"{place}/theirs", dtype=torch.float32)
        FAMILIES[family].as_ours(other, loaded.model)
        errors = compare(loaded.model, other, tokens, family)
        assert export_target(loaded.config, FAMILIES[family]).supported
        gf.save(loaded.model, None, f"{place}/ours", family=family)
        back = type(other).from_pretrained(f"{place}/ours", attn_implementation=CASES[family].attention)
        auto = auto_class(other).from_pretrained(f"{place}/ours")
        assert type(auto) is type(other)
        same(back, other, CASES[family].unused)
        FAMILIES[family].as_ours(back, loaded.model)
        inputs = theirs(loaded.model, tokens, family)
        close(answer(back(**inputs)), answer(other(**inputs)), "logits after saving", 1e-6)
        assert gf.load(f"{place}/ours").config.resolved() == loaded.config.resolved()
    return errors


def drawn(case: Case, config: Any, draw: torch.Generator) -> Tensor:
    """Draws the input of both models: tokens, or images."""
    if case.reads is not None:
        return case.reads(config.image_size, config.num_channels)
    return torch.randint(case.first_token, config.vocab_size, (2, 29), generator=draw)


def compare(mine: Model, other: nn.Module, tokens: Tensor, family: str) -> dict[str, float]:
    """Logits, the gradient of every parameter, and cached decoding, against theirs. Returns the errors."""
    outs = []
    for model, inputs in ((mine, ours_of(mine, tokens, family)), (other, theirs(mine, tokens, family))):
        model.zero_grad()
        out = answer(model(**inputs))
        probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        (out * probe).sum().backward()
        outs.append(out.detach())
    logits, expected = outs
    errors = {"logits": close(logits, expected, "logits")}
    ours: dict[str, Tensor] = gradients(mine, family)
    unused = CASES[family].unused
    wanted: dict[str, Any] = {
        name: p.grad for name, p in other.named_parameters() if p.requires_grad and unused not in name
    }
    assert set(ours) == set(wanted)
    scale = max(float(grad.abs().max()) for grad in wanted.values())
    for name, grad in ours.items():
        error = float((grad - wanted[name]).abs().max()) / scale
        assert error <= TOLERANCE, f"gradient of {name}: {error:.2e} of the largest"
        errors["gradients"] = max(error, errors.get("gradients", 0.0))
    if not mine.causal:
        return errors
    with torch.no_grad():
        state = mine.init_state(batch=2, max_len=30, memory_len=SOURCE)
        steps = [mine(**{**ours_of(mine, tokens, family), "tokens": tokens[:, :20]}, state=state)]
        steps += [mine(tokens[:, at : at + 1], state) for at in range(20, 29)]
        if mine.encoder is not None:
            errors["beams"] = beams(mine, other, tokens, state, family)
    if not _moving_frequencies(mine):
        errors["cached"] = close(torch.cat(steps, 1), expected, "cached decoding")
    return errors


def answer(out: Any) -> Tensor:
    """Returns the output tensor of our or their model: logits, a vector for each text, or hidden states."""
    named = (getattr(out, name, None) for name in ("logits", "pooler_output", "last_hidden_state"))
    return out if isinstance(out, Tensor) else next(one for one in named if one is not None)


AUTO = {
    "ForCausalLM": transformers.AutoModelForCausalLM, "LMHeadModel": transformers.AutoModelForCausalLM,
    "ForConditionalGeneration": transformers.AutoModelForSeq2SeqLM, "MTModel": transformers.AutoModelForSeq2SeqLM,
    "ForMaskedLM": transformers.AutoModelForMaskedLM,
    "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
    "ForImageClassification": transformers.AutoModelForImageClassification,
}  # fmt: skip


def auto_class(model: nn.Module) -> Any:
    """Returns the Auto class that builds a model of this class from its folder."""
    name = type(model).__name__
    return next((auto for end, auto in AUTO.items() if name.endswith(end)), transformers.AutoModel)


SOURCE = 17


def source_of(model: Model) -> tuple[Tensor, Tensor]:
    """Returns two sources (2, SOURCE), and a mask (2, SOURCE) that is 0 at padding."""
    source = torch.randint(3, model.vocab_size, (2, SOURCE), generator=torch.Generator().manual_seed(2))
    real = torch.ones(2, SOURCE, dtype=torch.int64)
    real[1, 11:] = 0
    return source, real


def ours_of(model: Model, tokens: Tensor, family: str) -> dict[str, Tensor]:
    """Returns the arguments of our model."""
    if model.encoder is None:
        return {"tokens": tokens, **CASES[family].also(tokens)[0]}
    return {"tokens": tokens, **dict(zip(("source", "source_documents"), source_of(model), strict=True))}


def theirs(model: Model, tokens: Tensor, family: str) -> dict[str, Tensor]:
    """Returns the arguments of the published model."""
    if model.encoder is None:
        read = "input_ids" if CASES[family].reads is None else "pixel_values"
        return {read: tokens, **CASES[family].also(tokens)[1]}
    return {"decoder_input_ids": tokens, **dict(zip(("input_ids", "attention_mask"), source_of(model), strict=True))}


def beams(mine: Model, other: nn.Module, tokens: Tensor, state: Any, family: str) -> float:
    """Returns the error of the step after the rows of a state are reordered, as in beam search."""
    index = torch.tensor([1, 1])
    state.reorder(index)
    after = mine(tokens[:, :1], state)
    inputs = {name: value[index] for name, value in theirs(mine, tokens, family).items()}
    inputs["decoder_input_ids"] = torch.cat((inputs["decoder_input_ids"], tokens[:, :1]), 1)
    return close(after, other(**inputs).logits[:, -1:], "beams")


def _moving_frequencies(model: Model) -> bool:
    """Frequencies that change with the length make cached keys differ by nature (scaling.py says why)."""
    mixers: list[Any] = [layer.mixer for layer in model.layers]
    return any(mixer.attention_position is not None and mixer.attention_position.moves_with_length for mixer in mixers)


def same(back: nn.Module, other: nn.Module, unused: str) -> None:
    """Asserts that the weights are identical bit for bit."""
    mine, theirs = back.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name in theirs:
        assert unused in name or torch.equal(mine[name], theirs[name]), name


def test_every_family_has_a_case() -> None:
    assert set(CASES) == set(FAMILIES)


FAMILIES_QUICK = [
    pytest.param(one, marks=[pytest.mark.slow] * (one in TWO_TOWERS - {"t5", "bart"})) for one in sorted(CASES)
]
"""Families; two-tower ones except t5 and bart are slow, because their configs have the fields of one of these two."""


@pytest.mark.parametrize("models", [2, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES_QUICK)
def test_in_and_out(family: str, models: int) -> None:
    @settings(max_examples=models, deadline=None, database=None, derandomize=True,
              phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(fields=CASES[family].fields, seed=st.integers(0, 1000))
    def run(fields: dict[str, Any], seed: int) -> None:
        prove(family, fields, seed)

    run()


def test_a_gradient_under_a_wrong_name_is_seen(tmp_path: Path) -> None:
    """The proof can fail: two weights of one shape, exchanged."""
    case = CASES["llama"]
    sizes = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 1, "max_position_embeddings": 48}
    fields = {"vocab_size": 61, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 12, **sizes}
    other = case.model(fields, 0)
    other.save_pretrained(tmp_path)
    mine = gf.load(tmp_path).model
    with torch.no_grad():
        ffn = mine.layers[0].ffn
        ffn.gate_proj.weight, ffn.up_proj.weight = ffn.up_proj.weight, ffn.gate_proj.weight
    with pytest.raises(AssertionError):
        compare(mine, other, torch.randint(61, (2, 29)), "llama")
