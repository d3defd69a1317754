"""Verbs of the command line are functions of `gf` with the same options, which `dir`, `help` and type checkers know."""

from __future__ import annotations

import ast
import inspect
import io
import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

import glassformer as gf
from glassformer import options
from glassformer.cli.program import VERBS, app
from glassformer.comparison import Design
from glassformer.figures.terminal import Printed
from glassformer.training import Recipe
from glassformer.training.recipe import BUDGETS

ELSEWHERE = {"schema": "ModelConfig.json_schema", "generate": "Loaded.generate", "mcp": "agents.serve_tools",
             "studio": "studio.start"}  # fmt: skip
"""Verbs whose function is a method."""

ONLY_TYPED = {
    "json",  # print and to_dict
    "processes",  # torchrun
    "prompt_file",  # open(...).read()
    "threads",  # torch.set_num_threads, but for training
}
"""Options that Python says in another way."""

LOADED_BEFORE = {"generate": ("load", "Session")}
"""Verbs whose model Python may load before, with these functions and some of the options."""

OTHER_FUNCTIONS = {"train": {"dry": "dry_run"}}
"""Options for which Python has another function, which takes the same otherwise."""

EXECUTOR = {"slots": "executor", "workers": "executor"}
OTHER_NAMES = {
    "ablate": {"field": "data", **EXECUTOR},
    "chat": {"text": "messages"},
    "compare": {"field": "data", "watch_every": "watch", **EXECUTOR},
    "classify": {"text": "texts"},
    "embed": {"text": "texts"},
    "index": {"field": "data"},
    "generate": {"model": "self", "compile": "compiled", "state_dtype": "dtype", "text": "prompt", "prompts": "prompt"},
    "inspect": {"prompt": "text"},
    "plan": {"models": "model"},
    "run": EXECUTOR,
    "scale": {"field": "data", **EXECUTOR},
    "train": {
        "field": "data", "adam_eps": "optimizer", "betas": "optimizer", "warmup": "schedule", "watch_every": "watch",
    },
}  # fmt: skip
"""Options that are part of another one in Python, or have another name there."""


def options_of(verb: str) -> set[str]:
    """Names of the parameters of a verb, those of shared dataclasses one by one."""
    collection = app[verb].assemble_argument_collection(parse_docstring=False)
    return {one.field_info.name for one in collection if one.show}


def keywords_of(function: Any) -> set[str]:
    """Names that a function takes; `**options` are fields of a typed dictionary, or of the design and the recipe."""
    names = set()
    for one in inspect.signature(function).parameters.values():
        if one.kind is not inspect.Parameter.VAR_KEYWORD:
            names.add(one.name)
        elif typed := re.fullmatch(r"Unpack\[(\w+)\]", str(one.annotation)):
            names |= set(getattr(options, typed[1]).__annotations__)
        else:
            names |= {field.name for field in fields(Design)} | set(Recipe.model_fields)
    return names


def function_of(verb: str) -> Any:
    """Returns the function of a verb; None if `gf` does not have it."""
    return attrgetter(ELSEWHERE.get(verb, verb))(gf) if verb in ELSEWHERE or hasattr(gf, verb) else None


def missing(verb: str, function: Any) -> set[str]:
    """Options of a verb that a function does not take."""
    renamed = OTHER_NAMES.get(verb, {})
    wanted = {renamed.get(name, name) for name in options_of(verb) - ONLY_TYPED - set(OTHER_FUNCTIONS.get(verb, ()))}
    functions = [function, *(getattr(gf, name) for name in LOADED_BEFORE.get(verb, ()))]
    return wanted.difference(*(keywords_of(one) for one in functions if one is not None))


