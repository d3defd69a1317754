"""Sampling against closed forms, and warpers against the processors that `transformers` composes itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from glassformer.generation.sampling import Sampled, Sampling, choose, row_generator, warp
from glassformer.parts.core.base import Value, to_plain
from tests.refused import refused

# Probabilities of eight tokens, the largest last but one: 0.4 0.2 0.15 0.1 0.06 0.04 0.03 0.02 in another order.
P = torch.tensor([0.1, 0.02, 0.2, 0.04, 0.15, 0.03, 0.4, 0.06], dtype=torch.float64)
GREEDY = Sampling()


def one(logits: Tensor, sampling: Sampling, history: list[int] | None = None, generated_from: int = 0) -> Tensor:
    """Returns `warp` of one row (v,)."""
    return warp(logits[None], sampling, [torch.tensor(history or [], dtype=torch.long)], [generated_from])[0]


def drawn(logits: Tensor, sampling: Sampling, count: int, seed: int = 0) -> Tensor:
    """Returns how often each token is drawn (v,)."""
    rows = logits.expand(count, -1)
    found = choose(rows, [sampling] * count, generators=[row_generator(seed, 0, "cpu")] * count)
    assert not found.bad.any()
    return found.tokens.bincount(minlength=logits.shape[-1])


def chance(counts: Tensor, expected: Tensor) -> float:
    """Returns the chi-squared p-value of `counts` under the expected distribution."""
    possible = expected > 0
    assert counts[~possible].sum() == 0, "a token of probability 0 was drawn"
    if possible.sum() == 1:
        return 1.0
    wanted = expected[possible] * counts.sum()
    distance = ((counts[possible] - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc((possible.sum() - 1).double() / 2, distance / 2))


def only(*tokens: int) -> Tensor:
    kept = torch.zeros_like(P)
    kept[list(tokens)] = P[list(tokens)]
    return kept / kept.sum()


def normal(weights: Tensor) -> Tensor:
    return weights / weights.sum()


def typical_of_p(mass: float) -> Tensor:
    """Returns the probabilities after typical sampling with `mass`, by the definition in plain Python."""
    p = P.tolist()
    entropy = -sum(q * math.log(q) for q in p)
    order = sorted(range(8), key=lambda token: abs(-math.log(p[token]) - entropy))
    kept: list[int] = []
    while sum(p[token] for token in kept) < mass:
        kept.append(order[len(kept)])
    return only(*kept)


CLOSED = {
    "all": (Sampling(temperature=1), P),
    "cold": (Sampling(temperature=0.5), normal(P**2)),
    "hot": (Sampling(temperature=2), normal(P**0.5)),
    "coldest": (Sampling(temperature=1e-300), only(6)),
    "top_k": (Sampling(temperature=1, top_k=3), only(6, 2, 4)),
    "top_k of all": (Sampling(temperature=1, top_k=100), P),
    "top_k of one": (Sampling(temperature=1e6, top_k=1), only(6)),
    "top_p": (Sampling(temperature=1, top_p=0.7), only(6, 2, 4)),
    "top_p of one": (Sampling(temperature=1, top_p=1e-9), only(6)),
    "top_p of all": (Sampling(temperature=1, top_p=1), P),
    "min_p": (Sampling(temperature=1, min_p=0.2), only(6, 2, 4, 0)),
    "typical_p": (Sampling(temperature=1, typical_p=0.5), typical_of_p(0.5)),
    # the entropy is 1.684, and -ln 0.2 = 1.609 nearest
    "typical_p without the most likely": (Sampling(temperature=1, typical_p=0.1), only(2)),
    # 0.4 0.2 of 0.75 reach 0.75
    "top_p after top_k": (Sampling(temperature=1, top_k=3, top_p=0.75), only(6, 2)),
    "logit_bias": (
        Sampling(temperature=1, logit_bias={1: math.log(10), 6: -100}),
        normal(P * torch.tensor([1, 10, 1, 1, 1, 1, 0, 1])),
    ),
}


@pytest.mark.parametrize("name", CLOSED)
def test_drawn_tokens_have_the_closed_form_distribution(name: str) -> None:
    sampling, expected = CLOSED[name]
    assert chance(drawn(P.log().float(), sampling, 20_000), expected) > 1e-6


def test_the_proof_would_see_a_wrong_distribution() -> None:
    assert chance(drawn(P.log().float(), Sampling(temperature=1.1), 20_000), P) < 1e-6


def test_a_large_vocabulary_is_drawn_from_as_it_should() -> None:
    """20,000 tokens in eight classes of known mass; bf16 logits."""
    classes = torch.arange(20_000) % 8
    logits = P.log().bfloat16()[classes]
    counts = sum(drawn(logits, Sampling(temperature=1), 100, seed) for seed in range(20))
    none = torch.zeros(8, dtype=torch.float64)
    mass = none.index_add(0, classes, logits.double().softmax(-1))
    assert chance(none.index_add(0, classes, counts.double()), mass) > 1e-6


@pytest.mark.parametrize(("number", "token"), [(0.0, 3), (0.5, 3), (1 - 2**-53, 1)])
def test_a_token_of_no_probability_is_never_drawn(number: float, token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by the least and the largest number that a generator gives."""
    monkeypatch.setattr(Tensor, "uniform_", lambda self, generator: self.fill_(number))
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.5, -math.inf]])
    assert choose(logits, [Sampling(temperature=1)], generators=[None]).tokens.tolist() == [token]


