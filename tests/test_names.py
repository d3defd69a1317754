"""The names that other programs call are plain functions, in whatever order things are imported."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import glassformer as gf

CHECK = """
import inspect
import pickle
{first}
import glassformer as gf
for name in ("preset", "presets", "generate", "stream", "capture", "load", "train", "compare", "plan", "edit"):
    function = getattr(gf, name)
    assert inspect.isfunction(function) and function.__doc__ and pickle.loads(pickle.dumps(function)) is function, name
assert "gpt2" in gf.presets()
assert "recipe" in inspect.signature(gf.train).parameters
import glassformer.training.loop, glassformer.runs.arm
assert glassformer.training.loop.train and glassformer.runs.arm.measure
"""


@pytest.mark.parametrize("first", ["", "from glassformer.training import Recipe", "import glassformer.comparison"])
def test_functions_are_not_hidden_by_the_folders_they_live_in(first: str) -> None:
    subprocess.run([sys.executable, "-c", CHECK.format(first=first)], check=True)


def test_save_has_the_signature_of_the_called_function() -> None:
    from glassformer.conversion import save

    ours, theirs = (inspect.signature(function).parameters.values() for function in (gf.save, save))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = gf.tarin


def test_every_listed_name_is_there() -> None:
    for name in gf.__all__:
        assert getattr(gf, name) is not None
    assert {"tokens", "seeds", "tune"} <= inspect.signature(gf.compare).parameters.keys()
