"""Values inside the model that come with an answer are those of the model, and other requests never meet them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer.lens.logit_lens import logit_lens
from glassformer.loaded import Loaded
from glassformer.serving import inside
from glassformer.serving.computing import Served
from glassformer.serving.inside import Inside, Insight
from glassformer.text.spelling import Spelling
from tests.serving.test_api import HELLO, chat, complete, events

SEEN = {"sites": ["layers.0.mixer.pattern", "layers.1.resid_post"], "top": 3, "entropy": True, "lens": True}


def test_values_equal_those_of_the_whole_text(client: Any, letters: Loaded) -> None:
    found = complete(client, max_tokens=6, temperature=1.0, seed=3, glass=SEEN).json()["choices"][0]
    plain = complete(client, max_tokens=6, temperature=1.0, seed=3).json()["choices"][0]
    assert found["text"] == plain["text"] and "glass" not in plain and len(found["glass"]) == 6
    assert letters.tokenizer is not None
    ids = letters.tokenizer.encode("once" + found["text"])
    tokens = torch.tensor(ids.tolist())[None]
    with torch.inference_mode():
        log_p = letters.model(tokens)[0].log_softmax(-1)
    seen = gf.capture(letters.model, tokens, SEEN["sites"])
    lens = logit_lens(letters.model, tokens, top=3)
    for i, one in enumerate(found["glass"]):
        at = 3 + i  # position whose logits gave the token
        assert one["id"] == int(ids[at + 1]) and one["token"] == found["text"][i]
        assert one["entropy"] == pytest.approx(float(-(log_p[at].exp() * log_p[at]).sum()), rel=1e-3)
        pattern = seen["layers.0.mixer.pattern"][0, :, at, : at + 1]
        got = one["sites"]["layers.0.mixer.pattern"]
        assert got["shape"] == list(pattern.shape)
        for head, entries in enumerate(got["top"]):
            values = torch.tensor([value for _, value in entries])
            torch.testing.assert_close(values, pattern[head].topk(3).values, rtol=1e-3, atol=1e-5)
        stream = seen["layers.1.resid_post"][0, at]
        got = one["sites"]["layers.1.resid_post"]
        assert got["rms"] == pytest.approx(float(stream.pow(2).mean().sqrt()), rel=1e-3)
        assert [index for index, _ in got["top"]] == stream.abs().topk(3).indices.tolist()
        for layer, entry in enumerate(one["lens"]):
            expected = lens.top_probability[layer, at].tolist()
            assert [value for _, value in entry["top"]] == pytest.approx(expected, rel=1e-3)
            assert entry["rank"] == int(lens.next_rank[layer, at])


def test_stream_carries_the_values_of_its_tokens(client: Any) -> None:
    body: dict[str, Any] = {"max_tokens": 6, "glass": SEEN}
    whole = chat(client, **body).json()["choices"][0]["glass"]
    chunks = [one["choices"][0] for one in events(chat(client, **body, stream=True))]
    assert [value for one in chunks for value in one.get("glass", ())] == whole


def test_edit_equals_the_edited_model(client: Any, letters: Loaded) -> None:
    edited = complete(client, max_tokens=8, temperature=0, glass={"edit": ["layers.0.heads.1,2", "layers.1.ffn"]})
    with gf.edit(letters.model, gf.lens.ablate_heads(0, [1, 2]), gf.lens.ablate_ffn(1)):
        expected = letters.generate("once", max_new_tokens=8, temperature=0).text
    assert edited.json()["choices"][0]["text"] == expected
    assert complete(client, max_tokens=8, temperature=0).json()["choices"][0]["text"] != expected


def test_other_requests_keep_their_bits(client: Any) -> None:
    """A text with log-probabilities, next to one that is observed and edited, and by itself."""
    asked: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 5, "logprobs": 2}
    alone = complete(client, **asked).json()["choices"]
    stop = threading.Event()

    def edited() -> int:
        count = 0
        while not stop.is_set():
            glass = {**SEEN, "edit": ["layers.0", "layers.1.mixer"]}
            count += complete(client, max_tokens=20, glass=glass).status_code == 200
        return count

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(edited)
        together = [complete(client, **asked).json()["choices"] for _ in range(2)]
        stop.set()
        assert running.result() > 0
    assert together == [alone, alone]


def test_values_are_bounded_and_omissions_are_named(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "LARGEST", 400)
    found = chat(client, max_tokens=2, glass={"sites": ["layers.*.mixer.pattern"], "top": 32}).json()["choices"][0]
    for one in found["glass"]:
        assert one["omitted"] and len(json.dumps(one["sites"])) < 500


def test_values_of_a_text_are_bounded(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the bound is reached, a token carries its entropy and the kinds of what is omitted."""
    whole = chat(client, max_tokens=12, glass=SEEN).json()["choices"][0]
    monkeypatch.setattr(inside, "LARGEST_TEXT", 5 * len(json.dumps(whole["glass"][0])))
    cut = chat(client, max_tokens=12, glass=SEEN).json()["choices"][0]
    assert cut["message"] == whole["message"]
    count = sum("sites" in one for one in cut["glass"])
    assert 2 <= count <= 8 and cut["glass"][:count] == whole["glass"][:count]
    for one, other in zip(cut["glass"][count:], whole["glass"][count:], strict=True):
        assert one == {**{key: other[key] for key in ("id", "token", "entropy")}, "omitted": ["lens", "sites"]}


