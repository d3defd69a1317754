"""Greedy decoding equals the definition, seeds reproduce, wrong requests are refused first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.expression import preset
from glassformer.generate import generate, stream
from glassformer.model import Model

VOCAB = 31


def tiny(expression: str = "llama", context: int = 32) -> Model:
    config = preset(
        f"{expression}@1m+layers=2+d_model=32+heads=4+vocab_size={VOCAB}+context={context}+init=gpt2+init.std=0.2"
    )
    return config.build(seed=1)


def prompt(b: int = 2, s: int = 4) -> Tensor:
    return torch.randint(0, VOCAB, (b, s), generator=torch.Generator().manual_seed(2))


def greedy(model: Model, tokens: Tensor, n: int) -> Tensor:
    """The definition: the whole text through the model, once for each token."""
    with torch.no_grad():
        for _ in range(n):
            tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens


@pytest.mark.parametrize("expression", ["gpt2", "llama", "bloom", "falcon", "gpt-neox", "mpt", "qwen3", "mistral"])
def test_greedy_is_the_uncached_loop(expression: str):
    model = tiny(expression).eval()
    out = generate(model, prompt(3, 5), max_new_tokens=12)
    assert out.shape == (3, 17) and torch.equal(out, greedy(model, prompt(3, 5), 12))


def test_greedy_through_a_window_is_the_uncached_loop():
    config = preset(
        f"llama@1m+layers=2+d_model=32+heads=4+vocab_size={VOCAB}+context=32+window:4+init=gpt2+init.std=0.2"
    )
    model = config.build(seed=1).eval()
    assert torch.equal(generate(model, prompt(2, 9), max_new_tokens=14), greedy(model, prompt(2, 9), 14))


def test_seeds_reproduce():
    model = tiny()
    draws = [generate(model, prompt(), 16, temperature=1.0, seed=seed) for seed in (7, 7, 8)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    torch.manual_seed(0)
    first = generate(model, prompt(), 16, temperature=1.0)
    torch.manual_seed(0)
    assert torch.equal(first, generate(model, prompt(), 16, temperature=1.0))


def test_a_seed_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    generate(tiny(), prompt(), 4, temperature=1.0, seed=3)
    model = tiny()
    torch.set_rng_state(before)
    generate(model, prompt(), 4, temperature=1.0, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_stream_yields_what_generate_returns():
    model = tiny()
    for temperature in (0.0, 0.8):
        steps = list(stream(model, prompt(), 6, temperature, seed=1))
        assert [step.shape for step in steps] == [(2,)] * 6
        whole = generate(model, prompt(), 6, temperature, seed=1)
        assert torch.equal(torch.stack(steps, dim=1), whole[:, 4:])


def test_training_mode_comes_back():
    model = tiny().train()
    generate(model, prompt(), 2)
    assert model.training
    started = stream(model, prompt(), 5)
    next(started)
    started.close()  # left half way
    assert model.training
    model.eval()
    generate(model, prompt(), 2)
    assert not model.training


def test_dropout_is_off_while_generating():
    config = preset("llama@1m+layers=1+d_model=32+heads=4+vocab_size=31+context=32+dropout:0.5+init=gpt2+init.std=0.2")
    model = config.build().train()
    assert torch.equal(generate(model, prompt(), 8), generate(model, prompt(), 8))


def test_eos_stops():
    model = tiny().eval()
    free = generate(model, prompt(1), 12)[0, 4:].tolist()
    eos = free[3]
    first = free.index(eos)
    stopped = generate(model, prompt(1), 12, eos_id=eos)
    assert stopped[0, 4:].tolist() == free[: first + 1]
    ignored = generate(model, prompt(1), 12, eos_id=eos, stop_at_eos=False)
    assert ignored[0, 4:].tolist() == free


def test_a_row_at_its_end_waits_for_the_others():
    model = tiny().eval()
    free = generate(model, prompt(2), 10)[:, 4:]
    candidates = [t for t in free[0].tolist() if t not in free[1].tolist()]
    assert candidates, "choose another seed: the rows say the same"
    eos = candidates[0]
    at = free[0].tolist().index(eos)
    both = generate(model, prompt(2), 10, eos_id=eos)[:, 4:]
    assert both.shape == (2, 10)
    assert both[0].tolist() == free[0, : at + 1].tolist() + [eos] * (9 - at)
    assert torch.equal(both[1], free[1])


@pytest.mark.parametrize(
    ("tokens", "options", "names"),
    [
        (torch.zeros(2, 0, dtype=torch.long), {}, "at least one"),
        (torch.zeros(0, 2, dtype=torch.long), {}, "batch"),
        (torch.zeros(4, dtype=torch.long), {}, "(4,)"),
        (torch.full((1, 2), VOCAB), {}, f"token {VOCAB}"),
        (torch.tensor([[-3, 5]]), {}, "token -3"),
        (prompt(), {"max_new_tokens": 0}, "max_new_tokens=0"),
        (prompt(), {"temperature": -1.0}, "temperature=-1.0"),
        (prompt(), {"temperature": float("nan")}, "temperature=nan"),
        (prompt(), {"temperature": float("inf")}, "temperature=inf"),
        (prompt(), {"temperature": 1.0, "top_k": 0}, "top_k=0"),
    ],
)
def test_wrong_requests_are_refused_in_one_sentence(tokens: Tensor, options: dict, names: str):
    with pytest.raises(RequestError) as refused:
        generate(tiny(), tokens, **options)
    assert names in str(refused.value) and "\n" not in str(refused.value)


def test_a_vanishing_temperature_is_greedy_or_refused():
    model = tiny().eval()
    try:
        out = generate(model, prompt(), 3, temperature=1e-42, seed=0)
    except RequestError:
        return
    assert torch.equal(out, greedy(model, prompt(), 3))


def test_learned_positions_end_and_say_so():
    model = tiny("gpt2", context=8)
    assert generate(model, prompt(1, 4), 4).shape == (1, 8)
    with pytest.raises(RequestError, match="8"):
        generate(model, prompt(1, 4), 6)
    assert generate(tiny("llama", context=8), prompt(1, 4), 20).shape == (1, 24)


def test_nothing_is_generated_before_the_request_is_judged():
    """`stream` is lazy, but a wrong request is known at the first step and leaves the mode alone."""
    model = tiny().train()
    with pytest.raises(RequestError):
        next(stream(model, prompt(), 0))
    assert model.training


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3, "top_k": 9, "repetition_penalty": 1.3}])
@pytest.mark.parametrize("k", [0, 1, 4, 1000])
def test_log_probabilities_are_those_of_the_uncached_model(k: int, options: dict):
    """Of what was chosen and of the likeliest, before any warper; asking for them changes no token."""
    model, tokens = tiny(context=64).eval(), prompt(3, 5)
    steps = list(stream(model, tokens, 7, logprobs=k, **options))
    text = torch.cat([tokens, torch.stack([one.tokens for one in steps], dim=1)], dim=1)
    assert torch.equal(text, generate(model, tokens, 7, **options))
    with torch.no_grad():
        every = model(text).log_softmax(-1)[:, 4:-1]
    for i, one in enumerate(steps):
        wanted = every[:, i].gather(1, one.tokens[:, None])[:, 0]
        torch.testing.assert_close(one.logprobs, wanted, atol=2e-5, rtol=0)
        assert not one.logprobs.is_inference() and not one.bad.any()
        if k == 0:
            assert one.top_ids is None and one.top_logprobs is None
            continue
        best = every[:, i].topk(min(k, VOCAB))
        assert torch.equal(one.top_ids[:, :4], best.indices[:, :4])
        torch.testing.assert_close(one.top_logprobs, best.values, atol=2e-5, rtol=0)


@pytest.mark.parametrize("k", [-1, 1.5, "2"])
def test_wrong_numbers_of_log_probabilities_are_refused(k: object):
    with pytest.raises(RequestError, match="logprobs="):
        next(stream(tiny(), prompt(), 4, logprobs=k))  # type: ignore[arg-type]


def test_generate_gives_no_log_probabilities():
    with pytest.raises(RequestError, match="stream"):
        generate(tiny(), prompt(), 4, logprobs=2)
