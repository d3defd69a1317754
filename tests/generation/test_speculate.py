"""Speculation writes what the model writes: the same text, or the same distribution of texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from glassformer.generation.sampling import Sampling, warp
from glassformer.generation.speculate import Draft, PromptLookup, Proposal, Proposer, Speculation, speculate
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.state import ModelState
from tests.refused import failed, refused

VOCAB = 31
GREEDY = Sampling()
ARCHITECTURES = [
    "llama",
    "llama+window:5",
    "llama+mamba",
    "llama+gqa:2+qknorm+kernel=naive+window:3",
    "llama+alibi",
    "llama+nope",
    "gpt2",
    "bloom+window:5",
    "falcon",
    "gpt-neox",
]


def tiny(expression: str = "llama", seed: int = 1, vocab: int = VOCAB, context: int = 64, d: int = 32) -> Model:
    name, *changes = expression.split("+")
    sizes = [f"{name}@1m+layers=2+d_model={d}+heads=4+vocab_size={vocab}+context={context}+init=gpt2+init.std=0.2"]
    return preset("+".join(sizes + changes)).build(seed=seed).eval()


def near(model: Model, noise: float = 0.05) -> Model:
    """Returns a model that often agrees with `model`."""
    other = model.config.build(seed=None).eval()
    draw = torch.Generator().manual_seed(3)
    weights = {k: w + noise * w.std() * torch.randn(w.shape, generator=draw) for k, w in model.state_dict().items()}
    other.load_state_dict(weights)
    return other


def prompt(length: int = 9, vocab: int = VOCAB) -> Tensor:
    return torch.randint(vocab, (1, length), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def written(model: Model, tokens: Tensor, count: int, sampling: Sampling = GREEDY) -> list[int]:
    """Returns the sampled tokens by the definition: a pass over the whole text for each token."""
    text = tokens
    for _ in range(count):
        logits = warp(model(text)[:, -1], sampling, [text[0]], [tokens.shape[1]])
        text = torch.cat([text, logits.argmax(-1)[:, None]], dim=1)
    return text[0, tokens.shape[1] :].tolist()


class Fixed:
    """Guesses by a rule: of no use, or of the best."""

    def __init__(self, tokens: Sequence[int], probabilities: Tensor | None = None):
        self.tokens, self.probabilities, self.asked = list(tokens), probabilities, list[int]()

    def begin(self, run: Speculation) -> None:
        self.start = len(run.text)

    def propose(self, text: Sequence[int], most: int) -> Proposal:
        self.asked.append(most)
        at = len(text) - self.start
        tokens = self.tokens[at : at + most]
        return Proposal(tokens, None if self.probabilities is None else self.probabilities[: len(tokens)])


# Greedy: the same text


@pytest.mark.parametrize("expression", ARCHITECTURES)
def test_greedy_is_the_models_own_text(expression: str) -> None:
    model, tokens, count = tiny(expression), prompt(), 24
    wanted = written(model, tokens, count)
    close = near(model)
    proposers: dict[str, tuple[Proposer, int]] = {
        "lookup": (PromptLookup(), 8),
        "itself": (Draft(model), 5),
        "near": (Draft(close), 6),
        "near by one": (Draft(close), 1),
        "bad": (Draft(tiny("llama+window:4", seed=9)), 3),
        "drawn": (Draft(close, Sampling(temperature=2.0)), 4),
    }
    runs = {}
    for name, (proposer, ahead) in proposers.items():
        runs[name] = run = speculate(model, tokens, proposer, count, ahead=ahead)
        assert list(run) == wanted, name
        assert run.text == tokens[0].tolist() + wanted and run.state.length == len(run.text) - 1
        assert run.passes + run.accepted == count
    itself = runs["itself"]
    assert itself.accepted == itself.proposed and itself.passes == 5  # 1, 4 + 1, 5 + 1, 5 + 1, 5 + 1
    assert runs["near"].accepted > runs["bad"].accepted
    assert any(run.accepted < run.proposed for run in runs.values())


@pytest.mark.parametrize("expression", ["llama+window:5", "llama", "gpt2", "llama+mamba"])
@pytest.mark.parametrize("length", [1, 2, 23])
def test_prompts_of_any_length(expression: str, length: int) -> None:
    model, tokens = tiny(expression), prompt(length)
    for count in (1, 2, 3, 12):
        for proposer in (PromptLookup(), Draft(near(model))):
            assert list(speculate(model, tokens, proposer, count)) == written(model, tokens, count)


def test_penalties_see_the_text_as_it_is_at_each_token() -> None:
    model, tokens = tiny(), torch.tensor([[4, 5, 6, 4, 5, 6, 4]])
    free = written(model, tokens, 20)
    for fields in (
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.7},
        {"presence_penalty": 1.0, "logit_bias": {3: 2}},
    ):
        sampling = Sampling(**fields)
        wanted = written(model, tokens, 20, sampling)
        assert wanted != free
        for proposer in (PromptLookup(), Draft(model), Draft(near(model))):
            run = speculate(model, tokens, proposer, 20, sampling)
            assert list(run) == wanted and (run.accepted or isinstance(proposer, PromptLookup))
        assert list(speculate(model, tokens, Fixed(wanted), 20, sampling)) == wanted


def test_the_model_as_its_own_draft_penalizes_alike() -> None:
    model, sampling = tiny(), Sampling(repetition_penalty=1.3, frequency_penalty=0.7)
    run = speculate(model, prompt(), Draft(model), 30, sampling)
    assert len(list(run)) == 30 and run.accepted == run.proposed > 0


def test_learned_positions_are_used_to_the_last() -> None:
    model, tokens = tiny("gpt2", context=24), prompt(9)
    wanted = written(model, tokens, 15)
    for proposer in (PromptLookup(), Draft(model), Draft(near(model)), Draft(tiny("gpt2", context=5))):
        assert list(speculate(model, tokens, proposer, 15)) == wanted
    for context in range(11, 18):  # the same, but its positions end before
        short, weights = tiny("gpt2", context=context), model.state_dict()
        weights["embedding.position.weight"] = weights["embedding.position.weight"][:context]
        short.load_state_dict(weights)
        run = speculate(model, tokens, Draft(short), 15)
        assert list(run) == wanted and 0 < run.accepted == run.proposed <= context - 9
    with refused(code="range", field="max_len"):
        speculate(model, tokens, PromptLookup(), 16)


@pytest.mark.parametrize("expression", ["llama", "llama+window:5", "llama+mamba"])
def test_state_continues_after_leaving_the_loop_anywhere(expression: str) -> None:
    """In a chat, the state has read the answer except its last token, with which the next turn starts."""
    model, tokens = tiny(expression), prompt()
    wanted = written(model, tokens, 36)
    for leave_at in (1, 2, 3, 4, 5, 6, 7, 11):
        state = model.init_state(1, 64, rewind=4)
        run = speculate(model, tokens, Fixed(wanted), 36, ahead=4, state=state)
        first = [token for _, token in zip(range(leave_at), run, strict=False)]
        assert first == wanted[:leave_at] and state.length == tokens.shape[1] + leave_at - 1
        next_turn = speculate(model, torch.tensor([first[-1:]]), PromptLookup(), 8, ahead=4, state=state)
        assert list(next_turn) == wanted[leave_at : leave_at + 8]
        assert run.text == tokens[0].tolist() + first
    run = speculate(model, tokens, Draft(near(model)), 36)
    assert [token for _ in range(12) for _, token in zip(range(3), run, strict=False)] == wanted  # by threes
    assert list(run) == []


def test_a_state_that_is_full_is_not_passed() -> None:
    model, tokens = tiny(), prompt(4)
    assert list(speculate(model, tokens, Draft(model), 20, state=model.init_state(1, 23))) == written(model, tokens, 20)
    with refused(code="range", field="state.max_len"):
        speculate(model, tokens, Draft(model), 20, state=model.init_state(1, 22))


def test_a_model_in_training_is_as_it_was() -> None:
    model = tiny()
    model.train()
    next(iter(speculate(model, prompt(), PromptLookup(), 4)))
    assert model.training


# Sampling: the same distribution

SMALL = 6


class Table(nn.Module):
    """A model whose logits depend on the last token and on its place."""

    writes, takes_prefix, vocab_size, device, dtype = True, False, SMALL, torch.device("cpu"), torch.float32
    settled = encoder = context = sequence = None
    causal = False  # so it has no native step

    def __init__(self, seed: int):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.embedding = nn.Embedding.from_pretrained(1.5 * torch.randn(SMALL, SMALL, generator=draw))
        self.embedding.position = None
        self.places = torch.randn(16, SMALL, generator=draw)
        self.layers: list[nn.Module] = []

    def init_state(self, batch: int, max_len: int, rewind: int = 0) -> ModelState:
        return ModelState([], batch, max_len)

    def hidden_states(self, tokens: Tensor, state: ModelState | None = None, **_: None) -> Tensor:
        start = state.length if state else 0
        if state:
            state.advance(start + tokens.shape[1], tokens.shape[1])
        return self.embedding(tokens) + self.places[start : start + tokens.shape[1]]

    forward = hidden_states

    def unembed(self, x: Tensor) -> Tensor:
        return x

    def logits(self, x: Tensor) -> Tensor:
        return x


TARGET, OTHER = (cast(Model, Table(seed)) for seed in (1, 2))
CASES: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "top_k and top_p": {"temperature": 1.2, "top_k": 4, "top_p": 0.9},
    "penalties": {"temperature": 1.5, "repetition_penalty": 1.4, "frequency_penalty": 0.8, "min_p": 0.05},
    "typical": {"temperature": 1.2, "typical_p": 0.8, "logit_bias": {2: 1.0}},
}


@torch.no_grad()
def exact(model: Model, tokens: Tensor, count: int, sampling: Sampling) -> Tensor:
    """Returns the probability of every text of `count` tokens (v,) * count, from the definition."""
    texts = torch.tensor([tokens[0].tolist() + list(new) for new in product(range(SMALL), repeat=count)])
    logits, s = model(texts), tokens.shape[1]
    p = torch.ones(len(texts), dtype=torch.float64)
    for at in range(s, s + count):
        warped = warp(logits[:, at - 1], sampling, list(texts[:, :at]), [s] * len(texts))
        p *= warped.double().softmax(-1).gather(1, texts[:, at : at + 1])[:, 0]
    return p.view([SMALL] * count)


def improbable(proposer: Proposer, tokens: Tensor, sampling: Sampling, runs: int = 800) -> float:
    """Returns the smallest chi-squared p-value of the joint distributions of tokens 1 and 2, and 2 and 3, against their
    definition; rare cells are counted as one."""
    p = exact(TARGET, tokens, 3, sampling)
    counts = torch.zeros_like(p)
    for seed in range(runs):
        run = speculate(TARGET, tokens, proposer, 4, sampling, seed=seed)
        counts[tuple(list(run)[:3])] += 1
    found = []
    for over in (2, 0):
        wanted, seen = p.sum(over).flatten(), counts.sum(over).flatten()
        assert seen[wanted == 0].sum() == 0, "a text of probability 0 was written"
        rare = wanted * runs < 5
        seen, wanted = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (seen, wanted * runs))
        distance = ((seen - wanted) ** 2 / wanted.clamp(min=1e-9)).sum()
        found.append(float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2), distance / 2)))  # chi-squared
    return min(found)


@pytest.mark.parametrize("name", CASES)
def test_sampled_text_has_the_models_distribution(name: str) -> None:
    sampling, start = Sampling(**CASES[name]), torch.tensor([[3]])
    with torch.no_grad():
        p, q = (warp(model(start)[:, -1], sampling, [start[0]], [1]).softmax(-1) for model in (TARGET, OTHER))
    assert torch.minimum(p, q).sum() < 0.8  # the draft is often wrong
    assert improbable(Draft(OTHER), start, sampling) > 1e-4


@pytest.mark.parametrize("name", ["lookup", "greedy draft", "hot draft"])
def test_sampled_text_has_the_models_distribution_with_any_proposer(name: str) -> None:
    sampling = Sampling(**CASES["top_k and top_p"])
    proposers: dict[str, Proposer] = {
        "lookup": PromptLookup(),
        "greedy draft": Draft(OTHER, Sampling()),
        "hot draft": Draft(OTHER, Sampling(temperature=3.0)),
    }
    assert improbable(proposers[name], torch.tensor([[1, 3, 1, 3, 1]]), sampling) > 1e-4


def test_the_proof_would_see_a_wrong_rule() -> None:
    """A proposer with false probabilities changes the distribution of texts."""
    liar = Fixed([0] * 4, torch.full((4, SMALL), 1 / SMALL))
    assert improbable(liar, torch.tensor([[3]]), Sampling(temperature=1.0)) < 1e-6


def test_draft_of_the_same_distribution_is_always_accepted() -> None:
    model, sampling = tiny(), Sampling(temperature=1.0, top_p=0.95)
    run = speculate(model, prompt(), Draft(model), 50, sampling, seed=5)
    assert len(list(run)) == 50 and run.accepted == run.proposed > 30


def test_seeds_reproduce() -> None:
    model, draft = tiny(), tiny(seed=2)
    texts = [
        list(speculate(model, prompt(), Draft(draft), 20, Sampling(temperature=1.0), seed=seed))
        for seed in (7, 7, 8, None, None)
    ]
    assert texts[0] == texts[1] != texts[2] and texts[3] != texts[4]


# How many


def test_useless_guesses_become_rare() -> None:
    model, tokens = tiny(), prompt(4)
    wanted = written(model, tokens, 59)
    useless = Fixed([(token + 1) % VOCAB for token in wanted])
    run = speculate(model, tokens, useless, 59)
    assert list(run) == wanted and run.accepted == 0
    # the prompt; four guesses, two; then one after 1, 4, 16, 16 passes without
    assert useless.asked == [4, 2, 1, 1, 1, 1] and run.passes == 59 and run.proposed == 10


def test_right_guesses_become_more() -> None:
    model, tokens = tiny(), prompt(4)
    wanted = written(model, tokens, 59)
    right = Fixed(wanted)
    assert list(speculate(model, tokens, right, 59)) == wanted and right.asked[:3] == [4, 8, 8]
    # all of 4; 6 of 8; none of 7, nor of 3; all of 1
    mixed = Fixed([*wanted[:12], *(VOCAB - 1 - token for token in wanted[12:15]), *wanted[15:]])
    assert list(speculate(model, tokens, mixed, 59)) == wanted and mixed.asked[:8] == [4, 8, 7, 3, 1, 2, 4, 8]


def test_lookup_finds_the_last_of_the_longest() -> None:
    lookup = PromptLookup(max_ngram=3)

    def after(text: list[int], most: int = 3) -> list[int]:
        lookup.begin(None)  # type: ignore[arg-type]
        return lookup.propose(text, most).tokens

    assert after([1, 2, 3, 4, 5, 9, 3, 7, 8, 1, 2, 3]) == [4, 5, 9]  # matches three tokens, not only the last 3
    assert after([1, 2, 5, 1, 2, 6, 0, 1, 2]) == [6, 0, 1]  # the later of two
    assert after([1, 2, 3]) == [] and after([4]) == []
    assert after([7, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]  # on past the end
    assert PromptLookup(3, 2).sizes == range(3, 1, -1)
    lookup.begin(None)  # type: ignore[arg-type]
    text = prompt(200, 5)[0].tolist()
    for end in range(1, 200):  # as the text grows, and all at once
        grown = lookup.propose(text[:end], 4)
        fresh = PromptLookup(max_ngram=3)
        fresh.begin(None)  # type: ignore[arg-type]
        assert grown == fresh.propose(text[:end], 4)


# Wrong input


@pytest.mark.parametrize(
    ("fields", "code", "field", "value"),
    [
        ({"tokens": torch.zeros(1, 0, dtype=torch.long)}, "range", "tokens", (1, 0)),
        ({"tokens": torch.zeros(2, 3, dtype=torch.long)}, "range", "tokens", 2),
        ({"tokens": torch.tensor([[VOCAB]])}, "range", "tokens", VOCAB),
        ({"max_new_tokens": 0}, "range", "max_new_tokens", 0),
        ({"ahead": 0}, "range", "ahead", 0),
        ({"sampling": Sampling(logit_bias={VOCAB: 1.0})}, "range", "logit_bias", VOCAB),
        ({"proposer": Draft(tiny(vocab=29))}, "conflict", "draft", 29),
        ({"model": tiny("llama+window:5"), "state": 3}, "range", "state.rewind", 3),
        ({"model": tiny(), "state": 8}, "range", "state.max_len", 64),
        ({"tokens": torch.tensor([[1.0]])}, "type", "tokens", "torch.float32"),
        ({"max_new_tokens": 2.5}, "type", "max_new_tokens", 2.5),
        ({"model": tiny("llama+bidirectional")}, "causal", "model", None),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_wrong_requests_are_refused_in_a_sentence(fields: dict[str, Any], code: str, field: str, value: object) -> None:
    given: dict[str, Any] = {"model": tiny(), "tokens": prompt(), "proposer": PromptLookup(), **fields}
    if "state" in given:
        given["state"] = given["model"].init_state(1, 64, rewind=given["state"])
    with refused(code=code, field=field) as caught:
        speculate(**given)
    assert caught.value.value == value and "\n" not in str(caught.value)
    with refused(code="range", field="min_ngram"):
        PromptLookup(min_ngram=0)


def poisoned(model: Model, token: int) -> Model:
    """Its logits are NaN once this token is read."""
    with torch.no_grad():
        model.embedding.weight[token] = math.nan
    return model


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.01)], ids=["greedy", "sampled"])
def test_nan_logits_fail_only_if_of_the_model(sampling: Sampling) -> None:
    tokens = prompt()
    wanted = written(tiny(), tokens, 30)
    # those of a draft do no harm
    run = speculate(tiny(), tokens, Draft(poisoned(tiny(), wanted[4])), 30, sampling, seed=1)
    assert len(list(run)) == 30 and (sampling.temperature or run.text[9:] == wanted)
    for proposer in (PromptLookup(), Draft(tiny())):
        given: list[int] = []
        with failed(code="diverged"):
            given.extend(speculate(poisoned(tiny(), wanted[4]), tokens, proposer, 30))
        assert given == wanted[: len(given)] and len(given) <= wanted.index(wanted[4]) + 1
    with failed(code="diverged"):
        next(iter(speculate(poisoned(tiny(), int(tokens[0, 0])), tokens, PromptLookup(), 3, sampling)))
