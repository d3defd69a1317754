"""Text in, text out: what a session says is what `gf.generate` and the tokenizer say."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer.errors import RequestError, WorkError
from glassformer.generation.engine import Engine, TextPiece
from glassformer.generation.session import GenerationOptions, Reply
from glassformer.generation.speculate import Draft, PromptLookup
from glassformer.introspection import edit, sites
from glassformer.loaded import Loaded
from glassformer.naming import preset
from glassformer.parts.core.site import look_at
from glassformer.text import ByteTokenizer
from tests.cli.conftest import saved, with_template
from tests.refused import refused

torch.set_num_threads(1)
BYTES = ByteTokenizer()
SMALL = "layers=2+d_model=32+heads=4+context=64+init=gpt2+init.std=0.2+vocab_size=257"
TEXTS = ["Once", "Twice upon", "a", "The quick brown fox"]


def llm(expression: str = "llama", seed: int = 1, **more: Any) -> Loaded:
    name, _, changes = expression.partition("+")
    config = preset(f"{name}@1m+{SMALL}{'+' if changes else ''}{changes}")
    return Loaded(config.build(seed=seed).eval(), config, BYTES, **more)


def ids_of(loaded: Loaded, text: str, new: int, **rule: Any) -> list[int]:
    """Returns the new ids of `gf.generate`, up to the end token."""
    prompt = BYTES.encode(text).tolist()
    return gf.generate(loaded.model, [prompt], new, **rule)[0][len(prompt) :]


def text_of(ids: list[int]) -> str:
    return BYTES.decode([token for token in ids if token != 256])


@pytest.mark.parametrize("expression", ["llama", "gpt2", "bloom", "mistral+window:5", "llama+mamba"])
@pytest.mark.parametrize("rule", [{}, {"temperature": 1.5, "seed": 3, "top_k": 20}], ids=str)
def test_texts_are_those_of_generate(expression: str, rule: dict[str, Any]):
    loaded = llm(expression)
    for text in TEXTS:
        one = loaded.generate(text, max_new_tokens=12, **rule)
        ids = ids_of(loaded, text, 12, **rule)
        assert one.tokens == ids and one.text == str(one) == text_of(ids)
        assert one.finish_reason == ("stop" if ids[-1] == 256 else "length")
        assert one.prompt_tokens == len(text) and one.logprobs is None and one.error is None
        pieces = list(loaded.stream(text, max_new_tokens=12, **rule))
        assert "".join(map(str, pieces)) == one.text and [p.id for p in pieces if p.id is not None] == ids
        assert b"".join(p.bytes for p in pieces) == one.text.encode()
    assert [one.tokens for one in loaded.generate(TEXTS, max_new_tokens=12, **rule)] == [
        ids_of(loaded, text, 12, **rule) for text in TEXTS
    ]


def test_single_request_has_the_bits_of_stream():
    """In 16 bits, in which rows of a batch may round differently."""
    loaded = llm()
    loaded.model.bfloat16()
    prompt = BYTES.encode("Once upon").tolist()
    wanted = list(gf.stream(loaded.model, [prompt], 20, logprobs=0, eos_id=()))
    found = loaded.generate("Once upon", max_new_tokens=20, logprobs=0, stop_at_eos=False)
    assert found.tokens == [int(one.tokens) for one in wanted]
    assert found.logprobs == [float(one.logprobs) for one in wanted]


def test_ids_and_texts_are_one_prompt_and_lists_of_them_several():
    loaded = llm()
    one = loaded.generate("Once", max_new_tokens=5)
    ids = BYTES.encode("Once").tolist()
    for prompt in (ids, torch.tensor(ids), torch.tensor([ids])):
        assert loaded.generate(prompt, max_new_tokens=5) == one
    assert loaded.generate([ids, "Once"], max_new_tokens=5) == [one, one]
    samples = loaded.generate("Once", max_new_tokens=5, n=3, temperature=2.0, seed=1)
    assert len({one.text for one in samples}) == 3
    assert [one.tokens for one in loaded.generate(["Once", "a"], max_new_tokens=5, n=2, temperature=2.0, seed=1)][
        :2
    ] == [one.tokens for one in samples[:2]]


def test_log_probabilities_are_the_models_own():
    loaded = llm()
    one = loaded.generate("Once", max_new_tokens=5, logprobs=3, temperature=0.7, seed=0)
    with torch.no_grad():
        rows = loaded.model(torch.tensor([[*b"Once", *one.tokens]])).log_softmax(-1)[0, 3:-1]
    assert one.logprobs == pytest.approx([float(row[i]) for row, i in zip(rows, one.tokens, strict=True)], abs=1e-4)
    assert [list(top) for top in one.top_logprobs] == [row.topk(3).indices.tolist() for row in rows]
    pieces = list(loaded.stream("Once", max_new_tokens=5, logprobs=3, temperature=0.7, seed=0))
    assert [p.logprob for p in pieces if p.id is not None] == one.logprobs
    assert one.to_dict()["tokens"] == one.tokens and "length" in one._repr_html_()


@pytest.mark.parametrize("held", [1, 3])
def test_a_stop_string_may_span_pieces(held: int):
    loaded = llm()
    whole = loaded.generate("Once", max_new_tokens=24, stop_at_eos=False).text
    stop = whole[8 : 8 + held]
    cut = loaded.generate("Once", max_new_tokens=24, stop_at_eos=False, stop=["never seen", stop])
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"
    pieces = list(loaded.stream("Once", max_new_tokens=24, stop_at_eos=False, stop=stop))
    assert "".join(map(str, pieces)) == cut.text
    whole_again = loaded.generate("Once", max_new_tokens=9, stop_at_eos=False, stop=whole[1:] + "never")
    assert whole_again.text == loaded.generate("Once", max_new_tokens=9, stop_at_eos=False).text


def test_ends_are_the_models_unless_ignored():
    loaded = llm()
    third = loaded.generate("Once", max_new_tokens=9, stop_at_eos=False).tokens[2]
    ending = llm(ends=(third,))
    one = ending.generate("Once", max_new_tokens=9)
    assert one.finish_reason == "stop" and one.tokens[-1] == third and third not in one.tokens[:-1]
    assert BYTES.decode(one.tokens[:-1]) == one.text
    assert len(ending.generate("Once", max_new_tokens=9, stop_at_eos=False).tokens) == 9


@pytest.mark.parametrize(
    ("generation", "given", "drawn"),
    [
        ({}, {}, {"temperature": 0.0}),
        ({"temperature": 0.6, "top_p": 0.9}, {}, {"temperature": 0.0, "top_p": 0.9}),
        ({"do_sample": True}, {}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 0}, {}, {"temperature": 0.6, "top_k": None}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 7}, {"top_k": 3}, {"temperature": 0.6, "top_k": 3}),
        ({"do_sample": True, "repetition_penalty": 1.1}, {"temperature": 0}, {"temperature": 0.0}),
        ({"do_sample": True, "num_beams": 4, "max_length": 20}, {"temperature": 2.0}, {"temperature": 2.0}),
    ],
    ids=str,
)
def test_sampling_defaults_come_from_the_folder(generation: dict, given: dict, drawn: dict):
    sampling = GenerationOptions.of(generation, **given)
    assert {name: getattr(sampling, name) for name in drawn} == drawn
    assert sampling.repetition_penalty == generation.get("repetition_penalty", 1.0)


def test_a_published_default_is_applied():
    loaded = llm(generation={"do_sample": True, "temperature": 3.0})
    one = loaded.generate("Once", max_new_tokens=12, seed=4)
    assert one.tokens == ids_of(loaded, "Once", 12, temperature=3.0, seed=4) != ids_of(loaded, "Once", 12)


@pytest.mark.parametrize("field", ["forced_bos_token_id", "forced_eos_token_id"])
def test_forced_tokens_are_forced_in_a_batch_too(field: str):
    loaded = llm(generation={field: 65, "bad_words_ids": [[66]]})
    for one in (loaded.generate("a", max_new_tokens=4), *loaded.generate(["a", "b"], max_new_tokens=4)):
        assert one.tokens[0 if "bos" in field else -1] == 65 and 66 not in one.tokens


@pytest.mark.parametrize(
    ("prompt", "options", "code", "field"),
    [
        ("", {}, "missing", "prompt"),
        ([], {}, "range", "tokens"),
        ([999], {}, "range", "tokens"),
        (["Once", ""], {}, "missing", "prompt"),
        ("x" * 65, {}, "range", "prompt"),
        ("x" * 10_000, {}, "range", "prompt"),
        ("a\udcff", {}, "syntax", "prompt"),
        ("x", {"max_new_tokens": 0}, "range", "max_new_tokens"),
        ("x", {"max_new_tokens": 1.5}, "type", "max_new_tokens"),
        ("x", {"n": 0}, "range", "n"),
        ("x", {"n": 2}, "conflict", "temperature"),
        ("x", {"logprobs": -1}, "range", "logprobs"),
        ("x", {"stop": [""]}, "range", "stop[0]"),
        ("x", {"temperature": -1.0}, "range", "temperature"),
        ("x", {"logit_bias": {257: 1.0}}, "range", "logit_bias"),
        ("x", {"warmth": 1}, "unknown", "warmth"),
        ("x", {"source": "y"}, "conflict", "source"),
    ],
    ids=str,
)
def test_wrong_requests_are_refused_before_anything_is_computed(
    prompt: Any, options: dict[str, Any], code: Any, field: str
):
    loaded = llm()
    with edit(loaded.model, {"logits": no_pass}), refused(code=code, field=field):
        loaded.generate(prompt, **options)
    if prompt != ["Once", ""]:
        with refused(code=code, field=field):
            loaded.stream(prompt, **options)


def no_pass(_: torch.Tensor) -> torch.Tensor:
    raise AssertionError("computed")


def test_without_a_tokenizer_ids_are_continued_and_texts_refused():
    loaded = llm()
    bare = Loaded(loaded.model, loaded.config, None)
    one = bare.generate(BYTES.encode("Once").tolist(), max_new_tokens=5, stop_at_eos=False)
    assert one.tokens == ids_of(loaded, "Once", 5, stop_at_eos=False) and one.text == ""
    for call in (lambda: bare.generate("Once"), lambda: bare.generate([1], stop="x"), lambda: bare.embed(["a"])):
        with refused(code="missing", field="tokenizer"):
            call()
    with refused(code="missing", field="tokenizer.chat_template"):
        loaded.chat([{"role": "user", "content": "Hi"}])


def test_learned_positions_end():
    loaded = llm("gpt2+context=40")
    assert len(loaded.generate("x" * 16, stop_at_eos=False).tokens) == 24
    with refused(code="range", field="max_new_tokens"):
        loaded.generate("x" * 16, max_new_tokens=25)
    with refused(code="range", field="prompt"):
        loaded.generate("x" * 40)


def test_an_answer_far_past_the_context_is_refused_as_a_prompt_is():
    """Before memory is taken; the default of 200 tokens is given to any model whose positions are unbounded."""
    loaded = llm("llama+context=40")
    assert len(loaded.generate("x" * 16, stop_at_eos=False).tokens) == 200
    with refused(code="range", field="max_new_tokens"):
        loaded.generate("x" * 16, max_new_tokens=201)
    longer = llm("llama+context=300")
    assert len(longer.generate("x" * 16, max_new_tokens=284, stop_at_eos=False).tokens) == 284
    with refused(code="range", field="max_new_tokens"):
        longer.generate("x" * 16, max_new_tokens=285)


def test_nan_logits_fail_only_one_text():
    loaded = llm("llama+untied")
    with torch.no_grad():
        loaded.model.embedding.weight[ord("y")] = float("nan")
    bad, good = loaded.generate(["xy", "xz"], max_new_tokens=3, logit_bias={ord("y"): -100})
    assert bad.finish_reason == "failed" and "not numbers" in bad.error
    assert good.finish_reason == "length"
    assert good == loaded.generate("xz", max_new_tokens=3, logit_bias={ord("y"): -100})


# Requests that come and go


def test_pieces_of_all_requests_come_in_turn():
    loaded = llm()
    with gf.Session(loaded) as session:
        requests = [session.submit(text, max_new_tokens=6, stop_at_eos=False) for text in TEXTS]
        seen: dict[Reply, str] = {}
        order = []
        for request, piece in session:
            seen[request] = seen.get(request, "") + str(piece)
            order.append(requests.index(request))
        assert [seen[request] for request in requests] == [
            text_of(ids_of(loaded, text, 6, stop_at_eos=False)) for text in TEXTS
        ]
        assert order[: len(TEXTS)] != sorted(order)[: len(TEXTS)]  # side by side, not one after the other
        assert list(session) == []


def test_cancelling_keeps_the_text_so_far_and_harms_no_other():
    loaded = llm()
    with gf.Session(loaded, slots=2) as session:
        one, other, third = (session.submit(text, max_new_tokens=20, stop_at_eos=False) for text in TEXTS[:3])
        pieces = iter(one)
        first = [next(pieces) for _ in range(4)]
        one.cancel()
        third.cancel()  # it had not started
        rest = list(pieces)
        found = one.result()
        assert found.finish_reason == one.finish_reason == "cancelled" and len(found.tokens) == 4
        assert found.text == "".join(map(str, first + rest)) == BYTES.decode(found.tokens)
        assert third.result().tokens == [] and third.result().finish_reason == "cancelled"
        assert other.result().tokens == ids_of(loaded, TEXTS[1], 20, stop_at_eos=False)


def test_a_request_that_is_dropped_is_cancelled():
    loaded = llm()
    with gf.Session(loaded) as session:
        for _ in loaded.session.stream("Once", max_new_tokens=20):
            break
        pieces = session.stream("Once", max_new_tokens=30)
        next(pieces)
        del pieces
        gc.collect()
        session.submit("a", max_new_tokens=1).result()
        assert not session._engine.requests


def test_interrupt_keeps_the_text_so_far():
    """Ctrl-C in the middle of a pass: the text so far can be read, and other requests continue."""
    loaded = llm()
    passes = iter(range(100))

    def strike(*_: object) -> None:
        if next(passes) == 3:
            raise KeyboardInterrupt

    with gf.Session(loaded) as session:
        other = session.submit("Twice", max_new_tokens=8, stop_at_eos=False)
        one = session.submit("Once", max_new_tokens=8, stop_at_eos=False)
        with look_at([(sites(loaded.model)["layers.1.resid_post"], strike)]), pytest.raises(KeyboardInterrupt):
            one.result()
        got = one.so_far()
        assert got.finish_reason == "cancelled" and got.tokens == ids_of(loaded, "Once", 8, stop_at_eos=False)[:2]
        one.cancel()
        assert one.result().tokens == got.tokens and one.result().text == BYTES.decode(got.tokens)
        assert other.result().tokens == ids_of(loaded, "Twice", 8, stop_at_eos=False)


def test_a_closed_session_ends_its_requests_and_takes_no_others():
    session = gf.Session(llm())
    one = session.submit("Once", max_new_tokens=30)
    next(iter(one))
    session.close()
    assert one.result().finish_reason == "cancelled"
    with refused(code="stopped", field="session"):
        session.submit("Once")


def test_states_grow_with_the_prompt():
    """Longer than the first state, while a short one runs, which ends first."""
    loaded = llm("llama+context=2048")
    with gf.Session(loaded) as session:
        short, long = session.submit("Once", max_new_tokens=20), session.submit("ab" * 300, max_new_tokens=4)
        after = session.submit("Once", max_new_tokens=20)
        assert long.result().tokens == ids_of(loaded, "ab" * 300, 4) and session._engine.context == 1024
        assert short.result() == after.result() and short.result().tokens == ids_of(loaded, "Once", 20)


def test_a_session_keeps_prompts_and_a_loaded_model_does_not(read: list[int]):
    loaded = llm()
    with gf.Session(loaded) as session:
        for _ in range(2):
            session.complete(["Once upon a time"], max_new_tokens=1)
        session.complete(["Once upon a time there"], max_new_tokens=1)
        assert read == [16, 6]
    read.clear()
    first = loaded.generate("Once upon a time", max_new_tokens=3).tokens
    with torch.no_grad():
        loaded.model.embedding.weight.data.mul_(-1.5)
    assert loaded.generate("Once upon a time", max_new_tokens=3).tokens != first and read.count(16) == 2


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("expression", ["llama", "mistral+window:5", "llama+mamba"])
def test_prompt_that_continues_an_answer_reads_only_new_tokens(slots: int, expression: str, read: list[int]):
    loaded = llm(expression)
    with gf.Session(loaded, slots=slots, answers=True) as session:
        one = session.complete(["Once upon"], max_new_tokens=6, stop_at_eos=False)[0]
        read.clear()
        longer = [*b"Once upon", *one.tokens, *b" a"]
        found = session.complete([longer], max_new_tokens=4, stop_at_eos=False)[0]
        assert read[0] == 3  # the last token of the answer, and two new ones
        assert found.tokens == gf.generate(loaded.model, [longer], 4, stop_at_eos=False)[0][len(longer) :]
        other = session.complete(["Once", "Once upon it"], max_new_tokens=4, stop_at_eos=False)
        for text, completion in zip(("Once", "Once upon it"), other, strict=True):
            assert completion.tokens == ids_of(loaded, text, 4, stop_at_eos=False)


def test_a_kept_file_is_read_instead_of_the_prompt(tmp_path: Path, read: list[int]):
    loaded, plain = llm(), llm().generate("Once upon", max_new_tokens=4)
    for passes in ([8, 1], [1]):
        read.clear()
        with gf.Session(loaded, slots=1) as session:
            assert session.keep("Once upon", tmp_path / "kept")
            assert session.complete(["Once upon"], max_new_tokens=4) == [plain]
        assert read[: len(passes)] == passes and set(read[len(passes) :]) == {1}
    with gf.Session(loaded) as session:
        assert not session.keep("Twice", tmp_path / "kept")
        with refused(code="conflict", field="dtype"):
            gf.Session(loaded, dtype=torch.bfloat16).keep("Twice", tmp_path / "kept")


def test_guesses_change_no_text():
    loaded, draft = llm(), llm(seed=2)
    wanted = loaded.generate("Once upon", max_new_tokens=30, stop_at_eos=False)
    with gf.Session(loaded) as session:
        for proposer in (PromptLookup(), Draft(draft.model), Draft(loaded.model)):
            request = session.submit("Once upon", max_new_tokens=30, stop_at_eos=False, proposer=proposer)
            assert request.result() == wanted
        assert request.speculation.accepted == request.speculation.proposed > 10
        with refused(code="conflict", field="logprobs"):
            session.submit("Once", logprobs=1, proposer=PromptLookup())


def test_a_search_finds_the_beams():
    from glassformer.generation.beams import beams

    loaded = llm()
    best = beams(loaded.model, torch.tensor([[*b"Once"]]), 3, 8, n=2)
    found = gf.Session(loaded).search("Once", 3, GenerationOptions(max_new_tokens=8, n=2))
    assert [one.score for one in found] == [one.score for one in best]
    assert [one.text for one in found] == [text_of(one.tokens) for one in best]


# Sources, chats, vectors


@pytest.fixture(scope="module")
def translator() -> Loaded:
    config = preset("t5@1m+layers=2+d_model=64+heads=2+vocab_size=257+context=64")
    return Loaded(config.build(seed=1).eval(), config, BYTES)


@pytest.mark.parametrize("rule", [{}, {"temperature": 2.0, "seed": 3}], ids=str)
def test_a_source_is_read_by_the_encoder(translator: Loaded, rule: dict[str, Any]):
    source = [*b"A source", 256]
    wanted = gf.generate(translator.model, [[256]], 8, source=[source], **rule)[0][1:]
    one = translator.generate(source="A source", max_new_tokens=8, **rule)
    assert one.tokens == wanted and one.text == text_of(wanted)
    assert translator.generate(source=source, max_new_tokens=8, **rule).tokens == wanted
    several = translator.generate(source=["A source", "Other"], max_new_tokens=8, **rule)
    assert [one.tokens for one in several] == [
        wanted, gf.generate(translator.model, [[256]], 8, source=[[*b"Other", 256]], **rule)[0][1:]
    ]  # fmt: skip
    begun = translator.generate("Ab", source="A source", max_new_tokens=4, logprobs=1, **rule)
    assert begun.tokens == gf.generate(translator.model, [[256, *b"Ab"]], 4, source=[source], **rule)[0][3:]
    assert len(begun.logprobs) == len(begun.tokens)
    with refused(code="missing", field="source"):
        translator.generate("Ab")


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("model")
    return gf.load(with_template(saved(folder / "plain", "llama"), folder / "talker"))


def test_a_chat_is_its_template_and_generate(talker: Loaded):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
    text = "<s>Be brief.\n<u>Hi!\n<a>"
    assert talker.chat(messages, max_new_tokens=8) == talker.generate(text, max_new_tokens=8)
    assert "".join(map(str, talker.stream(messages, max_new_tokens=8))) == talker.generate(text, max_new_tokens=8).text
    assert talker.generate([messages, messages], max_new_tokens=8) == [talker.generate(text, max_new_tokens=8)] * 2
    with refused(code="type", field="messages"):
        talker.chat([{"content": "Hi!"}])


def test_vectors_are_those_of_embed():
    config = preset("bert@1m+layers=2+d_model=24+heads=3+vocab_size=257+context=32")
    loaded = Loaded(config.build(seed=0).eval(), config, BYTES)
    found = loaded.embed(["a text", "another"])
    assert torch.equal(found, gf.embed(loaded, ["a text", "another"])) and found.shape == (2, 24)
    assert found.norm(dim=-1).tolist() == pytest.approx([1, 1])


# Threads


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Results of `work(i)` in `count` threads; an exception is a result."""
    found: list[Any] = [None] * count
    start = threading.Barrier(count)

    def run(i: int) -> None:
        start.wait()
        try:
            found[i] = work(i)
        except BaseException as problem:
            found[i] = problem

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return found


