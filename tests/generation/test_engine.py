"""Requests in a running batch give the text that each gives in a batch of one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from glassformer.errors import RequestError
from glassformer.generation import generate, steps
from glassformer.generation.engine import Engine, GenerationRequest, TextPiece
from glassformer.generation.sampling import Sampling
from glassformer.generation.steps import piece_end, split_pieces
from glassformer.introspection import edit, sites
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.parts.core.site import look_at
from glassformer.text import ByteTokenizer
from tests.refused import refused

torch.set_num_threads(1)
BYTES = ByteTokenizer()
SMALL = "layers=2+d_model=32+heads=4+context=64+init=gpt2+init.std=0.2"


def tiny(expression: str = "llama", vocab_size: int = 31) -> Model:
    name, _, changes = expression.partition("+")
    changes = f"+{changes}" if changes else ""
    return preset(f"{name}@1m+{SMALL}+vocab_size={vocab_size}{changes}").build(seed=1).eval()


def drain(engine: Engine) -> None:
    for _ in range(500):
        if not engine.step():
            return
    raise AssertionError("the engine never ends")


def alone(model: Model, request: GenerationRequest, **rule: Any) -> list[int]:
    whole = generate(model, torch.tensor([request.prompt]), request.max_new_tokens, **rule)
    return whole[0, len(request.prompt) :].tolist()


def prompts(count: int = 7) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(31, (2 + 3 * i % 8,), generator=draw).tolist() for i in range(count)]


@pytest.mark.parametrize(
    "expression", ["llama", "gpt2", "bloom", "mistral+window:5", "gpt2+nope+softcap:5", "llama+mamba"]
)
def test_row_generates_the_same_as_without_others(expression: str):
    model = tiny(expression)
    engine = Engine(model, slots=3, context=40)
    asked = [(ids, 4 + i % 5, float(i % 2)) for i, ids in enumerate(prompts())]
    got = [engine.submit(ids, new, seed=5, temperature=t) for ids, new, t in asked]
    drain(engine)
    for (ids, new, temperature), request in zip(asked, got, strict=True):
        alone = generate(model, torch.tensor([ids]), new, temperature=temperature, seed=5)[0, len(ids) :]
        assert request.tokens == alone.tolist() and request.finish == "length"


def test_requests_come_while_others_run():
    model, engine = tiny(), Engine(tiny(), slots=2, context=40)
    first = engine.submit([1, 2, 3], 12)
    for _ in range(4):
        engine.step()
    assert len(first.tokens) == 4
    later = [engine.submit([4, 5], 3), engine.submit([6], 6)]
    drain(engine)
    for request in (first, *later):
        alone = generate(model, torch.tensor([request.prompt]), request.max_new_tokens)[0, len(request.prompt) :]
        assert request.tokens == alone.tolist()


def test_cancelling_does_not_affect_other_requests():
    engine = Engine(tiny(), slots=3, context=40)
    requests = [engine.submit(ids, 10) for ids in prompts(5)]
    for _ in range(3):
        engine.step()
    requests[0].cancel()
    requests[4].cancel()  # had not started
    drain(engine)
    assert requests[0].finish == requests[4].finish == "cancelled"
    assert len(requests[0].tokens) == 3 and not requests[4].tokens
    for request in requests[1:4]:
        alone = generate(tiny(), torch.tensor([request.prompt]), 10)[0, len(request.prompt) :]
        assert request.tokens == alone.tolist()


def harmful(expression: str, value: float) -> Model:
    """Returns a model whose logits fail once it reads token 30."""
    model = tiny(f"{expression}+untied")
    with torch.no_grad():
        model.embedding.weight[30] = value
    return model


def test_nan_logits_end_only_one_row():
    engine = Engine(harmful("llama", math.nan), slots=3, context=40)
    good, bad = engine.submit([1, 2], 5, logit_bias={30: -100}), engine.submit([3, 30], 5)
    drain(engine)
    assert bad.finish == "failed" and bad.error and "not numbers" in bad.error and "\n" not in bad.error
    assert good.finish == "length" and len(good.tokens) == 5
    after = engine.submit([3, 4], 5, logit_bias={30: -100})  # has the first token of the failed one
    drain(engine)
    assert after.finish == "length"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        *((name, math.nan) for name in ("llama", "gpt2", "bloom", "mistral+window:5", "llama+mamba", "gpt2+moe:4:2")),
        ("llama", math.inf),
        ("llama+mamba", -math.inf),
    ],
)
def test_request_in_the_row_of_a_failed_one_is_unaffected(expression: str, value: float):
    """A longer neighbour makes all rows attend over slots that the failed request has filled."""
    model = harmful(expression, value)
    engine = Engine(model, slots=2, context=60)
    rule = {"logit_bias": {30: -100}}
    long = engine.submit(list(range(1, 15)), 18, **rule)
    bad = engine.submit([*range(3, 11), 30], 5)
    for _ in range(3):
        engine.step()
    short = engine.submit([1, 2], 6, **rule)
    drain(engine)
    assert bad.finish == "failed"
    for request in (long, short):
        assert request.error is None and request.tokens == alone(model, request, **rule)


def test_a_state_leaves_nothing_behind():
    """Whatever is not a number: a row is empty again once its request has left it, moved or not."""
    for expression in ("llama", "mistral+window:5", "llama+mamba"):
        engine = Engine(tiny(expression), slots=3, context=40, dtype=torch.int8 if expression == "llama" else None)
        requests = [engine.submit(ids, 3 + i) for i, ids in enumerate(prompts(3))]
        requests[1].cancel()
        drain(engine)
        assert not any(bool(tensor.any()) for tensor in engine._batch.tensors().values())


def test_one_prompt_is_read_once():
    model = tiny()
    engine = Engine(model, slots=4, context=60)
    long = torch.randint(31, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    read: list[int] = []
    samples = [engine.submit(long, 4, seed=1, n=i, temperature=1.5) for i in range(3)]
    other = engine.submit([*long[:20], 7, 8], 4)
    with look_at([(model.embed, lambda x, first, total: read.append(x.shape[1]))]):
        drain(engine)
    assert sorted(n for n in read if n > 1) == [2, 30]
    assert len({tuple(one.tokens) for one in samples}) == 3
    assert other.tokens == generate(tiny(), torch.tensor([other.prompt]), 4)[0, 22:].tolist()


def test_finished_request_is_returned_once_with_its_whole_text():
    model = tiny(vocab_size=257)
    engine = Engine(model, BYTES, slots=2, context=60)
    free = engine.submit("Once", 12)
    drain(engine)
    stop = free.text[1:] + "zz"  # all but the first character may be its prefix
    held, late = engine.submit("Once", 12, stop=stop), engine.submit("Twice", 30)
    for _ in range(9):
        engine.step()
    assert held.text == free.text[:1] and len(held.tokens) == 9
    held.cancel()
    waiting = engine.submit("Thrice", 3)
    waiting.cancel()
    told = list(engine)
    assert held.text == BYTES.decode(held.tokens) and held.piece == held.text[1:]
    assert held in told[0] and waiting in told[0]
    assert sum(held in changed for changed in told) == sum(waiting in changed for changed in told) == 1
    assert late in told[-1] and late.finish == "length" and len(late.tokens) == 30
    assert engine.step() == []


def test_request_cancelled_in_the_loop_ends_there():
    engine = Engine(tiny(vocab_size=257), BYTES, slots=2, context=60)
    only = engine.submit("Once", 12)
    shown, ends = "", []
    for changed in engine:
        assert changed == [only]
        shown += only.piece
        ends.append(only.finish)
        if len(only.tokens) == 4:
            only.cancel()
    assert ends == [None] * 4 + ["cancelled"] and shown == only.text == BYTES.decode(only.tokens)


def test_failed_row_releases_its_held_text():
    model = tiny(vocab_size=257)
    engine = Engine(model, BYTES, slots=2, context=60)
    free = engine.submit("Once", 12)
    drain(engine)
    held = engine.submit("Once", 12, stop=free.text[1:] + "zz")
    for _ in range(6):
        engine.step()
    with edit(model, {"logits": lambda logits: logits * math.nan}):
        assert engine.step() == [held]
    assert held.finish == "failed" and held.piece and held.text == BYTES.decode(held.tokens)


@pytest.mark.parametrize("start", [[], [30]])  # common prefix of all prompts
def test_several_beginnings_are_read_once(start: list[int]):
    model = tiny()
    engine = Engine(model, slots=2, context=60)
    draw = torch.Generator().manual_seed(0)
    a, b = ([*start, *torch.randint(30, (20,), generator=draw).tolist()] for _ in range(2))
    read: list[int] = []
    requests = [engine.submit([*prompt, last], 1) for last in (1, 2, 3) for prompt in (a, b)]
    with look_at([(model.embed, lambda x, first, total: read.append(x.shape[1]))]):
        drain(engine)
    n = len(a) + 1
    assert read == [n, n - len(start), 1, 1, 1, 1]
    for request in requests:
        assert request.tokens == alone(model, request)


@pytest.mark.parametrize("expression", ["llama", "mistral+window:5", "llama+mamba"])
@pytest.mark.parametrize("dtype", [None, pytest.param(torch.int8, marks=pytest.mark.slow)])
def test_prompts_that_share_beginnings(expression: str, dtype: torch.dtype | None):
    """Prompts that are prefixes of each other, in any order, give the text of separate engines."""
    model = tiny(expression)
    draw = torch.Generator().manual_seed(0)
    long = torch.randint(31, (24,), generator=draw).tolist()
    asked = [[*long[:n], *last] for n in (4, 24, 3, 12, 20, 8, 24) for last in ([], [7], [8, 9])]
    engine = Engine(model, slots=2, context=40, dtype=dtype)
    got = [engine.submit(prompt, 3) for prompt in asked]
    drain(engine)
    for request in got:
        fresh = Engine(model, slots=1, context=40, dtype=dtype)
        once = fresh.submit(request.prompt, 3)
        drain(fresh)
        assert request.tokens == once.tokens


def test_kept_prompt_states_are_bounded(monkeypatch: pytest.MonkeyPatch):
    engine = Engine(tiny(), slots=1, context=40)
    bytes_of_one = engine._new_state(1).nbytes
    for allowed, kept in ((1 << 30, 4), (2 * bytes_of_one, 2), (bytes_of_one - 1, 1)):
        monkeypatch.setattr("glassformer.generation.engine.MOST_READ_BYTES", allowed)
        for first in range(8):
            engine.submit([first, 1, 2], 1)
        drain(engine)
        assert len(engine._reads) == kept


@contextmanager
def interrupted(model: Model, site: str) -> Iterator[None]:
    """Raises KeyboardInterrupt at a site inside each pass of the model, and expects it to leave the block."""

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    with look_at([(sites(model)[site], strike)]), pytest.raises(KeyboardInterrupt):
        yield


@pytest.mark.parametrize("expression", ["llama", "mistral+window:5", "llama+mamba"])
@pytest.mark.parametrize("site", ["embed", "layers.1.resid_post"])
def test_interrupt_loses_no_request(expression: str, site: str):
    """Neither while a prompt is read nor while a token is decoded."""
    model = tiny(expression)
    engine = Engine(model, slots=2, context=60)
    a, b = list(range(1, 21)), [1, 2, 3, 4, 5, 25, 26, 27]
    first = engine.submit(a, 12, temperature=1.0, seed=3)
    engine.step()
    joining = engine.submit(b, 6)
    with interrupted(model, site):
        engine.step()  # decodes
    with interrupted(model, site):
        engine.step()  # reads again what was running
    for _ in range(2):
        engine.step()
    with interrupted(model, site):
        engine.step()
    again = engine.submit(a, 6)
    drain(engine)
    assert first.tokens == alone(model, first, temperature=1.0, seed=3)
    for request in (joining, again):
        assert request.finish == "length" and request.tokens == alone(model, request)


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_interrupted_prompt_is_not_taken_for_read(cancelled: bool):
    model = tiny()
    engine = Engine(model, slots=2, context=60)
    a, b = list(range(1, 21)), [1, 2, 3, 4, 5, 25, 26, 27]
    engine.submit(a, 3)
    drain(engine)
    joining = engine.submit(b, 3)
    with interrupted(model, "layers.0.resid_post"):
        engine.step()
    assert joining.finish is None and engine.requests == [joining]
    again = engine.submit(a, 6)
    if cancelled:
        joining.cancel()
    drain(engine)
    for request in (again,) if cancelled else (joining, again):
        assert request.finish == "length" and request.tokens == alone(model, request)


def test_an_interrupt_while_a_token_is_shown_cancels_its_text(monkeypatch: pytest.MonkeyPatch):
    model = tiny()
    engine = Engine(model, slots=2, context=60)
    struck, other = (engine.submit(ids, 8) for ids in prompts(2))
    for _ in range(3):
        engine.step()
    show = GenerationRequest._show

    def strike(self: GenerationRequest, piece: TextPiece) -> None:
        show(self, piece)
        if self is struck:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(GenerationRequest, "_show", strike)
        engine.step()
    drain(engine)
    assert struck.finish == "cancelled" and struck.error is None and len(struck.tokens) == 4
    assert other.finish == "length" and other.tokens == alone(model, other)


def test_an_interrupt_between_rows_draws_nothing_twice(monkeypatch: pytest.MonkeyPatch):
    """Struck once tokens are drawn, after the first of three rows has its own."""
    model = tiny()
    engine = Engine(model, slots=3, context=60)
    requests = [engine.submit(ids, 8, i, temperature=1.0, logprobs=True) for i, ids in enumerate(prompts(3))]
    for _ in range(3):
        engine.step()
    note = Engine._note

    def strike(self: Engine, one: GenerationRequest) -> None:
        if one is requests[1]:
            raise KeyboardInterrupt
        note(self, one)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Engine, "_note", strike)
        engine.step()
    assert [len(one.tokens) for one in requests] == [4, 3, 3]
    drain(engine)
    for seed, request in enumerate(requests):
        assert request.tokens == alone(model, request, temperature=1.0, seed=seed) and len(request.logprobs) == 8


def test_next_step_returns_requests_that_ended_in_an_interrupted_one():
    model = tiny(vocab_size=257)
    engine = Engine(model, BYTES, slots=2, context=60)
    short, held = engine.submit("Once", 2), engine.submit("Twice", 5)
    engine.step()
    joining = engine.submit("Thrice", 3)
    first = short.piece

    def strike(x: torch.Tensor, *_: object) -> None:
        if x.shape[1] > 1:  # a prompt
            raise KeyboardInterrupt

    with look_at([(model.embed, strike)]), pytest.raises(KeyboardInterrupt):
        engine.step()
    assert short.finish == "length" and held.finish is None
    told = engine.step()
    assert set(told) == {short, held, joining} and first + short.piece == short.text
    drain(engine)
    assert held.text == BYTES.decode(held.tokens) and held.tokens == alone(model, held)


def test_a_token_past_the_tokenizers_vocabulary_has_no_text():
    """A vocabulary of weights is often padded beyond the tokenizer's."""
    model = tiny(vocab_size=300)
    engine = Engine(model, BYTES, slots=3, context=60)
    others = [engine.submit("Once", 8, logit_bias=dict.fromkeys(range(257, 300), -100)) for _ in range(2)]
    bad = engine.submit("Twice", 8, logit_bias={299: 100})
    others.append(engine.submit("Thrice", 8, logit_bias=dict.fromkeys(range(257, 300), -100)))
    drain(engine)
    assert bad.finish == "length" and bad.tokens == [299] * 8 and bad.text == ""
    for one in others:
        assert one.tokens == alone(model, one, logit_bias=dict.fromkeys(range(257, 300), -100))


