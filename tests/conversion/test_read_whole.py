"""Each key that a published loader reads is used, known to be without effect, or named in a warning or refusal."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import transformers

from glassformer.conversion import answers
from glassformer.conversion.fields import Fields

FLAGS = {"do_sample", "early_stopping", "renormalize_logits", "token_healing", "use_cache"}


def decoding(place: Path, where: str, **said: Any) -> tuple[dict[str, Any], str]:
    """Returns the decoding settings that are read from one of two files, and the warnings."""
    if where == answers.FILE:
        (place / where).write_text(json.dumps(said))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = answers.read(place, Fields(said if where == "config.json" else {}))[1]
    return found, " ".join(str(one.message) for one in told)


@pytest.mark.parametrize("where", [answers.FILE, "config.json"])
def test_each_setting_of_decoding_is_obeyed_or_named(where: str, tmp_path: Path) -> None:
    """The fields are those of GenerationConfig. Those that are read have tests of their effect (test_source.py)."""
    names = [name for name in vars(transformers.GenerationConfig()) if name not in answers.WITHOUT_EFFECT]
    assert {"top_h", "guidance_scale", "no_repeat_ngram_size"} <= {*names}
    for name in names:
        for value in (3, 0.25, [[5, 6]], [7], *([True] if name in FLAGS else [])):
            read, told = decoding(tmp_path, where, **{name: value})
            assert read.get(name) == value or f"{name}=" in told, (name, value)
    assert not decoding(tmp_path, where, **transformers.GenerationConfig._get_default_generation_params())[1]


def test_an_unknown_setting_is_named(tmp_path: Path) -> None:
    assert "of_tomorrow=1.5" in decoding(tmp_path, answers.FILE, of_tomorrow=1.5)[1]


def test_settings_without_effect_have_their_reason() -> None:
    known = {*answers.KNOWN, *answers.NEUTRAL, *answers.WITHOUT_EFFECT}
    assert {*vars(transformers.GenerationConfig())} <= known
    assert all(answers.WITHOUT_EFFECT.values()) and not {*answers.WITHOUT_EFFECT} & {*answers.KNOWN, *answers.NEUTRAL}