def test_eight_threads_get_their_own_texts():
    loaded = llm()
    texts = [f"{i} {text}" for i, text in enumerate(TEXTS * 2)]

    def work(i: int) -> list[Any]:
        return [loaded.generate(texts[i], max_new_tokens=5 + i, temperature=float(i % 2), seed=j) for j in range(3)]

    for i, found in enumerate(in_threads(8, work)):
        for j, one in enumerate(found):
            assert one.tokens == ids_of(loaded, texts[i], 5 + i, temperature=float(i % 2), seed=j)


def test_threads_share_the_steps(read: list[int]):
    """Eight texts of 20 tokens in eight slots take 19 passes after their prompts, not 152."""
    loaded = llm()
    with gf.Session(loaded) as session:
        requests = [session.submit(f"{i} Once", max_new_tokens=20, stop_at_eos=False) for i in range(8)]
        found = in_threads(8, lambda i: "".join(map(str, requests[i])))
    assert read == [6] * 8 + [1] * 19
    assert found == [text_of(ids_of(loaded, f"{i} Once", 20, stop_at_eos=False)) for i in range(8)]


def test_threads_cancel_their_own():
    loaded = llm()
    with gf.Session(loaded, slots=3) as session:

        def work(i: int) -> Any:
            request = session.submit(f"{i} Once", max_new_tokens=20, stop_at_eos=False)
            if i % 2:
                pieces = iter(request)
                got = [next(pieces) for _ in range(i)]
                request.cancel()
                return got, request.result()
            return request.result()

        for i, found in enumerate(in_threads(8, work)):
            wanted = ids_of(loaded, f"{i} Once", 20, stop_at_eos=False)
            if i % 2:
                pieces, found = found
                assert found.finish_reason in ("cancelled", "length") and len(found.tokens) >= i
                assert all(isinstance(piece, TextPiece) for piece in pieces)
            assert found.tokens == wanted[: len(found.tokens)]
        assert not session._engine.requests


