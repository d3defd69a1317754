"""A model with a prefix attends bidirectionally in the prompt and causally after it, in every way of generating."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glassformer.generation import Sampling, generate, stream
from glassformer.generation.beams import beams
from glassformer.generation.engine import Engine
from glassformer.generation.prompt_cache import save_state
from glassformer.generation.speculate import Draft, PromptLookup, speculate
from glassformer.model import Model
from glassformer.naming import preset
from tests.refused import refused

torch.set_num_threads(1)
SMALL = "layers=2+d_model=32+heads=4+context=64+vocab_size=31+init=gpt2+init.std=0.3"
KINDS = ["llama", "gpt2", "bloom", "llama+mla"]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5], [1, 6]]


def tiny(name: str = "llama") -> Model:
    name, *more = name.split("+")
    return preset("+".join([f"{name}@1m", *more, SMALL, "prefix"])).build(seed=1).eval()


def whole(model: Model, prompt: list[int], text: list[int]) -> Tensor:
    """Returns logits (t, v) of a text from one pass without a state; its first tokens are the prefix."""
    place = torch.arange(len(text))[None]
    with torch.no_grad():
        return model(torch.tensor([text]), global_tokens=place < len(prompt))[0]


def likeliest(model: Model, prompt: list[int], new: int) -> list[int]:
    """Returns the greedy text, each token from a pass over the whole text."""
    text = list(prompt)
    for _ in range(new):
        text.append(int(whole(model, prompt, text)[-1].argmax()))
    return text


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("chunk", [1024, 3])
def test_each_step_is_a_pass_over_the_whole_text(name: str, chunk: int):
    """Rows of one length, and padded ones; a prompt is never cut."""
    model = tiny(name)
    rows = torch.tensor([PROMPTS[0], PROMPTS[2][:9]])
    asked: dict[str, Any] = {"max_new_tokens": 7, "logprobs": 0, "chunk": chunk}
    steps = list(stream(model, rows, **asked))
    new = torch.stack([step.tokens for step in steps], 1)
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), rows], 1)
    documents = torch.tensor([[0] * 4 + [1] * 9] * 2)
    behind = list(stream(model, padded, documents=documents, **asked))
    for row, prompt in enumerate(rows.tolist()):
        text = prompt + new[row].tolist()
        expected = whole(model, prompt, text).log_softmax(-1)[len(prompt) - 1 : -1].gather(1, new[row][:, None])[:, 0]
        for found in (steps, behind):
            assert [int(step.tokens[row]) for step in found] == new[row].tolist()
            torch.testing.assert_close(torch.stack([step.logprobs[row] for step in found]), expected)
        causal = model(torch.tensor([text]), global_tokens=torch.zeros(1, len(text), dtype=torch.bool))[0]
        other = causal.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, new[row][:, None])[:, 0]
        assert (other - expected).abs().max() > 0.01  # the prefix matters


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_different_lengths_generate_as_separate_rows(name: str):
    """The fixed prefix, half of the context, reaches beyond each of them."""
    model = tiny(name)
    assert generate(model, PROMPTS, 8) == [likeliest(model, prompt, 8) for prompt in PROMPTS]


def test_requests_that_join_a_batch():
    """Prompts with a common prefix are each read as a whole, and an interrupted request continues unchanged."""
    model = tiny()
    prompts = [*PROMPTS, PROMPTS[2][:8], PROMPTS[2]]
    engine = Engine(model, slots=3, context=60)
    requests = [engine.submit(prompt, 8) for prompt in prompts]
    for step in range(100):
        if step == 3:
            engine._start_again()
        if not engine.step():
            break
    assert [one.prompt + one.tokens for one in requests] == [likeliest(model, prompt, 8) for prompt in prompts]


def test_speculation():
    """A draft with a prefix too; nothing guessed counts as a part of the prompt."""
    model, small = tiny(), tiny("gpt2")
    for prompt in PROMPTS:
        for proposer in (PromptLookup(), Draft(small), Draft(model)):
            text = torch.tensor([prompt])
            assert prompt + list(speculate(model, text, proposer, 8)) == likeliest(model, prompt, 8)


def test_beams_of_one_are_greedy_and_scores_are_those_of_the_whole_text():
    model = tiny()
    for prompt in PROMPTS:
        (best,) = beams(model, torch.tensor([prompt]), 1, 8)
        assert prompt + best.tokens == likeliest(model, prompt, 8)
        (best,) = beams(model, torch.tensor([prompt]), 3, 8, length_penalty=0.0)
        logits = whole(model, prompt, prompt + best.tokens).log_softmax(-1)[len(prompt) - 1 : -1]
        assert float(logits.gather(1, torch.tensor(best.tokens)[:, None]).sum()) == pytest.approx(best.score, abs=1e-4)


def test_prefix_state_is_not_reused_for_another_prompt(tmp_path: Path):
    model = tiny()
    state = model.init_state(1, 20)
    model(torch.tensor([[1, 2, 3]]), state)
    with refused(code="conflict", field="state"):
        save_state(tmp_path / "state", state, [1, 2, 3], model)
    with refused(code="conflict", field="state"):
        Engine(model).remember([1, 2, 3], state)
    with refused(code="conflict", field="global_tokens"):
        model(torch.tensor([[4]]), state, global_tokens=torch.tensor([[True]]))


def test_second_call_continues_from_the_state():
    """With a state, further tokens are read from left to right, as what was written is."""
    model, prompt = tiny(), PROMPTS[0]
    state = model.init_state(1, 40)
    first = [int(token) for token in stream(model, [prompt], 3, state=state)]
    more = [first[-1], 5, 6]
    second = list(stream(model, [more], 3, state=state, logprobs=0))
    text = prompt + first[:-1] + more + [int(step.tokens) for step in second]
    expected = whole(model, prompt, text).log_softmax(-1)[-4:-1]
    for step, logits in zip(second, expected, strict=True):
        assert float(step.logprobs) == pytest.approx(float(logits[int(step.tokens)]), abs=1e-4)


def test_sampled_tokens_are_of_the_same_distribution():
    model = tiny()
    rule = Sampling(temperature=1.0, top_k=5)
    engine = Engine(model, slots=2, context=60)
    asked = engine.submit(PROMPTS[0], 6, seed=3, **rule.model_dump())
    while engine.step():
        pass
    assert generate(model, [PROMPTS[0]], 6, 1.0, 5, seed=3) == [PROMPTS[0] + asked.tokens]
