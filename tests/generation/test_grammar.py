"""Texts under a grammar are members of its language, and other rows keep their bits."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer.errors import WorkError
from glassformer.generation.grammar import LONGEST, Grammars
from glassformer.generation.sampling import Sampling, choose
from glassformer.generation.session import Session
from glassformer.loaded import Loaded
from glassformer.text import ByteTokenizer, CharTokenizer
from glassformer.text.spelling import Spelling
from tests.refused import refused

pytest.importorskip("llguidance", reason="pip install 'glassformer[serve]'")

LETTERS = 'abc{}[]": ,0123456789-truefalsn\n'
TINY = "layers=2+d_model=32+heads=4+context=256+init=gpt2+init.std=0.2"


@pytest.fixture(scope="module")
def letters() -> Loaded:
    """Model of characters without an end token."""
    tokenizer = CharTokenizer("".join(dict.fromkeys(LETTERS)))
    config = gf.preset(f"llama@1m+{TINY}+vocab_size={tokenizer.vocab_size}")
    return Loaded(config.build(seed=1).eval(), config, tokenizer)


@pytest.fixture(scope="module")
def bytewise() -> Loaded:
    """Model of bytes with an end token and logits without a token."""
    config = gf.preset(f"llama@1m+{TINY}+vocab_size=264")
    return Loaded(config.build(seed=1).eval(), config, ByteTokenizer())


def grammars(llm: Loaded) -> Grammars:
    assert llm.tokenizer is not None
    return Grammars(Spelling(llm.tokenizer), llm.model.vocab_size, llm.model.ends)


@pytest.mark.parametrize(
    ("kind", "text", "language"),
    [
        ("regex", "[ab]{2}c?", ["".join(one) + end for one in itertools.product("ab", repeat=2) for end in ("", "c")]),
        ("regex", "a(bc|b)", ["abc", "ab"]),
        ("lark", 'start: "a" ("b" | "c" "a")', ["ab", "aca"]),
        ("gbnf", 'root ::= "a" ("b" | "c" "a")', ["ab", "aca"]),
        ("json_schema", '{"enum": ["a", 12, true]}', ['"a"', "12", "true"]),
        ("json_schema", '{"type": "array", "items": {"const": 1}, "minItems": 1, "maxItems": 2}', ["[1]", "[1, 1]"]),
    ],
)
def test_masks_equal_those_of_an_enumerated_language(
    letters: Loaded, kind: Any, text: str, language: list[str]
) -> None:
    tokenizer = letters.tokenizer
    assert tokenizer is not None
    compiled = grammars(letters).compile(kind, text)
    for prefix in {one[:i] for one in language for i in range(len(one))}:
        constraint, over = compiled.start(), False
        for token in tokenizer.encode(prefix).tolist():
            over = constraint.take(token)
        expected = {one[len(prefix)] for one in language if one.startswith(prefix) and one != prefix}
        assert {tokenizer.decode([i]) for i in constraint.allowed().nonzero()[:, 0].tolist()} == expected
        assert not over
    for one in language:
        constraint = compiled.start()
        overs = [constraint.take(token) for token in tokenizer.encode(one).tolist()]
        assert overs[-1] == (not any(other != one and other.startswith(one) for other in language))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_text_is_json_of_the_schema(bytewise: Loaded, temperature: float) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
    grammar = grammars(bytewise).compile("json_schema", json.dumps(schema))
    with Session(bytewise) as session:
        for seed in range(3):
            found = session.submit("Hello", grammar=grammar, temperature=temperature, seed=seed).result()
            value = json.loads(found.text)
            assert found.finish_reason == "stop" and list(value) == ["name", "age", "tags"]
            assert len(value["name"]) <= 5 and 0 <= value["age"] <= 130 and {*value["tags"]} <= {"a", "b"}


def test_text_without_an_end_token_ends_with_the_grammar(letters: Loaded) -> None:
    with Session(letters) as session:
        found = session.submit("abc", grammar=grammars(letters).compile("regex", "[0-9]{4}"), temperature=1.0).result()
        assert re.fullmatch("[0-9]{4}", found.text) and found.finish_reason == "stop"
        exact = session.submit("abc", grammar=grammars(letters).compile("regex", "[0-9]{4}"), max_new_tokens=4).result()
        cut = session.submit("abc", grammar=grammars(letters).compile("regex", "[0-9]{4}"), max_new_tokens=3).result()
        assert exact.finish_reason == "stop" and cut.finish_reason == "length" and re.fullmatch("[0-9]{3}", cut.text)


def test_other_rows_keep_their_bits_and_logprobs_are_the_models(letters: Loaded) -> None:
    grammar = grammars(letters).compile("regex", "[0-9 ]{30}")
    asked: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1.0, "seed": 3, "logprobs": 2}
    with Session(letters) as session:
        both = [session.submit("abc", **asked) for _ in range(2)]  # a batch of two rounds otherwise than a row
        usual = both[0].result()
    with Session(letters) as session:
        free = session.submit("abc", **asked)
        bound = session.submit("abc", grammar=grammar, **asked)
        assert free.result() == usual
        found = bound.result()
    ids = letters.tokenizer.encode("abc").tolist() + found.tokens  # type: ignore[union-attr]
    with torch.inference_mode():
        own = letters.model(torch.tensor([ids]))[0].log_softmax(-1)[2:-1]
    expected = own.gather(-1, torch.tensor(found.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=1e-4, rtol=0)


def test_masked_nan_is_reported() -> None:
    logits = torch.zeros(2, 4)
    logits[0, 3] = torch.nan
    only = torch.tensor([True, False, False, False])
    found = choose(logits, [Sampling()] * 2, masks=[only, only])
    assert found.bad.tolist() == [True, False] and found.tokens[1] == 0


def test_step_past_its_bounds_fails_one_row(letters: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = grammars(letters).compile("regex", "[0-9]{9}")
    with Session(letters) as session:
        bound = session.submit("abc", grammar=grammar, max_new_tokens=9)
        free = session.submit("abc", max_new_tokens=9)
        constraint = bound._asked.constraint
        assert constraint is not None

        def fail() -> None:
            raise WorkError("too long", code="failed")

        monkeypatch.setattr(constraint, "allowed", fail)
        assert free.result().finish_reason == "length" and bound.result().finish_reason == "failed"


HOSTILE: dict[str, tuple[Any, str]] = {
    "not JSON": ("json_schema", "{"),
    "no type": ("json_schema", '{"type": "nothing"}'),
    "if": ("json_schema", '{"if": {"type": "object"}, "then": {"required": ["a"]}}'),
    "remote": ("json_schema", '{"$ref": "http://example.com/schema"}'),
    "itself": ("json_schema", '{"$ref": "#"}'),
    "depth": ("json_schema", '{"items":' * 900 + "{}" + "}" * 900),
    "enum": ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(15_000)]})),
    "products": ("json_schema", json.dumps({"allOf": [{"anyOf": [{"required": [f"a{i}{j}"]} for j in range(9)]}
                                                      for i in range(30)]})),
    "numbers": ("json_schema", '{"type": "string", "minLength": ' + "9" * 40 + "}"),
    "pattern": ("json_schema", '{"type": "string", "pattern": "(?=a)b"}'),
    "lenient": ("json_schema", '{"x-guidance": {"lenient": true}, "type": "array", "contains": {"const": 1}}'),
    "format": ("json_schema", '{"type": "string", "format": "of mine"}'),
    "impossible": ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 4}'),
    "false": ("json_schema", '{"not": {}}'),
    "regex": ("regex", "(a"),
    "lookahead": ("regex", "a(?!b)"),
    "reference": ("regex", r"(a)\1"),
    "empty": ("regex", ""),
    "lark": ("lark", "start: nothing"),
    "gbnf": ("gbnf", "root ::= nothing"),
    "gbnf syntax": ("gbnf", 'root ::= "a'),
    "left": ("lark", "start: start"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_description_that_cannot_be_enforced_is_refused_soon(letters: Loaded, case: str) -> None:
    kind, text = HOSTILE[case]
    with refused(code="unsupported", field="schema") as found:
        grammars(letters).compile(kind, text, "schema")
    assert len(str(found.value)) < 400 and str(found.value).isprintable()


def test_wrong_description_is_refused(letters: Loaded) -> None:
    with refused(code="type", field="grammar"):
        grammars(letters).compile("json_schema", "[]")
    with refused(code="range", field="grammar"):
        grammars(letters).compile("regex", "a" * (LONGEST + 1))


@pytest.mark.parametrize("option", [{"stop_at_eos": False}])
def test_options_that_exclude_a_grammar(letters: Loaded, option: dict[str, Any]) -> None:
    with Session(letters) as session, refused(code="conflict", field="grammar"):
        session.submit("abc", grammar=grammars(letters).compile("regex", "a"), **option)


def test_compiled_descriptions_are_kept_and_bounded(letters: Loaded) -> None:
    found = grammars(letters)
    first = found.compile("regex", "a")
    assert found.compile("regex", "a") is first
    for i in range(70):
        found.compile("regex", f"a{{{i + 2}}}")
    assert len(found._kept) == 64 and found.compile("regex", "a") is not first