def test_a_failure_reaches_every_thread_and_the_next_request_works(monkeypatch: pytest.MonkeyPatch):
    loaded = llm()
    step, steps = Engine.step, iter(range(1000))

    def broken(self: Engine) -> Any:
        if next(steps) == 4:
            raise RuntimeError("out of order")
        return step(self)

    with gf.Session(loaded) as session:
        requests = [session.submit(f"{i} Once", max_new_tokens=30, stop_at_eos=False) for i in range(8)]
        with monkeypatch.context() as patched:
            patched.setattr(Engine, "step", broken)
            found = in_threads(8, lambda i: requests[i].result())
        assert all("out of order" in str(one) for one in found)
        assert sorted(type(one) for one in found if type(one) is not WorkError) == [RuntimeError]
        assert requests[0].so_far().finish_reason == "failed"
        assert session.submit("Once", max_new_tokens=3).result().tokens == ids_of(loaded, "Once", 3)


def test_a_loaded_model_is_copied_without_its_session():
    loaded = llm()
    one = loaded.generate("Once", max_new_tokens=3)
    assert copy.deepcopy(loaded).generate("Once", max_new_tokens=3) == one


def test_a_model_in_training_mode_drops_nothing_out_and_stays_in_it():
    """The mode is read at each request, from the whole model, like in gf.generate."""
    loaded = llm("gpt2+dropout:0.5")
    expected = loaded.generate("Once", max_new_tokens=8).tokens
    assert expected == ids_of(loaded, "Once", 8)
    vectors = loaded.embed(["Once"])
    loaded.model.train()
    loaded.model.layers[0].eval()
    modes = [part.training for part in loaded.model.modules()]
    assert loaded.generate("Once", max_new_tokens=8).tokens == expected
    assert loaded.generate(["Once", "Once"], max_new_tokens=8)[1].tokens == expected
    assert torch.equal(loaded.embed(["Once"]), vectors)
    assert [part.training for part in loaded.model.modules()] == modes


