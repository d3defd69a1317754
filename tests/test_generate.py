"""Greedy decoding equals the definition, seeds reproduce, wrong requests are refused first."""

from __future__ import annotations

import copy
import mmap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import glassformer as gf
from glassformer.config import BlockConfig
from glassformer.errors import RequestError
from glassformer.generation import generate, prefill, stream
from glassformer.model import Model
from glassformer.naming import preset
from glassformer.naming.changes import each_block
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.position import RotaryConfig
from glassformer.parts.position.scaling import LongRopeScalingConfig
from glassformer.parts.state import ModelState
from tests.refused import refused

VOCAB = 31


def tiny(expression: str = "llama", context: int = 32) -> Model:
    name, *changes = expression.split("+")
    small = f"layers=2+d_model=32+heads=4+vocab_size={VOCAB}+context={context}+init=gpt2+init.std=0.2"
    config = preset("+".join([f"{name}@1m", small, *changes]))
    return config.build(seed=1)


def prompt(b: int = 2, s: int = 4) -> Tensor:
    return torch.randint(0, VOCAB, (b, s), generator=torch.Generator().manual_seed(2))


def greedy(model: Model, tokens: Tensor, n: int) -> Tensor:
    """Returns the greedy text by the definition: a pass over the whole text for each token."""
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


def test_seed_does_not_change_the_global_generator():
    before = torch.get_rng_state()
    generate(tiny(), prompt(), 4, temperature=1.0, seed=3)
    model = tiny()
    torch.set_rng_state(before)
    generate(model, prompt(), 4, temperature=1.0, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_stream_equals_generate():
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


def test_a_model_stops_at_each_of_its_ends():
    """Without an id, if stop_at_eos is left at its default; a step for every token is streamed up to the end."""
    model = tiny().eval()
    free = generate(model, prompt(1), 12)[0, 4:].tolist()
    model.ends = (free[5], free[3])
    first = min(free.index(end) for end in model.ends) + 1
    assert generate(model, prompt(1), 12)[0, 4:].tolist() == free[:first]
    assert [int(token) for token in stream(model, prompt(1), 12)] == free[:first]
    assert len(list(stream(model, prompt(1), 12, stop_at_eos=False))) == 12
    assert generate(model, prompt(1), 12, stop_at_eos=False)[0, 4:].tolist() == free
    assert generate(model, prompt(1), 12, eos_id=[])[0, 4:].tolist() == free
    assert generate(copy.deepcopy(model), prompt(1), 12)[0, 4:].tolist() == free[:first]
    with refused(code="range", field="eos_id"):
        generate(model, prompt(1), 12, eos_id=[3, -1])


def test_rows_that_end_differently_are_padded_with_their_own_end():
    model = tiny().eval()
    free = generate(model, prompt(2), 10)[:, 4:].tolist()
    model.ends = (free[0][2], free[1][4])
    at = [next(i for i, token in enumerate(row) if token in model.ends) for row in free]
    both = generate(model, prompt(2), 10)[:, 4:].tolist()
    assert len(both[0]) == max(at) + 1
    assert both == [row[: i + 1] + [row[i]] * (max(at) - i) for row, i in zip(free, at, strict=True)]
    rows = generate(model, prompt(2).tolist(), 10)
    assert [row[4:] for row in rows] == [row[: i + 1] for row, i in zip(free, at, strict=True)]


def test_ends_of_a_checkpoint_and_of_a_run_are_the_models(tmp_path: Path):
    """Several are kept from folder to folder, with no argument."""
    model = gf.preset("llama@1m+layers=1+vocab_size=257").build(seed=0)
    gf.save(model, None, tmp_path / "a", ends=(7, 9))
    loaded = gf.load(tmp_path / "a")
    assert loaded.model.ends == loaded.ends == (7, 9)
    gf.save(loaded.model, None, tmp_path / "b")
    assert gf.load(tmp_path / "b").model.ends == (7, 9)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of many\n" for i in range(400)))
    recipe = {"tokens": 4 * 32, "batch_size": 2, "context": 32, "compile": False, "dtype": "float32"}
    config = gf.preset("gpt2@1m+layers=1+d_model=16+heads=2")
    run = gf.train(config, text, recipe, out=tmp_path / "run", tokenizer="byte")
    end = run.tokenizer.eos_id
    assert end is not None and run.model.ends == gf.load(tmp_path / "run").model.ends == (end,)


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


def test_generation_beyond_learned_positions_is_refused():
    model = tiny("gpt2", context=8)
    assert generate(model, prompt(1, 4), 4).shape == (1, 8)
    with refused(code="range", field="max_len"):
        generate(model, prompt(1, 4), 6)
    assert generate(tiny("llama", context=8), prompt(1, 4), 20).shape == (1, 24)


def test_nothing_is_generated_before_the_request_is_judged():
    """`stream` is lazy, but an invalid request is refused at the first step and does not change the mode."""
    model = tiny().train()
    with pytest.raises(RequestError):
        next(stream(model, prompt(), 0))
    assert model.training


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3, "top_k": 9, "repetition_penalty": 1.3}])
@pytest.mark.parametrize("k", [0, 1, 4, 1000])
def test_log_probabilities_are_those_of_the_uncached_model(k: int, options: dict):
    """Log-probabilities of chosen and most likely tokens are before any warper; asking for them changes no token."""
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
    with refused(code="range" if k == -1 else "type", field="logprobs"):
        next(stream(tiny(), prompt(), 4, logprobs=k))  # type: ignore[arg-type]


