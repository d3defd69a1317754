"""Each key of a folder that the published sentence-transformers reads is obeyed, of no effect, or named."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.model import BaseModel
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from sentence_transformers.sentence_transformer.modules.pooling import _LEGACY_POOLING_MODE_KWARGS

import glassformer as gf
from glassformer.conversion.sentences import LENGTHS
from glassformer.errors import RequestError
from tests.refused import refused

transformers.logging.disable_progress_bar()

TEXTS = ["to be, or not to be", "Or NOT to BE: that is " * 8, "be"]
CLASSES = (SentenceTransformer, BaseModel)
OLD_ARGUMENTS = {"model_args", "tokenizer_args", "config_args"}


def _said(name: str) -> set[str]:
    """Returns the keys that the published code reads of a mapping of this name."""
    found: set[str] = set()
    for cls in CLASSES:
        found |= {*re.findall(rf"""{name}(?:\.get\(|\[)"(\w+)\"""", inspect.getsource(cls))}
    return found


def _parameters(cls: type) -> set[str]:
    return {*inspect.signature(inspect.unwrap(cls.__init__)).parameters} - {"self"}


PLACES: dict[str, tuple[set[str], list[Any]]] = {
    "modules.json": (_said("module_config"), ["a", "0"]),
    "sentence_bert_config.json": (
        (_parameters(Transformer) | {*Transformer.config_keys} | OLD_ARGUMENTS) - {"model_name_or_path"},
        ["feature-extraction", "fill-mask", "token_embeddings", {"text": {"max_length": 6}}, {"model_max_length": 6},
         {"strategy": "min", "length": 9}, {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
         {"text": {"method": "forward", "method_output_name": "pooler_output"}}, {"is_decoder": True}],
    ),
    "1_Pooling/config.json": (
        _parameters(Pooling) | {*_LEGACY_POOLING_MODE_KWARGS} | {*Pooling.config_key_renames},
        ["cls", "max", "mean", "lasttoken", ["mean"], ["cls", "mean"]],
    ),
    "2_Normalize/config.json": (_parameters(Normalize), ["sentence_embedding", "token_embeddings"]),
    "config_sentence_transformers.json": (
        _said("model_config"),
        ["dot", "SparseEncoder", {"a": "or not "}, {"sentence_transformers": "5.4.0"}, "a"],
    ),
    "tokenizer_config.json": ({"model_max_length", "max_len", "truncation_side"}, ["left", "right"]),
}  # fmt: skip
"""File -> keys that are read of it, and values tried with the usual ones."""
VALUES: list[Any] = [True, False, 7, {}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a small folder as sentence-transformers writes it."""
    bare, place = (tmp_path_factory.mktemp(name) for name in ("bare", "folder"))
    tokenizer = transformers.BertTokenizer().train_new_from_iterator(TEXTS * 3, 60, show_progress=False)
    tokenizer.save_pretrained(bare)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=32,
        max_position_embeddings=16, initializer_range=0.3,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(bare)
    steps = [Transformer(str(bare)), Pooling(24, "cls"), Normalize()]
    SentenceTransformer(modules=steps, device="cpu", prompts={"a": "or not "}).save_pretrained(str(place))
    return place


def ours(place: Path) -> tuple[torch.Tensor | None, str]:
    """Returns our vectors, or none if the folder is refused, and the warnings or the refusal."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found = gf.embed(place, TEXTS)
        except RequestError as error:
            return None, str(error)
    return torch.Tensor(found), " ".join(str(one.message) for one in told)


def published(place: Path) -> torch.Tensor | None:
    """Returns the published vectors; None if the folder is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return SentenceTransformer(str(place), device="cpu", local_files_only=True).encode(
                TEXTS, convert_to_tensor=True, show_progress_bar=False
            )
        except Exception:
            return None


def agree(mine: torch.Tensor | None, theirs: torch.Tensor) -> bool:
    return mine is not None and mine.shape == theirs.shape and torch.allclose(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("file", PLACES)
def test_each_key_is_obeyed_or_named(file: str, folder: Path) -> None:
    where, (keys, values) = folder / file, PLACES[file]
    text = where.read_text() if where.is_file() else None
    plain, (found, told) = published(folder), ours(folder)
    assert plain is not None and agree(found, plain) and not told
    tried, wrong = 0, []
    try:
        for key in sorted(keys | {"of_tomorrow"}):
            for value in [*VALUES, *values]:
                said = json.loads(text) if text else {}
                for one in said if isinstance(said, list) else [said]:
                    one.update({key: value})
                where.write_text(json.dumps(said))
                if (theirs := published(folder)) is not None:
                    tried += 1
                    found, told = ours(folder)
                    if not (agree(found, theirs) or key in told):
                        wrong.append((key, value, told))
    finally:
        where.write_text(text) if text is not None else where.unlink()
    assert not wrong and tried > 5


def test_a_key_of_tomorrow_is_refused(folder: Path, tmp_path: Path) -> None:
    for file in [*PLACES][:-1]:
        place = tmp_path / file[0]
        shutil.copytree(folder, place, dirs_exist_ok=True)
        said = json.loads((place / file).read_text())
        (said[0] if isinstance(said, list) else said)["of_tomorrow"] = 1
        (place / file).write_text(json.dumps(said))
        known = file.rpartition("/")[0][2:] if file.startswith("2") else file
        with refused(code="unknown", field=f"{known}:of_tomorrow"):
            gf.load(place)
        shutil.rmtree(place)


def test_steps_of_others_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    steps = json.loads((tmp_path / "modules.json").read_text())
    for change, code in (
        ({"type": "custom_st.Transformer"}, "unknown"), ({"path": "0_Transformer"}, "unsupported"),
        ({"path": "../0_Transformer"}, "range"), ({"path": "/tmp"}, "range"),
    ):  # fmt: skip
        (tmp_path / "modules.json").write_text(json.dumps([{**steps[0], **change}, *steps[1:]]))
        with refused(code=code, field="modules"):
            gf.load(tmp_path)


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_of_earlier_folders_are_read(name: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / LENGTHS[0]).unlink()
    (tmp_path / name).write_text('{"max_seq_length": 7}')
    assert agree(ours(tmp_path)[0], published(tmp_path)) and gf.load(tmp_path).pooling.max_tokens == 7