EVERY = {"sites": ["layers.*.mixer.pattern", "layers.*.resid_post", "embed", "logits"], "top": 32, "lens": True}


def insight(loaded: Loaded, **asked: Any) -> Insight:
    assert loaded.tokenizer is not None
    return Insight(Inside(**asked), loaded.model, loaded.config, Spelling(loaded.tokenizer))


def test_only_the_last_position_is_kept(letters: Loaded) -> None:
    observer = insight(letters, **EVERY)
    with torch.inference_mode(), observer.watching(True):
        letters.model(torch.randint(29, (1, 200)))
    assert len(observer._seen) >= 4
    assert all(x.untyped_storage().nbytes() == 4 * x.numel() for x in observer._seen.values())


@pytest.mark.parametrize("more", [{}, {"edit": ["layers.0.heads.1", "layers.1"]}])
def test_a_running_text_waits_for_an_observed_one_as_for_a_prompt(
    letters: Loaded, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that counts, decoding takes 4, and a layer, or the values of a place, 1, so at most floor(0.9 * 4) = 3
    of them come between two tokens of the running text. Tokens and values are those of a request without company."""
    alone = insight(letters, **EVERY, **more)
    session = Served("letters", letters, slots=2).session
    assert session is not None
    expected = session.submit("ab" * 100, max_new_tokens=4, temperature=1.0, seed=1, observer=alone).result()

    now, log, engine = 0, "", session._engine

    def tick(took: int, letter: str) -> None:
        nonlocal now, log
        now, log = now + took, log + letter

    def layers(*given: Any) -> Iterator[torch.Tensor]:
        for x in run(*given):
            tick(1, "l")
            yield x

    run, decode, lens, value = letters.model.states_by_layer, engine._decode, Insight._lens, Insight._value
    monkeypatch.setattr(letters.model, "states_by_layer", layers)
    monkeypatch.setattr(engine, "_decode", lambda tokens: (tick(4, "."), decode(tokens))[1])
    monkeypatch.setattr(Insight, "_lens", lambda *given: (tick(1, "v"), lens(*given))[1])
    monkeypatch.setattr(Insight, "_value", lambda *given: (tick(1, "v"), value(*given))[1])
    monkeypatch.setattr(engine, "clock", lambda: now)
    running = session.submit("once", max_new_tokens=200, stop_at_eos=False)
    session.step()
    observer = insight(letters, **EVERY, **more)
    watched = session.submit("ab" * 100, max_new_tokens=4, temperature=1.0, seed=1, observer=observer)
    while watched.finish_reason is None:
        session.step()
    assert running.finish_reason is None
    running.cancel()
    turns = log.strip(".").split(".")
    assert max(map(len, turns)) == 3 and log.count("l") == 3 * (4 + 3)  # two layers and the norm: pieces, tokens
    assert log.count("v") == 4 * len(alone.tokens[0]["sites"] | dict(enumerate(alone.tokens[0]["lens"])))
    assert watched.result().tokens == expected.tokens and observer.tokens == alone.tokens
    session.close()


def test_sites_are_listed(client: Any) -> None:
    assert "layers.0.mixer.pattern" in client.get("/v1/models/talker").json()["sites"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"glass": {"sites": ["layers.9.mixer.z"]}}, "glass.sites"),
        ({"glass": {"sites": ["../x"]}}, "glass.sites"),
        ({"glass": {"edit": ["layers.9"]}}, "glass.edit"),
        ({"glass": {"edit": ["layers.0.heads.99"]}}, "glass.edit"),
        ({"glass": {"edit": ["import os"]}}, "glass.edit"),
        ({"glass": {"top": 1000}}, "glass.top"),
        ({"glass": {"values": True}}, "glass.values"),
        ({"glass": {}, "n": 2, "temperature": 1.0}, "n"),
    ],
)
def test_wrong_request_is_refused(client: Any, body: Any, param: str) -> None:
    response = chat(client, max_tokens=2, **body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
    assert HELLO