def test_threads_that_ask_at_once_share_a_session():
    loaded, meet = llm("llama"), threading.Barrier(4)

    def asked(_: int) -> gf.Session:
        meet.wait(60)
        return loaded.session

    with ThreadPoolExecutor(4) as pool:
        assert len({id(one) for one in pool.map(asked, range(4))}) == 1


@pytest.mark.parametrize("prompt", [3, ["Once", 3], {"role": "user", "content": "Once"}])
def test_a_prompt_of_no_known_kind_is_refused(prompt: Any):
    with refused(code="type", field="prompt"):
        llm("llama").generate(prompt)


def test_ids_may_be_array_list_or_tensor():
    loaded = llm("llama")
    ids = BYTES.encode("Once")
    found = [loaded.generate(one, max_new_tokens=6).tokens for one in (ids, ids.tolist(), torch.from_numpy(ids))]
    assert found == [ids_of(loaded, "Once", 6)] * 3


def test_ways_of_decoding_are_options(tmp_path: Path):
    loaded = llm()
    plain = loaded.generate("Once", max_new_tokens=8)
    for way in ({"speculate": True}, {"draft": llm()}, {"state": tmp_path / "kept"}, {"state": tmp_path / "kept"}):
        assert loaded.generate("Once", max_new_tokens=8, **way).tokens == plain.tokens
    found = loaded.generate("Once", max_new_tokens=8, n=2, beams=3)
    options = GenerationOptions(max_new_tokens=8, n=2)
    assert [one.tokens for one in found] == [one.tokens for one in gf.Session(loaded).search("Once", 3, options)]
    for wrong, field in (
        ({"speculate": True, "draft": llm()}, "speculate"), ({"beams": 2, "top_k": 3}, "beams"),
        ({"state": tmp_path / "no" / "kept"}, "state"), ({"beams": 2, "n": 3}, "n"),
    ):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            loaded.generate("Once", **wrong)
        assert caught.value.field == field


