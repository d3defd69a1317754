"""Each key of a tokenizer_config.json that the published tokenizers read is obeyed, of no effect, or named."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from glassformer.conversion.families import FAMILIES
from glassformer.errors import RequestError
from glassformer.text.subword import FileTokenizer

transformers.logging.set_verbosity_error()

TEXTS = [
    "to be, or not to be",
    " To Be ,\nor NOT  caf\u00e9",
    "<s> to</s>be <unk>",
    "be \u4e2d\u6587 . it 's",
    "ro<new>be",
    "",
]
BASE = "TokenizersBackend"
CLASSES = sorted(
    {TOKENIZER_MAPPING_NAMES.get(family) or BASE for family in FAMILIES} - {"MarianTokenizer"} | {"LlamaTokenizer"}
)
"""The classes of tokenizers of the families that are read here."""
VALUES: list[Any] = [
    True, False, 3, "left", "be", "<new>", "de_DE", ["be"], ["<new>"], {"a_token": "be"},
    {"5": {"content": "be", "lstrip": True}, "999": {"content": "<new>", "special": True}},
]  # fmt: skip
"""Values tried for each key; one that the published loader refuses is left out."""
IN_CODE = re.compile(r'kwargs\.(?:pop|get|setdefault)\(\s*"(\w+)"|"(\w+)" (?:not )?in (?:init_)?kwargs')


@cache
def keys(name: str) -> tuple[str, ...]:
    """The keys that a class of tokenizers and those it is made of read."""
    found: set[str] = set()
    for cls in getattr(transformers, name).__mro__[:-1]:
        if "__init__" in vars(cls):
            found |= {*inspect.signature(cls.__init__).parameters} - {"self", "args", "kwargs"}
        found |= {next(filter(None, names)) for names in IN_CODE.findall(inspect.getsource(cls))}
    return tuple(sorted(found | {"of_tomorrow"}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Returns the folder of a small tokenizer of a class, as the class itself saves it."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            cls = getattr(transformers, {BASE: "GPT2Tokenizer", "PegasusTokenizer": "T5Tokenizer"}.get(name, name))
            one = cls().train_new_from_iterator(TEXTS * 3, 330, show_progress=False)
            if name == "PegasusTokenizer":  # which cannot be trained
                pieces = json.loads(one.backend_tokenizer.to_str())["model"]["vocab"]
                one = transformers.PegasusTokenizer(vocab=[(text, score) for text, score in pieces])
            one.save_pretrained(made.setdefault(name, tmp_path_factory.mktemp(name)))
        return made[name]

    yield folder


def read(place: Path) -> tuple[list[Any] | str, str]:
    """Returns ids and texts by our tokenizer, or nothing if it refuses, and the warnings or the refusal."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            ours = FileTokenizer.read(place / "tokenizer.json")
        except RequestError as refused:
            return "", str(refused)
        ids = [ours.encode_prompt(text).tolist() for text in TEXTS]
        found = [*ids, *(ours.decode(one) for one in ids)][: len(ids) if ours.kind == "wordpiece" else None]
    return found, " ".join(str(one.message) for one in told)


def published(name: str, place: Path) -> list[Any] | None:
    """Returns ids and texts by the published class; None if it refuses."""
    try:
        theirs = getattr(transformers, name).from_pretrained(place)
        ids = [theirs.encode(text) for text in TEXTS]
        return [*ids, *(theirs.decode(one, skip_special_tokens=True) for one in ids)]
    except Exception:
        return None


@pytest.mark.parametrize("name", CLASSES)
def test_each_key_is_obeyed_or_named(name: str, folder: Any) -> None:
    place = folder(name)
    file = place / "tokenizer_config.json"
    plain = json.loads(file.read_text())
    found, told = read(place)
    assert not told and found == published(name, place)[: len(found)]
    tried, wrong = 0, []
    for key in keys(name):
        for value in VALUES:
            file.write_text(json.dumps({**plain, key: value}))
            if (expected := published(name, place)) is not None:
                tried += 1
                found, told = read(place)
                if not (found == expected[: len(found)] or f"{key}=" in told or "lacks special tokens" in told):
                    wrong.append((key, value, told))
    file.write_text(json.dumps(plain))
    assert not wrong and tried > 100