# Against transformers

MODEL = GPT2LMHeadModel(
    GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
)


def composed(sampling: Sampling, history: Tensor, logits: Tensor) -> Tensor:
    """Returns logits (b, v) after the processors of transformers' generate(), in its order."""
    asked = {name: getattr(sampling, name) for name in ("top_k", "top_p", "min_p", "typical_p", "repetition_penalty")}
    config = GenerationConfig(
        **{**asked, "top_k": sampling.top_k or 0},
        do_sample=sampling.temperature > 0,
        temperature=sampling.temperature or 1.0,
        sequence_bias={(token,): float(bias) for token, bias in sampling.logit_bias.items()} or None,
    )
    processors = MODEL._get_logits_processor(
        config, input_ids_seq_length=history.shape[1], device="cpu", model_kwargs={}
    )
    return processors(history, logits.clone())


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours.isneginf(), theirs.isneginf())
    kept = ~ours.isneginf()
    assert kept.any(-1).all()
    torch.testing.assert_close(ours[kept], theirs[kept], rtol=1e-6, atol=0)


WARPERS: dict[str, list[dict[str, Any]]] = {
    "temperature": [{"temperature": t} for t in (0.1, 0.7, 1.0, 3.0)],
    "top_k": [{"top_k": k} for k in (1, 5, 300, 10_000)],
    "top_p": [{"top_p": p} for p in (1e-4, 0.3, 0.9, 0.999)],
    "min_p": [{"min_p": p} for p in (1e-4, 0.05, 0.5, 1.0)],
    "typical_p": [{"typical_p": p} for p in (0.2, 0.5, 0.9)],  # nearer to 0 or 1, their rounding in fp32 shows
    "repetition_penalty": [{"repetition_penalty": r} for r in (0.5, 1.2, 5.0)],
    "logit_bias": [{"logit_bias": {3: 1.5, 0: -7.25, 4: 100}}],
    "greedy": [{"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {2: -1}, "top_k": 2, "typical_p": 0.1}],
}


@pytest.mark.parametrize("vocab_size", [8, 5000])
@pytest.mark.parametrize("name", WARPERS)
def test_each_warper_is_that_of_transformers(name: str, vocab_size: int) -> None:
    for fields in WARPERS[name]:
        for spread in (0.01, 1.0, 4.0):
            logits = torch.randn(4, vocab_size) * spread
            history = torch.randint(vocab_size, (4, 12))
            sampling = Sampling(**{"temperature": 1.0, **fields})
            assert_same(warp(logits, sampling, list(history), [3] * 4), composed(sampling, history, logits))


SOME = {
    "temperature": st.sampled_from([0.3, 1.0, 1.7]),
    "top_k": st.sampled_from([None, 1, 4, 40]),
    "top_p": st.sampled_from([None, 0.2, 0.9, 1.0]),
    "min_p": st.sampled_from([None, 0.01, 0.3]),
    "typical_p": st.sampled_from([None, 0.3, 0.95, 1.0]),
    "repetition_penalty": st.sampled_from([1.0, 0.8, 1.3]),
    "logit_bias": st.dictionaries(st.integers(0, 7), st.sampled_from([-100.0, -1.5, 2.0]), max_size=3),
}


@given(st.fixed_dictionaries(SOME), st.sampled_from([8, 700]), st.integers(0, 1 << 20))
@settings(max_examples=150, deadline=None)
def test_together_they_are_composed_as_transformers_composes_them(
    fields: dict[str, Any], vocab_size: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab_size, generator=random) * 3
    history = torch.randint(vocab_size, (3, 6), generator=random)
    sampling = Sampling(**fields)
    before = logits.clone()
    assert_same(warp(logits, sampling, list(history), [2] * 3), composed(sampling, history, logits))
    assert torch.equal(logits, before)


def test_equal_logits_share_their_fate() -> None:
    """Tokens whose logits equal that of the last kept token are kept, by top_p as by top_k."""
    logits = torch.tensor([3.0, 1.0, 1.0, 1.0, -2.0])
    for sampling in (Sampling(temperature=1, top_k=2), Sampling(temperature=1, top_p=0.75)):
        assert one(logits, sampling).isfinite().tolist() == [True, True, True, True, False]


# Penalties


def test_frequency_and_presence_count_only_generated_tokens() -> None:
    """mu_j - c_j a_frequency - [c_j > 0] a_presence, as OpenAI's API has it."""
    logits = torch.linspace(-2, 2, 6)
    prompt, answer = [0, 0, 1], [1, 4, 4, 4]
    for frequency, presence in ((0.5, 0.0), (0.0, 0.75), (0.3, -0.2), (-2.0, 2.0)):
        sampling = Sampling(frequency_penalty=frequency, presence_penalty=presence)
        wanted = [
            float(logit) - frequency * answer.count(token) - presence * (token in answer)
            for token, logit in enumerate(logits)
        ]
        found = one(logits, sampling, prompt + answer, len(prompt))
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-6, atol=1e-7)
        assert torch.equal(one(logits, sampling, prompt, len(prompt)), logits)  # nothing generated yet


def test_rows_of_other_lengths_are_penalized_by_their_own_tokens() -> None:
    sampling = Sampling(repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=0.1)
    logits = torch.randn(3, 9)
    histories = [torch.tensor([1, 2, 2]), torch.tensor([3]), torch.tensor([4, 4, 5, 5, 5, 8])]
    starts = [1, 1, 3]
    together = warp(logits, sampling, histories, starts)
    alone = [
        warp(row[None], sampling, [history], [start])[0]
        for row, history, start in zip(logits, histories, starts, strict=True)
    ]
    assert torch.equal(together, torch.stack(alone))


@given(st.fixed_dictionaries({**SOME, "frequency_penalty": st.sampled_from([0.0, -100.0, 100.0])}), st.integers(0, 999))
@settings(max_examples=60, deadline=None)
def test_something_is_always_left(fields: dict[str, Any], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 50, generator=random) * 10 ** float(torch.rand(1, generator=random) * 8 - 4)
    logits[0, 1:30] = -math.inf
    found = warp(logits, Sampling(**fields), [torch.randint(50, (9,), generator=random)], [4])
    assert found.isfinite().any() and not found.isnan().any() and not found.isposinf().any()


# Rows

MIXED = [
    GREEDY,
    Sampling(temperature=1),
    Sampling(temperature=0.8, top_k=20, top_p=0.9),
    Sampling(temperature=0, repetition_penalty=1.4),
    Sampling(temperature=1.2, typical_p=0.8, presence_penalty=0.5),
    Sampling(temperature=1, min_p=0.05, logit_bias={3: 4.0}),
]


def written(rows: list[int], samplings: list[Sampling], steps: int = 12, vocab_size: int = 300) -> dict[int, list[int]]:
    """Returns the text of each row (by its number) sampled in one batch, from logits that depend on the last token."""
    table = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    generators = [row_generator(7, row, "cpu") for row in rows]
    text = {row: [row % 5] for row in rows}
    for _ in range(steps):
        logits = torch.stack([table[text[row][-1]] for row in rows])
        histories = [torch.tensor(text[row]) for row in rows]
        found = choose(logits, [samplings[row] for row in rows], histories, [1] * len(rows), generators)
        for row, token in zip(rows, found.tokens.tolist(), strict=True):
            text[row].append(token)
    return text


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    samplings = [MIXED[row % len(MIXED)] for row in range(18)]
    together = written(list(range(18)), samplings)
    assert len({tuple(text[1:]) for row, text in together.items() if samplings[row].temperature}) == 12
    backwards = written(list(reversed(range(18))), samplings)
    for row in range(18):
        assert together[row] == backwards[row] == written([row], samplings)[row]
    apart = [sampling.replace() for sampling in samplings]  # equal, and not the same object
    assert written(list(range(18)), apart) == together


def test_row_generator_depends_only_on_seed_and_row() -> None:
    def start(seed: int | None, row: int) -> tuple[float, ...]:
        return tuple(torch.rand(3, generator=row_generator(seed, row, "cpu")).tolist())

    assert start(5, 2) == start(5, 2)
    several = {start(seed, row) for seed in (-1, 0, 1, 12, 1 << 80) for row in range(40)}
    assert len(several) == 200
    assert start(1, 23) != start(12, 3)
    assert start(None, 0) != start(None, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("broken", [[5], [49], [0, 17], list(range(50))])
@pytest.mark.parametrize("value", [math.nan, math.inf, "all -inf"])
def test_a_broken_row_harms_no_other(value: float | str, broken: list[int], dtype: torch.dtype) -> None:
    logits = (torch.randn(len(MIXED), 50) * 3).to(dtype)
    for row in range(len(MIXED)):
        wrong = logits.clone()
        wrong[row, broken] = value if isinstance(value, float) else torch.nan
        if value == "all -inf":
            wrong[row] = -math.inf
        found, fine = (chosen(some) for some in (wrong, logits))
        assert found.bad.tolist() == [other == row for other in range(len(MIXED))]
        assert not fine.bad.any()
        others = ~found.bad
        assert torch.equal(found.tokens[others], fine.tokens[others])
        assert 0 <= int(found.tokens[row]) < 50


def chosen(logits: Tensor, **asked: Any) -> Sampled:
    rows = range(len(logits))
    histories = [torch.tensor([row, 1, 2]) for row in rows]
    generators = [row_generator(0, row, "cpu") for row in rows]
    return choose(logits, MIXED, histories, [1] * len(MIXED), generators, **asked)


# What is reported


def test_logprobs_are_those_of_the_model() -> None:
    logits = torch.randn(len(MIXED), 40).bfloat16() * 4
    found = chosen(logits, top=5)
    wanted = logits.double().log_softmax(-1)
    assert found.logprobs is not None and found.top_ids is not None and found.top_logprobs is not None
    torch.testing.assert_close(
        found.logprobs.double(), wanted.gather(-1, found.tokens[:, None])[:, 0], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(found.top_logprobs.double(), wanted.topk(5).values, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.top_logprobs.double(), wanted.gather(-1, found.top_ids), rtol=0, atol=1e-5)
    assert torch.equal(chosen(logits, logprobs=True).logprobs, found.logprobs)
    assert chosen(logits, logprobs=True).top_ids is None and chosen(logits).logprobs is None
    assert chosen(logits, top=41).top_ids.shape == (len(MIXED), 40)  # type: ignore[union-attr]


class Passes(TorchDispatchMode):
    """The operations that read or write as much as all logits."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.seen = size, []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [item for item in (*args, result) if isinstance(item, Tensor)]
        if any(tensor.numel() >= self.size for tensor in tensors):
            self.seen.append(str(function))
        return result


def test_greedy_rows_cost_one_pass() -> None:
    logits = torch.randn(4, 1000).bfloat16()
    with Passes(logits.numel()) as passes:
        found = choose(logits, [GREEDY, Sampling(top_k=3, typical_p=0.2), GREEDY, GREEDY])
    assert passes.seen == ["aten.max.dim"]
    assert torch.equal(found.tokens, logits.argmax(-1))


# Requests


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"temperature": -0.1}, "range", "temperature"),
        ({"temperature": math.nan}, "range", "temperature"),
        ({"temperature": math.inf}, "range", "temperature"),
        ({"temperature": "warm"}, "type", "temperature"),
        ({"top_p": 0}, "range", "top_p"),
        ({"top_p": 1.1}, "range", "top_p"),
        ({"top_p": math.nan}, "range", "top_p"),
        ({"top_k": 0}, "range", "top_k"),
        ({"top_k": 2.5}, "type", "top_k"),
        ({"min_p": -1}, "range", "min_p"),
        ({"typical_p": 0}, "range", "typical_p"),
        ({"repetition_penalty": 0}, "range", "repetition_penalty"),
        ({"frequency_penalty": -math.inf}, "range", "frequency_penalty"),
        ({"presence_penalty": 101}, "range", "presence_penalty"),
        ({"logit_bias": {7: math.nan}}, "range", "logit_bias.7"),
        ({"logit_bias": {-7: 1.0}}, "range", "logit_bias.-7.[key]"),
        ({"logit_bias": dict.fromkeys(range(10_001), 0.0)}, "range", "logit_bias"),
        ({"topp": 0.9}, "unknown", "topp"),
    ],
)
def test_a_wrong_value_is_one_sentence(fields: dict[str, Any], code: str, field: str) -> None:
    with refused(code=code, field=field) as caught:
        Sampling(**fields)
    assert "\n" not in str(caught.value)


def test_bias_on_a_missing_token_is_refused() -> None:
    Sampling(logit_bias={9: 1.0}).check(10)
    with refused(code="range", field="logit_bias"):
        Sampling(logit_bias={3: 1.0, 10: 1.0}).check(10)


def test_a_sampling_is_a_value() -> None:
    sampling = Sampling(temperature=0.5, logit_bias={3: 1.0})
    assert sampling.plain is False and sampling.penalizes is False  # kept once asked for, and no part of the value
    assert sampling == Sampling(**to_plain(sampling)) == GREEDY.replace(temperature=0.5, logit_bias={"3": 1})
    assert sampling.replace(temperature=0, logit_bias={}).plain

    class Request(Value):
        sampling: Sampling = GREEDY

    assert Request(sampling={"top_k": 3}).sampling.top_k == 3  # type: ignore[arg-type]
    with refused(code="range", field="sampling.temperature"):
        Request(sampling={"temperature": -1})  # type: ignore[arg-type]


def test_a_processor_changes_the_logits_of_its_row_by_the_tokens_so_far() -> None:
    def never_again(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits[tokens] = -math.inf
        return logits

    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    before, rule = logits.clone(), Sampling(logits_processor=never_again)
    chosen = choose(logits, [rule, rule], [torch.tensor([1]), torch.tensor([0])], [1, 1], logprobs=True)
    assert chosen.tokens.tolist() == [2, 1] and torch.equal(logits, before)
    torch.testing.assert_close(chosen.logprobs, logits.log_softmax(-1)[[0, 1], [2, 1]])  # of the model's distribution
    assert rule.key != Sampling().key != Sampling(top_k=3).key


@pytest.mark.parametrize(
    ("processor", "code"),
    [
        (lambda logits, tokens: None, "type"),
        (lambda logits, tokens: logits[:2], "type"),
        (lambda logits, tokens: logits - math.inf, "range"),
        (lambda logits, tokens: logits * math.nan, "range"),
    ],
)
def test_a_processor_that_leaves_nothing_to_draw_from_is_refused(processor: Any, code: Any) -> None:
    with refused(code=code, field="logits_processor"):
        choose(torch.zeros(1, 3), [Sampling(logits_processor=processor)], [torch.tensor([1])], [1])