def raises(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    raise ValueError("mine")


def test_logits_processor_that_raises_ends_only_its_request():
    """The guilty request ends with the function's own exception, in a batch and with guessed tokens."""
    loaded = llm()
    bad: list[tuple[Callable[..., Any], type[Exception]]] = [
        (raises, ValueError),
        (lambda logits, tokens: None, RequestError),
        (lambda logits, tokens: logits * torch.nan, RequestError),
    ]
    with gf.Session(loaded) as session:
        texts = [session.submit(text, max_new_tokens=8) for text in TEXTS]
        guilty = [session.submit("abc", max_new_tokens=8, logits_processor=function) for function, _ in bad]
        guessed = session.submit("abc", max_new_tokens=8, logits_processor=raises, proposer=PromptLookup())
        assert [one.result().tokens for one in texts] == [ids_of(loaded, text, 8) for text in TEXTS]
        for request, (_, kind) in zip([*guilty, guessed], [*bad, (raises, ValueError)], strict=True):
            with pytest.raises(kind):
                request.result()
            assert request.finish_reason == "failed"
    for more in ({}, {"speculate": True}):
        with pytest.raises(ValueError) as caught:
            loaded.generate("abc", max_new_tokens=8, logits_processor=raises, **more)
        assert str(caught.value) == "mine"


def test_a_function_that_asks_its_own_session_is_refused():
    session = gf.Session(llm())

    def asks(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        session.submit("x", max_new_tokens=1).result()
        return logits

    with refused(code="conflict", field="session"):
        session.submit("abc", max_new_tokens=2, logits_processor=asks).result()
    assert len(session.submit("Once", max_new_tokens=2).result().tokens) == 2


def test_a_closed_session_computes_nothing(tmp_path: Path):
    session = gf.Session(llm())
    session.close()
    for ask in (
        lambda: session.submit("a"), lambda: session.search("a", 2), lambda: session.keep("abc", tmp_path / "a.state")
    ):  # fmt: skip
        with refused(code="stopped", field="session"):
            ask()


def ask_of(loaded: Loaded) -> dict[tuple[str, str], list[Callable[[], Any]]]:
    """Returns wrong requests by (code, field)."""
    session = gf.Session(loaded)
    two = session.options(n=2, temperature=1.0)
    return {
        ("type", "loaded"): [lambda: gf.Session("runA"), lambda: gf.Session(loaded.model)],  # type: ignore[arg-type]
        ("type", "draft"): [lambda: loaded.generate("Once", draft="runA")],  # type: ignore[call-overload]
        ("type", "messages"): [lambda: loaded.chat([]), lambda: loaded.chat([1, 2]), lambda: gf.chat(loaded, ["Hi"])],  # type: ignore[list-item]
        ("type", "prompts"): [lambda: session.complete("abc"), lambda: session.complete(3)],  # type: ignore[arg-type]
        ("type", "prompt"): [lambda: loaded.stream(["a", "b"]), lambda: session.complete([3])],  # type: ignore[list-item]
        ("conflict", "n"): [
            lambda: session.submit("a", two), lambda: session.stream("a", n=2, temperature=1),  # type: ignore[call-arg]
        ],
        ("conflict", "beams"): [lambda: loaded.generate("a", beams=2, temperature=0.7)],
        ("type", "stop"): [lambda: loaded.generate("a", stop=None), lambda: loaded.generate("a", stop=3)],  # type: ignore[call-overload]
        ("type", "state"): [lambda: loaded.generate("a", state=5)],  # type: ignore[call-overload]
        ("type", "context"): [lambda: gf.Session(loaded, context="1k")],  # type: ignore[arg-type]
        ("type", "seed"): [
            lambda: loaded.generate("a", seed="x"), lambda: loaded.generate("a", seed=1.5),  # type: ignore[call-overload]
            lambda: list(gf.stream(loaded.model, [[1]], seed="x")),  # type: ignore[arg-type]
        ],
        ("range", "seed"): [lambda: loaded.generate("a", seed=-1), lambda: session.submit("a", seed=1 << 63)],
        ("unknown", "dtype"): [lambda: gf.Session(loaded, dtype="banana")],
        ("unsupported", "dtype"): [lambda: gf.Session(loaded, dtype=torch.int32)],
        ("unknown", "topk"): [lambda: session.submit("a", two, topk=3)],  # type: ignore[call-arg]
    }  # fmt: skip


@pytest.mark.parametrize("which", range(15))
def test_a_wrong_request_names_its_field(which: int):
    (code, field), asked = list(ask_of(llm()).items())[which]
    for ask in asked:
        with refused(code=code, field=field):  # type: ignore[arg-type]
            ask()


def test_single_options_go_before_those_of_an_options_object():
    session = gf.Session(llm())
    options = session.options(max_new_tokens=9, temperature=1.0, seed=0, stop_at_eos=False)
    assert len(session.submit("abc", options, max_new_tokens=2).result().tokens) == 2
    assert len(session.complete(["abc"], options, n=3)) == 3 and len(session.complete(["abc"], options)) == 1
    assert len(session.complete(["abc"], options.replace(n=2))) == 2


def test_a_stream_that_is_closed_is_not_computed_for_others():
    session = gf.Session(llm())
    pieces = session.stream("Once", max_new_tokens=50, stop_at_eos=False)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    session.submit("Once", max_new_tokens=2).result()
    assert not session._engine.requests


def test_a_state_has_the_dtype_that_is_named():
    assert gf.Session(llm(), dtype="bfloat16").dtype == gf.Session(llm(), dtype=torch.bfloat16).dtype == torch.bfloat16