def test_generate_gives_no_log_probabilities():
    with refused(code="unsupported", field="logprobs"):
        generate(tiny(), prompt(), 4, logprobs=2)


RAGGED = [[5, 9, 2, 30, 11, 7, 7, 1, 19], [4], [8, 8, 3, 12]]


@pytest.mark.parametrize(
    "expression",
    ["llama", "gpt2", "bloom", "mistral+window:5", "llama+mamba", "gpt2+sinusoidal", "llama+moe:4:2", "qwen3"],
)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_rows_of_unequal_length_generate_as_separate_rows(expression: str, temperature: float):
    """Attention, a window, recurrences, learned positions, biases; each row has a separate generator."""
    model, before = tiny(expression).eval(), [list(row) for row in RAGGED]
    more = {"temperature": temperature, "seed": 3}
    out = generate(model, RAGGED, 12, repetition_penalty=1.3, frequency_penalty=0.2, **more)
    assert before == RAGGED and [row[: len(own)] for row, own in zip(out, RAGGED, strict=True)] == RAGGED
    for i, row in enumerate(RAGGED):
        beside = [row] * (i + 1) if temperature else [row]  # so that it is row i here too
        alone = generate(model, torch.tensor(beside), 12, repetition_penalty=1.3, frequency_penalty=0.2, **more)
        assert out[i] == alone[-1].tolist()


def test_rows_of_unequal_length_without_a_penalty_are_the_uncached_loop():
    model = tiny("mistral+window:5").eval()
    for row, out in zip(RAGGED, generate(model, RAGGED, 10), strict=True):
        assert out == greedy(model, torch.tensor([row]), 10)[0].tolist()
    for row, out in zip(RAGGED, generate(model, RAGGED, 10, chunk=2), strict=True):
        assert out == greedy(model, torch.tensor([row]), 10)[0].tolist()


@pytest.mark.parametrize("expression", ["llama", "mistral+window:5", "llama+mamba"])
def test_state_continues_with_rows_of_unequal_length(expression: str):
    model = tiny(expression).eval()
    state = model.init_state(2, 32)
    said = generate(model, RAGGED[:2], 4, state=state)
    asked = [[3, 1], [2, 2, 8, 9, 4]]
    out = generate(model, asked, 5, state=state)
    for first, more, row in zip(said, asked, out, strict=True):  # the last token of an answer is not read yet
        assert row[len(more) :] == greedy(model, torch.tensor([[*first[:-1], *more]]), 5)[0, -5:].tolist()


def test_rows_padded_by_hand_continue_with_their_documents():
    """Whatever the padding is, and where a document went before."""
    model = tiny().eval()
    tokens = torch.tensor([[30, 30, 30, 5, 9, 2], [7, 3, 3, 3, 1, 4], [6, 5, 8, 8, 3, 12]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [2] * 6, [9, 9, 4, 4, 4, 4]])
    out = generate(model, tokens, 8, documents=documents, presence_penalty=0.5, repetition_penalty=1.5)
    assert torch.equal(out[:, :6], tokens)
    for row, start in enumerate((3, 0, 2)):
        alone = generate(model, tokens[row : row + 1, start:], 8, presence_penalty=0.5, repetition_penalty=1.5)
        assert out[row, start:].tolist() == alone[0].tolist()
    state = model.init_state(3, 6)
    with torch.no_grad():
        logits = prefill(model, tokens, state, chunk=4, documents=documents)
        torch.testing.assert_close(logits[2], model(tokens[2:, 2:])[0, -1], atol=1e-5, rtol=1e-5)