def test_keywords_of_recipes_and_designs_are_those_of_their_classes() -> None:
    own = set(Recipe.model_fields) - set(BUDGETS)
    assert {*options.RecipeKeywords.__annotations__} == own
    assert {*options.RunKeywords.__annotations__} == set(Recipe.model_fields)
    design = {one.name for one in fields(Design)} - {"arms", "data"} | own
    for name, keywords in (
        ("compare", options.DesignKeywords), ("tune", options.TuneKeywords), ("ablate", options.LadderKeywords),
    ):  # fmt: skip
        named = set(inspect.signature(getattr(gf, name)).parameters)
        assert design <= named | {*keywords.__annotations__} | {"tune"}
        assert not named & {*keywords.__annotations__}
    everything = set(inspect.signature(gf.compare).parameters) | {*options.DesignKeywords.__annotations__}
    assert {*options.TuneKeywords.__annotations__} == everything - {"models", "data", "options", "tune"}


@pytest.mark.slow
def test_a_type_checker_knows_the_keywords(tmp_path: Path) -> None:
    calls = {name: f'gf.{name}("gpt2@1m", "x", tokns=1)' for name in ("train", "dry_run", "compare", "tune", "ablate")}
    right = 'gf.compare(["gpt2@1m"], "x", tokens=1, context=32)'
    (tmp_path / "one.py").write_text("\n".join(["import glassformer as gf", right, *calls.values(), ""]))
    done = subprocess.run([sys.executable, "-m", "mypy", str(tmp_path / "one.py")], capture_output=True, text=True)
    assert done.stdout.count("error:") == len(calls)
    assert all(f'"tokns" for "{name}"' in done.stdout for name in calls)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_verb_is_a_function_with_the_same_options(verb: str) -> None:
    assert missing(verb, function_of(verb)) == set()


def test_a_function_for_an_option_takes_the_other_options() -> None:
    for verb, functions in OTHER_FUNCTIONS.items():
        for name in functions.values():
            assert missing(verb, getattr(gf, name)) == set()


def test_an_option_that_python_lacks_is_seen() -> None:
    def check(model: str, *, seed: int = 0) -> None: ...

    assert {"text", "largest"} <= missing("check", check)


def test_exceptions_name_verbs_and_options_that_exist() -> None:
    """An entry must still be needed."""
    assert {*ELSEWHERE, *OTHER_NAMES, *OTHER_FUNCTIONS} <= set(VERBS)
    assert all(set(names) <= options_of(verb) for verb, names in OTHER_FUNCTIONS.items())
    assert all(set(names) <= options_of(verb) for verb, names in OTHER_NAMES.items())


def test_no_module_has_the_name_of_a_function() -> None:
    """`from glassformer.laboratory import check` is then always the function, or an error."""
    functions = {name for name in gf.__all__ if inspect.isfunction(getattr(gf, name))}
    top = Path(gf.__file__).parent
    named = {
        path.relative_to(top).as_posix() for path in top.rglob("*") if path.stem in functions and path.parent != top
    }
    assert {name for name in named if "." not in name or name.endswith(".py")} == set()
    assert not {path.stem for path in top.iterdir()} & functions


def test_dir_lists_public_names_only() -> None:
    assert {name for name in dir(gf) if not name.startswith("__")} == set(gf.__all__)
    assert len(dir(gf)) == len(set(dir(gf)))


def test_loading_torch_is_noted_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delitem(sys.modules, "torch")
    for stream, said in ((Terminal(), "loading torch ...\n"), (io.StringIO(), "")):
        monkeypatch.setattr(sys, "stderr", stream)
        assert gf.__getattr__("RequestError") is gf.RequestError and not stream.getvalue()
        assert gf.__getattr__("Recipe") is Recipe and stream.getvalue() == said


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
def test_functions_declare_their_return_types(function: str, returns: str) -> None:
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


def test_type_checkers_see_no_name_that_does_not_exist() -> None:
    """A module's `__getattr__` that they see would let any name pass."""
    tree = ast.parse(Path(gf.__file__).read_text(encoding="utf-8"))
    assert not [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"]
    with pytest.raises(AttributeError):
        gf.nosuch  # type: ignore[attr-defined]  # noqa: B018
