"""Our models behind the interface of `transformers`: its own LLaMA with the same weights is the oracle."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import glassformer as gf
from glassformer.conversion.transformers import GlassformerCache, GlassformerConfig, GlassformerForCausalLM, count
from glassformer.model import Model
from glassformer.naming import preset
from tests.refused import refused

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TINY = "layers=2+d_model=16+heads=2+vocab_size=61+context=48"
MODELS = [
    "gpt2@1m+alibi+rmsnorm+swiglu",
    "llama@1m+sandwich+gqa:1",
    "gpt2@1m+window:5",
    "qwen3@1m+nope",
    "gpt2@1m",
    "falcon@1m+parallel2",
    "llama@1m+post+window:7",
]
TOKENS = torch.randint(61, (3, 11), generator=torch.Generator().manual_seed(5))


def loud(expression: str, seed: int = 3) -> Model:
    """Returns a model with noise on all weights, so that no two of its logits are near each other."""
    model = preset(f"{expression}+{TINY}").build().eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=draw)
            if weight.dim() == 2:
                weight.copy_(noise * (0.3 if name == "embedding.weight" else 1.5 / weight.shape[1] ** 0.5))
            else:
                weight.copy_(noise * 0.1 + ("norm" in name and name.endswith("weight")))
    return model


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Model, Any, GlassformerForCausalLM]:
    """One LLaMA: ours, theirs, and ours behind their interface."""
    mine = loud("llama@1m+gqa:1")
    assert gf.save(mine, None, tmp_path / "llama").model_type == "llama"
    return mine, AutoModelForCausalLM.from_pretrained(tmp_path / "llama"), GlassformerForCausalLM.of(mine)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    error = float(((actual - expected).abs().max() / expected.abs().max()).detach())
    assert error <= tolerance, f"relative error {error:.2e}"


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Returns (tokens, mask), padded on the left with token 1."""
    width = max(map(len, rows))
    tokens = torch.tensor([[1] * (width - len(row)) + row for row in rows])
    return tokens, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


ROWS = [TOKENS[0].tolist(), TOKENS[1, :4].tolist(), TOKENS[2, :7].tolist()]

# Files


@pytest.mark.parametrize("expression", MODELS)
def test_a_folder_of_ours_loads_and_is_saved_again_bit_for_bit(expression: str, tmp_path: Path):
    mine = loud(expression)
    gf.save(mine, None, tmp_path / "a")
    wrapped = AutoModelForCausalLM.from_pretrained(tmp_path / "a") if (tmp_path / "a").is_dir() else None
    if not isinstance(wrapped, GlassformerForCausalLM):  # a published class holds it
        wrapped = GlassformerForCausalLM.of(mine)
    assert torch.equal(wrapped(TOKENS).logits, mine(TOKENS))
    wrapped.save_pretrained(tmp_path / "b")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = gf.load(tmp_path / "b")
    assert isinstance(back, GlassformerForCausalLM)
    assert loaded.config == mine.config
    weights = dict(mine.named_parameters())
    for other in (back.model, loaded.model):
        assert {name for name, _ in other.named_parameters()} == set(weights)
        assert all(torch.equal(weight, weights[name]) for name, weight in other.named_parameters())
    assert torch.equal(back(TOKENS).logits, mine(TOKENS))


def test_config_has_the_sizes_of_transformers_names(tmp_path: Path):
    gf.save(loud("gpt2@1m+alibi+gqa:1+swiglu"), None, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, GlassformerConfig)
    said = [config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads,
            config.num_key_value_heads, config.head_dim, config.max_position_embeddings]  # fmt: skip
    assert said == [61, 16, 2, 2, 1, 8, 48]
    assert config.tie_word_embeddings is True
    assert gf.ModelConfig.from_dict(config.glassformer) == gf.load(tmp_path).config