def test_each_row_of_a_list_ends_at_its_own_end():
    model = tiny().eval()
    free = [row[len(own) :] for row, own in zip(generate(model, RAGGED, 12), RAGGED, strict=True)]
    eos = free[0][3]
    ended = generate(model, RAGGED, 12, eos_id=eos)
    for own, row, out in zip(RAGGED, free, ended, strict=True):
        assert out == own + (row[: row.index(eos) + 1] if eos in row else row)
    assert [len(row) for row in generate(model, ((1, 2), (3, 4)), 3)] == [5, 5]
    assert generate(model, [torch.tensor([1, 2]), torch.tensor([3])], 3)[1][0] == 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_ids_of_any_whole_type_are_taken(dtype: torch.dtype):
    model = tiny().eval()
    out = generate(model, prompt().to(dtype), 5)
    assert out.dtype == torch.int64 and torch.equal(out, generate(model, prompt(), 5))


def fits(batch: int = 2, max_len: int = 20, expression: str = "llama", **more: Any) -> ModelState:
    return tiny(expression).init_state(batch, max_len, **more)


READ, PADDED = fits(), fits()
with torch.no_grad():
    tiny()(prompt(), READ)
    tiny()(prompt(), PADDED, documents=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"state": fits(1)}, "the state has batch=1 and the tokens have 2 rows"),
        ({"state": fits(3)}, "the state has batch=3 and the tokens have 2 rows"),
        ({"state": fits(expression="llama+layers=1")}, "the state is that of another model"),
        ({"state": fits(expression="llama+layers=3")}, "the state is that of another model"),
        ({"state": fits(expression="llama+kv_heads=1")}, "the state is that of another model"),
        ({"state": fits(expression="llama+kv_heads=1", dtype=torch.int8)}, "the state is that of another model"),
        ({"state": fits(expression="llama+mamba")}, "the state is that of another model"),
        ({"state": fits(expression="llama+window:5")}, "the state is that of another model"),
        ({"state": fits(max_len=12)}, "the state holds max_len=12 tokens and 13 are asked for"),
        ({"state": READ, "max_new_tokens": 14}, "the state holds max_len=20 tokens and 21 are asked for"),
        ({"state": PADDED, "tokens": [[1], [1, 2]]}, "a state of padded rows continues with rows of equal length"),
        ({"compiled": object(), "documents": torch.ones(2, 4).long()}, "do not go with a compiled step"),
        ({"tokens": prompt().float()}, "tokens are torch.float32; give ids, in torch.int64"),
        ({"tokens": prompt().bool()}, "tokens are torch.bool"),
        ({"tokens": [[1.0], [2.0]]}, "tokens are torch.float32"),
        ({"tokens": [[1], []]}, "row 1 of tokens is empty"),
        ({"tokens": []}, "rows of token ids such as [[1, 2, 3], [4]]"),
        ({"tokens": [1, 2]}, "rows of token ids such as [[1, 2, 3], [4]]"),
        ({"tokens": ["ab"]}, "rows of token ids such as [[1, 2, 3], [4]]"),
        ({"tokens": None}, "rows of token ids such as [[1, 2, 3], [4]]"),
        ({"tokens": [[1], [2, VOCAB]]}, f"token {VOCAB}"),
        ({"tokens": [[1], [2, 3]], "documents": torch.ones(2, 2)}, "documents are of tokens in a tensor"),
        ({"documents": torch.ones(2, 3, dtype=torch.long)}, "documents are torch.int64 of shape (2, 3)"),
        ({"documents": torch.ones(2, 4)}, "documents are torch.float32 of shape (2, 4)"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be a whole number from 1 up"),
        ({"max_new_tokens": None}, "max_new_tokens=None must be a whole number from 1 up"),
        ({"chunk": 0}, "chunk=0 must be at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_and_states_that_do_not_fit_are_refused_before_anything_is_read(
    asked: dict, says: str, monkeypatch: pytest.MonkeyPatch
):
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("read")

    model = tiny()
    monkeypatch.setattr(Model, "hidden_states", read)
    with pytest.raises(RequestError) as refused:
        generate(model, **{"tokens": prompt(), "max_new_tokens": 10, **asked})
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("expression", ["llama", "mistral+window:5", "llama+mamba"])
@pytest.mark.parametrize("more", [{}, {"rewind": 3}, {"dtype": torch.int8}, {"dtype": torch.bfloat16}], ids=str)
def test_a_state_of_just_the_right_length_is_taken(expression: str, more: dict):
    model = tiny(expression).eval()
    state = model.init_state(2, 9, **more)
    assert sum(one.shape[0] for one in stream(model, prompt(), 6, state=state)) == 12 and state.length == 9


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"max_len": -1}, "max_len=-1 must be at least 1"),
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"rewind": -3}, "rewind=-3 must be at least 0"),
        ({"dtype": torch.int16}, "dtype=torch.int16 cannot keep a state; use torch.float64, "),
        ({"dtype": torch.bool}, "torch.bfloat16 or torch.int8"),
    ],
    ids=str,
)
def test_a_state_that_cannot_be_is_refused(asked: dict, says: str):
    with pytest.raises(RequestError) as refused:
        tiny().init_state(**{"batch": 1, "max_len": 8, **asked})
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_state_on_meta_has_the_bytes_of_a_real_one():
    for expression in ("llama", "mistral+window:5", "llama+mamba"):
        for dtype in (None, torch.bfloat16, torch.int8):
            like = tiny(expression).init_state(3, 20, dtype, device="meta")
            assert like.nbytes == tiny(expression).init_state(3, 20, dtype).nbytes