def test_text_stops_and_is_whole():
    model = tiny(vocab_size=257)
    engine = Engine(model, BYTES, slots=2, context=80)
    free = engine.submit("Once", 24)
    drain(engine)
    assert free.text == BYTES.decode(free.tokens)
    raw = free.text
    stop = raw[8:11]
    cut = engine.submit("Once", 24, stop=stop)
    never = engine.submit("Once", 24, stop=["never to be seen"])
    shown = ""
    for _ in range(60):
        if not engine.step():
            break
        shown += cut.piece if not cut.finish or stop not in shown else ""
    assert cut.finish == "stop" and cut.text == raw[: raw.index(stop)]
    assert never.finish == "length" and never.text == raw


def test_log_probabilities_are_the_models_own():
    model = tiny()
    engine = Engine(model, slots=3, context=40)
    request = engine.submit([1, 2, 3], 5, temperature=0.7, seed=0, top_logprobs=3)
    chosen = engine.submit([1, 2, 3], 5, temperature=0.7, seed=0, logprobs=True)  # alone
    silent = engine.submit([1, 2, 3], 5)
    drain(engine)
    assert chosen.tokens == request.tokens and chosen.logprobs == request.logprobs and len(chosen.logprobs) == 5
    assert chosen.top_logprobs == silent.logprobs == silent.top_logprobs == []
    with torch.no_grad():
        every = model(torch.tensor([request.prompt + request.tokens])).log_softmax(-1)[0]
    for i, token in enumerate(request.tokens):
        row = every[len(request.prompt) - 1 + i]
        assert abs(request.logprobs[i] - float(row[token])) < 1e-4
        best = row.topk(3)
        assert list(request.top_logprobs[i]) == best.indices.tolist()
        for value, mine in zip(best.values.tolist(), request.top_logprobs[i].values(), strict=True):
            assert abs(value - mine) < 1e-4