def test_dtype_and_device(tmp_path: Path):
    mine = loud("gpt2@1m+alibi")
    gf.save(mine, None, tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    assert half(TOKENS).logits.dtype == torch.bfloat16
    gf.save(mine.to(torch.bfloat16), None, tmp_path / "half")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_device_map(tmp_path: Path):
    pytest.importorskip("accelerate")
    mine = loud("gpt2@1m+alibi")
    gf.save(mine, None, tmp_path)
    placed = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    assert torch.equal(placed(TOKENS).logits, mine(TOKENS))


def test_from_config_draws_weights_from_the_global_seed():
    config = GlassformerConfig(glassformer=preset(f"gpt2@1m+alibi+{TINY}").to_dict())
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(AutoModelForCausalLM.from_config(config).model.layers[0].mixer.qkv.weight)
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
    assert 0.015 < float(made[0].detach().std()) < 0.025  # our own rule


def test_a_checkpoint_that_lacks_a_weight_is_refused(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    gf.save(loud("gpt2@1m+alibi"), None, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.ffn.up_proj.bias"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with refused(code="missing", field="tensor model.layers.1.ffn.up_proj.bias"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


REGISTERED = """
import sys, importlib
{before}
from glassformer.register import hook
heavy = {{"torch", "transformers"}} & set(sys.modules)
hook(lambda: importlib.import_module("glassformer.conversion.transformers"))
hook(lambda: importlib.import_module("glassformer.conversion.transformers"))
assert {{"torch", "transformers"}} & set(sys.modules) == heavy
assert "glassformer.config" not in sys.modules
{after}
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("", "import transformers.modeling_utils", id="before", marks=pytest.mark.slow),
        pytest.param("from transformers import AutoConfig", "", id="after", marks=pytest.mark.slow),
    ],
)
def test_the_hook_costs_nothing_and_registers(before: str, after: str, tmp_path: Path):
    gf.save(loud("gpt2@1m+alibi"), None, tmp_path)
    code = REGISTERED.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "GlassformerForCausalLM", done.stderr


# The forward pass


def test_loss_hidden_states_and_attentions_are_those_of_the_oracle(pair: Any):
    _, theirs, wrapped = pair
    labels = TOKENS.clone()
    labels[:, :3] = -100
    theirs.set_attn_implementation("eager")
    mine, expected = (
        model(TOKENS, labels=labels, output_hidden_states=True, output_attentions=True) for model in (wrapped, theirs)
    )
    close(mine.logits, expected.logits)
    close(mine.loss, expected.loss)
    for name in ("hidden_states", "attentions"):
        assert len(mine[name]) == len(expected[name])
        for a, b in zip(mine[name], expected[name], strict=True):
            close(a, b)
    last = TOKENS.roll(-1, 1).masked_fill(torch.arange(11) == 10, -100).masked_fill(torch.arange(11) < 2, -100)
    close(mine.loss, wrapped.model.loss(TOKENS, last))
    close(wrapped(TOKENS, labels=labels, num_items_in_batch=7).loss, mine.loss * 24 / 7)


def test_logits_to_keep_and_tuples(pair: Any):
    mine, _, wrapped = pair
    torch.testing.assert_close(wrapped(TOKENS, logits_to_keep=2).logits, mine(TOKENS)[:, -2:])
    picked = wrapped(TOKENS, logits_to_keep=torch.tensor([1, 4])).logits
    torch.testing.assert_close(picked, mine(TOKENS)[:, [1, 4]])
    assert isinstance(wrapped(TOKENS, return_dict=False), tuple)
    assert wrapped(TOKENS).past_key_values is None
    assert not any(module._forward_hooks for module in wrapped.modules())


@pytest.mark.parametrize("expression", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_equals_its_rows(expression: str, side: str):
    wrapped = GlassformerForCausalLM.of(loud(expression))
    tokens, mask = padded(ROWS)
    if side == "right":
        tokens, mask = tokens.flip(1), mask.flip(1)
    logits = wrapped(tokens, attention_mask=mask).logits
    for i in range(3):
        true = mask[i].bool()
        close(logits[i, true], wrapped(tokens[i, true][None]).logits[0])


def test_packed_texts_do_not_see_each_other(pair: Any):
    """Positions that restart separate packed texts, as in `transformers`."""
    _, theirs, wrapped = pair
    packed = torch.tensor([[*range(4), *range(7)]])
    logits = wrapped(TOKENS[:1], position_ids=packed).logits
    close(logits[:, 4:], theirs(TOKENS[:1, 4:]).logits)
    close(logits, theirs(TOKENS[:1], position_ids=packed, use_cache=False).logits)


# Generation


@pytest.mark.parametrize("expression", MODELS)
def test_greedy_equals_ours_with_and_without_a_cache(expression: str):
    mine = loud(expression)
    wrapped = GlassformerForCausalLM.of(mine)
    expected = gf.generate(mine, TOKENS, max_new_tokens=15)
    assert len(expected[:, 11:].unique()) > 5  # a model that repeats itself would prove little
    for cached in (True, False):
        assert torch.equal(wrapped.generate(TOKENS, max_new_tokens=15, do_sample=False, use_cache=cached), expected)


@pytest.mark.parametrize("expression", MODELS)
def test_left_padded_batch_generates_as_separate_rows(expression: str):
    wrapped = GlassformerForCausalLM.of(loud(expression))
    tokens, mask = padded(ROWS)
    together = wrapped.generate(tokens, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=1)
    for i, row in enumerate(ROWS):
        alone = wrapped.generate(torch.tensor([row]), max_new_tokens=12, do_sample=False)
        assert torch.equal(together[i, 11:], alone[0, len(row) :])


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
    "long beams": {"num_beams": 3, "length_penalty": 2.0, "eos_token_id": 7, "do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 9},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pad", [False, True])
def test_every_way_to_generate_equals_the_oracle(way: str, pad: bool, pair: Any):
    _, theirs, wrapped = pair
    tokens, mask = padded(ROWS) if pad else (TOKENS, torch.ones_like(TOKENS))
    if way == "prompt lookup":
        tokens, mask = tokens[1:2].repeat(1, 2), mask[1:2].repeat(1, 2)
        mask[:, 11:] = 1
    found = []
    for model in (wrapped, theirs):
        torch.manual_seed(3)
        found.append(model.generate(tokens, attention_mask=mask, max_new_tokens=14, pad_token_id=1, **WAYS[way]))
    assert torch.equal(*found)


@pytest.mark.parametrize("expression", ["gpt2@1m+alibi", "gpt2@1m+window:5", "llama@1m+post+window:7"])
def test_assisted_generation_changes_nothing(expression: str):
    """Holds also if the assistant's state must grow, and if a window must go back to forgotten tokens."""
    mine = loud(expression)
    wrapped, assistant = GlassformerForCausalLM.of(mine), GlassformerForCausalLM.of(loud(expression, seed=1))
    with torch.no_grad():  # an assistant with some accepted tokens
        for weight, other in zip(assistant.parameters(), wrapped.parameters(), strict=True):
            weight.lerp_(other, 0.9)
    row = TOKENS[:1]
    got = wrapped.generate(row, max_new_tokens=30, do_sample=False, assistant_model=assistant)
    assert torch.equal(got, gf.generate(mine, row, max_new_tokens=30))


@pytest.mark.parametrize("expression", MODELS)
def test_a_cache_that_grows_crops_and_repeats(expression: str):
    wrapped = GlassformerForCausalLM.of(loud(expression))
    tokens, mask = padded(ROWS)
    whole = wrapped(tokens, attention_mask=mask).logits
    cache = GlassformerCache(max_len=3)
    parts, begin = [], 0
    for end in (2, 5, 6, 11):
        out = wrapped(tokens[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache)
        assert out.past_key_values is cache and cache.get_seq_length() == end
        parts.append(out.logits)
        begin = end
    true = mask.bool()
    close(torch.cat(parts, 1)[true], whole[true])
    cache.crop(-3)
    close(wrapped(tokens[:, 8:], attention_mask=mask, past_key_values=cache).logits, whole[:, 8:])
    cache.crop(-1)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 6
    again = wrapped(tokens[:, 10:].repeat_interleave(2, 0), past_key_values=cache)
    close(again.logits, whole[:, 10:].repeat_interleave(2, 0))
    cache.crop(-1)
    cache.reorder_cache(torch.tensor([2, 2, 0, 0, 4, 4]))
    close(wrapped(tokens[:, 10:].repeat_interleave(2, 0)[[2, 2, 0, 0, 4, 4]], past_key_values=cache).logits,
          whole[:, 10:].repeat_interleave(2, 0)[[2, 2, 0, 0, 4, 4]])  # fmt: skip
    cache.reset()
    assert cache.get_seq_length() == 0


def test_conversation_continues_with_its_cache(pair: Any):
    _, theirs, wrapped = pair
    ends = []
    for model in (wrapped, theirs):
        first = model.generate(TOKENS[:1], max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
        said = torch.cat([first.sequences, TOKENS[1:2, :5]], 1)
        ends.append(model.generate(said, past_key_values=first.past_key_values, max_new_tokens=6, do_sample=False))
        assert torch.equal(ends[-1], model.generate(said, max_new_tokens=6, do_sample=False))
    assert torch.equal(*ends)


def test_padding_found_out_later_is_read_again():
    wrapped = GlassformerForCausalLM.of(loud("gpt2@1m+alibi"))
    tokens, mask = padded(ROWS)
    cache = wrapped(tokens[:, :9], use_cache=True).past_key_values
    out = wrapped(tokens[:, 9:], attention_mask=mask, past_key_values=cache)
    close(out.logits, wrapped(tokens, attention_mask=mask).logits[:, 9:])


def test_count():
    assert count(torch.tensor([[0, 0, 1, 1, 0, 1]])).tolist() == [[0, 0, 0, 1, 1, 2]]


# Training


def test_trainer_equals_the_oracle(pair: Any, tmp_path: Path):
    pytest.importorskip("accelerate")
    mine, theirs, wrapped = pair
    first = float(mine.loss(TOKENS[:, :-1], TOKENS[:, 1:]).detach())
    losses = []
    for model in (wrapped, theirs):
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=3, learning_rate=1e-2, logging_steps=1,
            report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in TOKENS.tolist()]
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0][0] == pytest.approx(first, rel=1e-4)
    assert losses[0][2] < losses[0][0] * 0.95
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# What is refused


def test_refusals(pair: Any, tmp_path: Path):
    mine, _, wrapped = pair
    with pytest.raises(ValueError, match=r"does not support .* checkpointing"):
        wrapped.gradient_checkpointing_enable()
    with refused(code="unsupported", field="new_num_tokens"):
        wrapped.resize_token_embeddings(70)
    assert wrapped.resize_token_embeddings(61) is wrapped.get_input_embeddings() is mine.embedding
    with refused(code="unsupported", field="inputs_embeds"):
        wrapped(inputs_embeds=torch.zeros(1, 2, 16))
    with refused(code="type", field="past_key_values"):
        wrapped(TOKENS, past_key_values=transformers.DynamicCache())
    with refused(code="range", field="attention_mask"):
        wrapped(TOKENS, attention_mask=torch.ones(3, 1, 11, 11))
    cache = wrapped(TOKENS[:, :5], use_cache=True).past_key_values
    with refused(code="conflict", field="attention_mask"):
        wrapped(TOKENS[:, 5:], attention_mask=padded(ROWS)[1][:, 5:], past_key_values=cache)
    with refused(code="conflict", field="position_ids"):
        wrapped(TOKENS[:, 5:], position_ids=torch.arange(6)[None], past_key_values=cache)
    with refused(code="range", field="tokens_to_remove"):
        cache.crop(3)
    with refused(code="causal", field="model"):
        GlassformerForCausalLM.of(loud("gpt2@1m+bidirectional")).generate(TOKENS, max_new_tokens=2)
    with refused(code="range", field="max_len"):
        GlassformerForCausalLM.of(loud("gpt2@1m")).generate(TOKENS, max_new_tokens=60)
