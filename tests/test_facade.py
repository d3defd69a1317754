"""Verbs of the command line are functions of `gf` with the same options, which `dir`, `help` and type checkers know."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

import glassformer as gf
from glassformer.cli.program import VERBS, app
from glassformer.comparison import Design
from glassformer.figures.terminal import Printed
from glassformer.training import Recipe

ELSEWHERE = {"schema": "ModelConfig.json_schema"}
"""Verbs whose function is a method."""

ONLY_TYPED = {"json"}
"""Options that say how a value is printed, which Python does with `print` and `to_dict`."""

OTHER_NAMES = {
    "compare": {"lr": "learning_rate"},
    "plan": {"models": "model"},
    "train": {"lr": "learning_rate"},
}
"""Options that have another name in Python: a field of the recipe, or one model for several."""

NOT_YET: dict[str, set[str]] = {
    "ablate": {"lr", "slots", "workers"},
    "ask": {
        "encoder",
        "frequency_penalty",
        "logit_bias",
        "min_p",
        "presence_penalty",
        "quantize",
        "repetition_penalty",
        "state_dtype",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    },
    "chat": {
        "compile",
        "device",
        "dtype",
        "frequency_penalty",
        "logit_bias",
        "max_new_tokens",
        "min_p",
        "model",
        "presence_penalty",
        "quantize",
        "repetition_penalty",
        "seed",
        "state_dtype",
        "system",
        "temperature",
        "threads",
        "top_k",
        "top_p",
        "typical_p",
    },
    "claims": {"all"},
    "compare": {"slots", "watch_every", "workers"},
    "embed": {"file", "out", "text"},
    "generate": {
        "beams",
        "draft",
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "logprobs",
        "min_p",
        "n",
        "presence_penalty",
        "prompt",
        "prompt_file",
        "quantize",
        "repetition_penalty",
        "source",
        "speculate",
        "state",
        "state_dtype",
        "stop",
        "top_p",
        "typical_p",
    },
    "run": {"executor", "experiment", "out", "seeds", "slots", "tune", "watch", "workers"},
    "scale": {
        "budgets",
        "columns",
        "far",
        "form",
        "hours",
        "isoflop",
        "lr",
        "predict",
        "slots",
        "where",
        "without_worst",
        "workers",
    },
    "train": {"adam_eps", "betas", "processes", "warmup", "watch_every"},
}
"""Options that a function does not take yet. Entries are only removed."""


def options_of(verb: str) -> set[str]:
    """Names of the parameters of a verb, those of shared dataclasses one by one."""
    collection = app[verb].assemble_argument_collection(parse_docstring=False)
    return {one.field_info.name for one in collection if one.names != ("*",)}


def keywords_of(function: Any) -> set[str]:
    """Names that a function takes; `**options` of a comparison or a run are fields of the design and the recipe."""
    parameters = inspect.signature(function).parameters.values()
    names = {one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD}
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        names |= {field.name for field in fields(Design)} | set(Recipe.model_fields)
    return names


@pytest.mark.parametrize("verb", sorted(set(VERBS) - set(ELSEWHERE)))
def test_verb_is_a_function_with_the_same_options(verb: str) -> None:
    function = getattr(gf, verb, None)
    renamed = OTHER_NAMES.get(verb, {})
    wanted = {renamed.get(name, name) for name in options_of(verb) - ONLY_TYPED}
    keywords = set() if function is None else keywords_of(function)
    assert wanted - keywords - NOT_YET.get(verb, set()) == set()


@pytest.mark.parametrize("verb", sorted(ELSEWHERE))
def test_verb_is_a_method(verb: str) -> None:
    owner, _, method = ELSEWHERE[verb].partition(".")
    assert callable(getattr(getattr(gf, owner), method))


def test_an_option_that_python_lacks_is_seen() -> None:
    def check(model: str, *, seed: int = 0) -> None: ...

    assert {"text", "largest"} <= options_of("check") - keywords_of(check)


def test_exceptions_name_verbs_and_options_that_exist() -> None:
    assert {*ELSEWHERE, *OTHER_NAMES, *NOT_YET} <= set(VERBS)
    assert all(set(names) <= options_of(verb) for verb, names in OTHER_NAMES.items())
    assert all(names <= options_of(verb) for verb, names in NOT_YET.items())


NAMED_LIKE_FUNCTIONS = {"cli/generate.py", "laboratory/claims", "report/claims.py"}
"""Modules with the name of a function of `gf`. Entries are only removed."""


def test_no_module_has_the_name_of_a_function() -> None:
    """`from glassformer.laboratory import check` is then always the function, or an error."""
    functions = {name for name in gf.__all__ if inspect.isfunction(getattr(gf, name))}
    top = Path(gf.__file__).parent
    named = {
        path.relative_to(top).as_posix() for path in top.rglob("*") if path.stem in functions and path.parent != top
    }
    assert {name for name in named if "." not in name or name.endswith(".py")} - NAMED_LIKE_FUNCTIONS == set()
    assert not {path.stem for path in top.iterdir()} & functions


def test_dir_lists_public_names_only() -> None:
    assert {name for name in dir(gf) if not name.startswith("__")} == set(gf.__all__)
    assert len(dir(gf)) == len(set(dir(gf)))


def test_help_lists_the_functions() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import glassformer; help(glassformer)"], capture_output=True, text=True, check=True
    )
    functions = [name for name in gf.__all__ if inspect.isfunction(getattr(gf, name))]
    assert len(functions) > 20 and not done.stderr
    assert [name for name in functions if f"    {name}(" not in done.stdout] == []


@pytest.mark.parametrize(
    ("function", "returns"),
    [
        ("check", "laboratory.proof.Proof"),
        ("convert", "laboratory.exporting.Conversion"),
        ("load", "loaded.Loaded"),
        ("why", "dynamics.Diagnosis"),
    ],
)
def test_functions_say_what_they_return(function: str, returns: str) -> None:
    """An editor completes the fields of the value."""
    home, _, name = returns.rpartition(".")
    expected = getattr(import_module(f"glassformer.{home}"), name)
    assert get_type_hints(getattr(gf, function))["return"] is expected


def test_a_built_model_has_a_type() -> None:
    from glassformer.model import Model

    assert inspect.signature(gf.ModelConfig.build).return_annotation == "Model"
    assert get_type_hints(gf.Loaded)["model"] is Model
    assert get_type_hints(Model.forward)["return"] is torch.Tensor


@pytest.mark.parametrize(
    "name",
    [
        "dynamics.Diagnosis", "dynamics.coord_check.CoordinateCheck", "laboratory.anatomy.Anatomy",
        "laboratory.exporting.Conversion", "laboratory.exporting.Exports", "laboratory.proof.Proof",
        "laboratory.quality.QualityTable", "lens.Inspection", "naming.catalogue.PresetCatalogue",
    ],
)  # fmt: skip
def test_values_of_verbs_are_frozen_and_print_themselves(name: str) -> None:
    home, _, cls = name.rpartition(".")
    value = getattr(import_module(f"glassformer.{home}"), cls)
    assert issubclass(value, Printed) and value.__dataclass_params__.frozen
    assert {"lines", "to_dict"} <= {name for one in value.__mro__[:-1] if one is not Printed for name in vars(one)}