@pytest.mark.parametrize(
    ("prompt", "options", "names"),
    [
        ("", {}, "empty"),
        ([], {}, "at least one token"),
        (["a"], {}, "must be rows of ids"),
        ([1.7], {}, "whole numbers"),
        ([True], {}, "whole numbers"),
        (None, {}, "must be rows of ids"),
        (5, {}, "tokens"),
        ([[1, 2], [3, 4]], {}, "2 rows"),
        ([-1], {}, "token -1"),
        ([2**70], {}, "must be rows of ids"),
        (torch.tensor([1.0]), {}, "whole numbers"),
        ([1], {"max_new_tokens": None}, "max_new_tokens=None"),
        ([1], {"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
        ([1], {"top_logprobs": 1.5}, "top_logprobs=1.5"),
        ([1], {"n": "2"}, "n='2'"),
        ([1], {"stop": [3]}, "stop[0]=3"),
        ([1] * 40, {}, "40 tokens"),
        ([999], {}, "token 999"),
        ("x" * 10_000_001, {}, "10,000,001"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"stop": ["x"] * 10_001}, "10001"),
        ([1], {"stop": [""]}, "empty"),
        ([1], {"logit_bias": {999: 1.0}}, "999"),
        ([1], {"warmth": 1.0}, "warmth"),
        ([1], {"top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_wrong_requests_are_refused_at_once(prompt: object, options: dict, names: str):
    engine = Engine(tiny(vocab_size=257), BYTES, slots=2, context=40)
    with pytest.raises(RequestError) as refused:
        engine.submit(prompt, **options)  # type: ignore[arg-type]
    assert names in str(refused.value) and "\n" not in str(refused.value)
    assert not engine.step()


def test_an_engine_of_no_size_is_refused():
    for field, value in (("slots", 0), ("slots", 1.5), ("context", 1), ("context", None), ("chunk", 0)):
        with refused(code="range" if isinstance(value, int) else "type", field=field):
            Engine(tiny(), **{field: value})  # type: ignore[arg-type]


def test_a_sampling_is_looked_up_not_searched(monkeypatch: pytest.MonkeyPatch):
    """However many requests are open; equal ones share an object, and are warped together."""
    engine = Engine(tiny(), slots=1, context=40)
    compared: list[object] = []
    monkeypatch.setattr(Sampling, "__eq__", lambda self, other: compared.append(other) or self is other)
    requests = [engine.submit([1], 1, temperature=1 + i % 10 / 10, logit_bias={3: i % 2}) for i in range(60)]
    assert not compared
    assert len({id(one.sampling) for one in requests}) == 10
    assert requests[3].sampling is requests[13].sampling and requests[13].sampling.temperature == 1.3


def test_request_has_the_given_tokens_and_a_bounded_length():
    request = Engine(tiny(), slots=1, context=40).submit(torch.tensor([1, 2]), 99)
    assert isinstance(request, GenerationRequest) and request.max_new_tokens == 38 and request.finish is None


def test_a_prompt_read_under_an_edit_is_not_kept():
    """An engine reuses what it read of the prompt before; not across the ends of a `gf.edit`."""
    model = tiny()
    engine, prompt = Engine(model, slots=1, context=40), [1, 2, 3, 4]

    def says() -> list[int]:
        request = engine.submit(prompt, 6)
        drain(engine)
        return request.tokens

    plain = says()
    with edit(model, {"layers.0.mixer.v": lambda v: -2 * v}):
        edited = says()
        assert edited == generate(model, torch.tensor([prompt]), 6)[0, 4:].tolist()
    assert edited != plain and says() == plain


class Ticks:
    """A clock that counts: each layer takes 1, and each decoding `decoding`."""

    def __init__(self, engine: Engine, decoding: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.log = 0, ""
        run, decode = engine.model.states_by_layer, engine._decode

        def layers(tokens: torch.Tensor, *rest: Any) -> Iterator[torch.Tensor]:
            for x in run(tokens, *rest):
                self.now += 1
                self.log += "l"
                yield x

        def decoded(tokens: torch.Tensor) -> torch.Tensor:
            self.now += decoding
            self.log += "."
            return decode(tokens)

        monkeypatch.setattr(engine.model, "states_by_layer", layers)
        monkeypatch.setattr(engine, "_decode", decoded)
        engine.clock = lambda: self.now


@pytest.mark.parametrize("expression", ["llama", "gpt2", "bloom", "mistral+window:5", "llama+mamba", "llama+mla"])
@pytest.mark.parametrize("decoding", [1, 2, 100])
def test_a_prompt_read_by_layers_gives_the_bits_of_one_read_at_once(
    expression: str, decoding: int, monkeypatch: pytest.MonkeyPatch
):
    """A prompt that joins a running text, in any division of time, and the same prompt without company."""
    prompt = [(7 * i) % 31 for i in range(29)]
    model = tiny(expression)
    quiet = Engine(model, slots=3, context=64, piece=8)
    expected = quiet.submit(prompt, 6, seed=1, temperature=1.0, logprobs=True)
    drain(quiet)
    engine = Engine(model, slots=3, context=64, piece=8)
    ticks = Ticks(engine, decoding, monkeypatch)
    running = engine.submit([1, 2, 3], 60, seed=1, temperature=1.0, stop_at_eos=False)
    engine.step()
    asked = [engine.submit(prompt, 6, seed=1, temperature=1.0, logprobs=True), engine.submit(prompt[::-1], 2)]
    drain(engine)
    assert "l" in ticks.log and running.finish == "length"
    assert asked[0].tokens == expected.tokens and asked[0].logprobs[0] == expected.logprobs[0]
    assert asked[1].tokens == alone(model, asked[1])


def test_a_running_text_waits_one_step_for_a_prompt(monkeypatch: pytest.MonkeyPatch):
    """Decoding takes 4, so at most floor(0.9 * 4) = 3 layers come between two tokens, and no step has layers of two
    pieces."""
    engine = Engine(tiny("llama+layers=6"), slots=3, context=64, piece=8)
    ticks = Ticks(engine, 4, monkeypatch)
    engine.submit([1, 2, 3], 60, stop_at_eos=False)
    engine.step()
    long = engine.submit([(7 * i) % 31 for i in range(29)], 2)
    while not long.tokens:
        engine.step()
    turns = ticks.log.strip(".").split(".")
    assert max(map(len, turns)) == 3 and "".join(turns) == "l" * 4 * 7  # six layers and the norm, of four pieces
    assert turns == ["lll", "lll", "l"] * 4


def test_pieces_have_fewer_tokens_in_a_long_prompt():
    """Ends depend only on the largest size, also of a prompt that is continued within a piece."""
    sizes = [part.shape[1] for part in split_pieces(torch.zeros(1, 2100), 64)]
    assert sizes == [64] * 8 + [32] * 48 + [16] * 3 + [4]
    assert [piece_end(start, 64) for start in (0, 37, 511, 512, 530, 2047, 2048)] == [64, 64, 512, 544, 544, 2048, 2064]
    assert piece_end(5000, 16) == 5008 and piece_end(5000, 8) == 5008  # never under 16, if the largest is not


@pytest.mark.parametrize("expression", ["llama", "mistral+window:5"])
def test_bits_of_a_long_prompt_do_not_depend_on_company(expression: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(steps, "HALVINGS", (8, 16))
    monkeypatch.setattr(steps, "LEAST_PIECE", 2)
    prompt, model = [(7 * i) % 31 for i in range(29)], tiny(expression)
    found = []
    for company in (False, True):
        engine = Engine(model, slots=3, context=64, piece=8)
        ticks = Ticks(engine, 3, monkeypatch) if company else None
        if company:
            engine.submit([1, 2, 3], 60, seed=1, temperature=1.0, stop_at_eos=False)
            engine.step()
        asked = engine.submit(prompt, 6, seed=1, temperature=1.0, logprobs=True)
        drain(engine)
        found.append((asked.tokens, asked.logprobs[0]))
        assert ticks is None or ticks.log.count("l") == 3 * 10  # layers, norm; 8, 4, 4, six times 2, and 1
    assert found[0] == found[1]


def test_single_text_is_prefilled_in_whole_pieces(monkeypatch: pytest.MonkeyPatch):
    engine = Engine(tiny(), slots=3, context=64, piece=8)
    ticks = Ticks(engine, 4, monkeypatch)
    engine.submit([(7 * i) % 31 for i in range(29)], 2)
    drain(engine)
    assert "l" not in ticks.log


@pytest.mark.parametrize("end", ["cancel", "error"])
def test_a_prompt_that_ends_between_its_layers_leaves_nothing(end: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny("llama+layers=6")
    engine = Engine(model, slots=3, context=64, piece=8)
    Ticks(engine, 2, monkeypatch)
    running = engine.submit([1, 2, 3], 30, stop_at_eos=False)
    engine.step()
    long = engine.submit([(7 * i) % 31 for i in range(29)], 2)
    engine.step()
    assert engine._piece_reader is not None and engine._piece_reader.hidden is None
    if end == "cancel":
        long.cancel()
        engine.step()
    else:
        engine._piece_reader.read = lambda enough: 1 / 0  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert engine._piece_reader is None and engine._reading is None
    drain(engine)
    assert running.tokens == alone(model, running) and (end == "cancel" or long.tokens == alone(model, long))
