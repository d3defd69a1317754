"""Each key of a GGUF that the published package names is obeyed, of no effect for a written reason, or named."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import Keys

import glassformer as gf
from glassformer.conversion import gguf, metadata
from glassformer.conversion.storage import open_tensors, write_gguf
from glassformer.errors import RequestError
from glassformer.loaded import Loaded
from glassformer.text import ByteTokenizer
from glassformer.text.tokenizers import FileTokenizer
from tests.refused import refused

TINY = "llama@1m+layers=2+d_model=32+heads=2+vocab_size=257+context=64"
HARMLESS = {f"llama.{name}" for name in gguf.HARMLESS}
WITH_A_SCALING = {f"llama.{name}" for name in gguf.SCALING} - {"llama.rope.scaling.factor"}
"""Keys that count with a type of scaling, as in llama.cpp."""
DECODING = {"do_sample": True, "temperature": 0.6, "top_k": 7, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.25}


def published(names: type) -> Iterator[str]:
    """Yields the keys that the published package names, of an architecture and of none."""
    for name, value in vars(names).items():
        if isinstance(value, type):
            yield from published(value)
        elif isinstance(value, str) and not name.startswith("__"):
            yield value.format(arch="llama", id=0, name="tool_use", dense="dense_2")


STARTS = ("general.", "llama.", "tokenizer.")
KEYS = [*dict.fromkeys([*published(Keys), *(f"{start}of_tomorrow" for start in STARTS)])]
KEYS.remove(Keys.General.ALIGNMENT)  # which decides where the tensors are


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    gguf.write(gf.preset(TINY).build(seed=0).eval(), ByteTokenizer(), path, "F32")
    return path


def changed(path: Path, to: Path, **said: Any) -> Path:
    with open_tensors(path) as file:
        tensors = {name: file.tensor(name) for name in file.entries}
        write_gguf(to, {**file.metadata, **said}, tensors)
    return to


def read(path: Path) -> tuple[Loaded | None, str]:
    """Returns what is read of a file, or nothing if it is refused, and the warnings or the refusal."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            return gf.load(path), " ".join(str(one.message) for one in told)
        except RequestError as error:
            return None, str(error)


def said_of(one: Loaded) -> tuple[Any, ...]:
    """Returns what a file's metadata may change: the model, how texts are read and written, and how answers end."""
    assert isinstance(one.tokenizer, FileTokenizer)
    texts = [one.tokenizer.encode_prompt(text).tolist() for text in ("to be", " two  spaces ")]
    return one.config, one.ends, one.generation, texts, one.tokenizer.settings


@pytest.mark.parametrize("start", [*STARTS, ""])
def test_each_key_is_obeyed_or_named(start: str, tiny: Path, tmp_path: Path) -> None:
    plain, told = read(tiny)
    assert plain is not None and not told
    known, tried, wrong = said_of(plain), 0, []
    for key in KEYS:
        if not (key.startswith(start) if start else not key.startswith(STARTS)):
            continue
        for value in (3, 0.5, True, "be", [3, 5]):
            one, told = read(changed(tiny, tmp_path / "one.gguf", **{key: value}))
            tried += 1
            obeyed = one is None or said_of(one) != known
            neutral = value in gguf.LOADED.get(key.removeprefix("llama."), ())
            reason = neutral or key in HARMLESS | WITH_A_SCALING or metadata._is_harmless(key, value)
            if not (obeyed or key in told or reason):
                wrong.append((key, value, told))
    assert not wrong and tried > 20


def test_chat_templates_are_applied_without_a_warning(tiny: Path, tmp_path: Path) -> None:
    said = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.chat_template.tools": "{{ tools }}"}
    one, told = read(changed(tiny, tmp_path / "one.gguf", **said))
    assert one is not None and isinstance(one.tokenizer, FileTokenizer) and not told
    assert {row["template"] for row in one.tokenizer.settings["chat_template"]} == {*said.values()}


def test_keys_without_effect_have_their_reason() -> None:
    assert all(metadata.WITHOUT_EFFECT.values()) and not {*metadata.WITHOUT_EFFECT} & {*metadata.NEUTRAL}
    assert {f"{metadata.SAMPLING}{name}" for name in metadata.SETTINGS} <= {*KEYS}


def test_a_file_without_a_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    for kind in ("adapter", "mmproj", "imatrix"):
        with refused(code="unsupported", field="general.type"):
            gf.load(changed(tiny, tmp_path / "one.gguf", **{"general.type": kind}))


def test_the_middle_of_a_text_ends_where_llama_cpp_ends_it(tiny: Path, tmp_path: Path) -> None:
    ids = {f"tokenizer.ggml.fim_{name}_token_id": i for i, name in enumerate(("pad", "rep", "sep", "pre"), 10)}
    assert {10, 11, 12} <= {*gf.load(changed(tiny, tmp_path / "one.gguf", **ids)).ends}
    assert 13 not in gf.load(tmp_path / "one.gguf").ends


def test_settings_of_decoding_go_through_a_file(tmp_path: Path) -> None:
    """A GGUF that is made of a folder has its settings of decoding, and so has a folder made of the GGUF."""
    config = gf.preset(TINY)
    gf.save(config.build(seed=0).eval(), ByteTokenizer(), tmp_path / "a", generation=DECODING)
    gf.convert(tmp_path / "a", tmp_path / "b.gguf")
    gf.convert(tmp_path / "b.gguf", tmp_path / "c")
    for name in ("a", "b.gguf", "c"):
        found = gf.load(tmp_path / name).generation
        assert {key: found[key] for key in DECODING} == DECODING, name
    gf.save(config.build(seed=0).eval(), ByteTokenizer(), tmp_path / "d", generation={"do_sample": False})
    gf.convert(tmp_path / "d", tmp_path / "e.gguf")
    assert gf.load(tmp_path / "e.gguf").generation["do_sample"] is False


def test_a_penalty_over_a_window_is_named(tiny: Path, tmp_path: Path) -> None:
    said = {f"{metadata.SAMPLING}penalty_repeat": 1.5, f"{metadata.SAMPLING}penalty_last_n": 64}
    one, told = read(changed(tiny, tmp_path / "one.gguf", **said))
    assert one is not None and "repetition_penalty" not in one.generation and "penalty_repeat=1.5" in told


PROBE = """
import json, sys
import xllamacpp as x
p = x.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.warmup, p.verbosity = sys.argv[1], 64, 1, False, -1
said = x.Server(p).handle_completions({"prompt": [3, 5], "n_predict": 1, "verbose": True})
print("FOUND" + (said if isinstance(said, str) else json.dumps(said)))
"""


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="llama.cpp is not installed (xllamacpp)")
def test_llama_cpp_uses_the_files_sampling_defaults(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    gguf.write(gf.preset(TINY).build(seed=0).eval(), ByteTokenizer(), path, "F32", generation=DECODING)
    done = subprocess.run([sys.executable, "-c", PROBE, str(path)], capture_output=True, text=True, timeout=120)
    said = json.loads(done.stdout.rpartition("FOUND")[2])
    settings = said["__verbose"]["generation_settings"]
    for name in ("temperature", "top_k", "top_p", "min_p"):
        assert settings[name] == pytest.approx(DECODING[name]), name
    assert (settings["repeat_penalty"], settings["repeat_last_n"]) == (pytest.approx(1.25), -1)