@pytest.mark.parametrize("index", [torch.tensor([0]), torch.tensor(1), torch.ones(3), torch.zeros(4, dtype=torch.long)])
def test_a_state_is_reordered_by_a_row_number_for_each_row(index: Tensor):
    state = tiny().init_state(3, 8)
    with refused(code="conflict", field="index"):
        state.reorder(index)


@pytest.mark.parametrize("call", [generate, lambda *given: list(stream(*given))])
def test_a_text_and_a_name_are_refused(call: Any) -> None:
    model = preset("gpt2@0.3m+vocab_size=16").build(seed=0)
    for given, field in (((model, "the cat"), "tokens"), (("run", [[1]]), "model"), ((object(), "the cat"), "model")):
        with refused(code="type", field=field):
            call(*given)


def long_roped() -> Model:
    """Returns a model whose rotary frequencies change past 12 tokens."""

    def with_scaling(block: BlockConfig) -> BlockConfig:
        mixer = block.mixer
        assert isinstance(mixer, AttentionConfig)
        long = tuple(1.0 + i for i in range(4))
        scaling = LongRopeScalingConfig(factor=2.0, original_context=12, short=(1.0,) * 4, long=long)
        return block.replace(mixer=mixer.replace(position=RotaryConfig(scaling=scaling)))

    config = preset(f"llama@1m+layers=2+d_model=32+heads=4+vocab_size={VOCAB}+context=24")
    return each_block(config, with_scaling).build(seed=0).eval()


def test_a_prompt_past_the_length_at_which_frequencies_change_is_read_in_one_piece() -> None:
    """The first pieces would keep the frequencies of short texts. The oracle is one pass over the whole text."""
    model, tokens = long_roped(), torch.randint(VOCAB, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for length in (10, 12, 13, 20):
            state = model.init_state(1, 24)
            found = prefill(model, tokens[:, :length], state, chunk=4)
            torch.testing.assert_close(found, model(tokens[:, :length])[:, -1], rtol=1e-5, atol=1e-5)


def test_a_text_that_passes_the_length_at_which_frequencies_change_warns() -> None:
    model = long_roped()
    with pytest.warns(UserWarning):
        gf.generate(model, [[1] * 10], max_new_tokens=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gf.generate(model, [[1] * 10], max_new_tokens=3)
        gf.generate(model, [[1] * 13], max_new_tokens=4)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not tell a process' memory")
def test_a_state_takes_memory_as_tokens_are_read() -> None:
    """Room for 262,144 tokens takes the memory of the 100 that are read; every bit is as in a small state."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    model = gf.preset("llama@0.3m+vocab_size=61").build(seed=0).eval()
    tokens = torch.randint(61, (1, 100), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = model(tokens, model.init_state(1, 128))
        before = resident()
        state = model.init_state(1, 1 << 18)
        assert torch.equal(model(tokens, state), wanted)
        assert state.nbytes > 1 << 27 and resident() - before < state.nbytes / 8
        wide = state.repeated(model.init_state(4, 1 << 18))
        wide.reorder(torch.tensor([1, 0, 3, 2]))
        assert resident() - before < state.nbytes / 8
        torch.testing.assert_close(model(tokens[:, :1].expand(4, 1), wide)[2:3], model(tokens[:, :1], state))
