"""Facts that several rooms need are written in one place, because copies drift apart."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor

import glassformer
import glassformer as gf
from glassformer import thresholds
from glassformer.cli import options
from glassformer.cli.options import AskOptions, ChatOptions, GenerateOptions
from glassformer.cli.verbs import laboratory, training
from glassformer.dynamics import rules
from glassformer.errors import CODES, Code, no_memory
from glassformer.files import SCHEMAS, check_schema
from glassformer.generation.sampling import Sampling
from glassformer.machine import Settings
from glassformer.options import GenerationKeywords, GenerationOptions, SamplingOptions
from glassformer.text import EvaluationWindows
from glassformer.training import default_learning_rate, extrapolate
from tests.refused import refused

SRC = Path(glassformer.__file__).parent
ONCE = {
    "IGNORED", "Loaded", "OnPass", "OnProgress", "Pooling", "Progress", "_whole", "check_folder",
    "default_learning_rate", "finite", "load", "no_memory", "out_of_memory", "printable",
    *(name for name in vars(thresholds) if name.isupper()),
}  # fmt: skip
"""Names that had copies, or meant something else in another file."""


def defined(tree: ast.Module) -> set[str]:
    """Names of functions, classes and constants at the top of a file."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_a_name_is_defined_in_one_file():
    places = defaultdict(list)
    for path in SRC.rglob("*.py"):
        for name in ONCE & defined(ast.parse(path.read_text(encoding="utf-8"))):
            places[name].append(path.relative_to(SRC).as_posix())
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
    assert set(places) >= {"IGNORED", "no_memory", "default_learning_rate", "DIVERGENCE_WINDOW", "COLLAPSED_LOGIT"}


def test_end_tokens_of_a_model_are_set_in_known_places():
    """When it is loaded, or trained, or folded; whatever generates asks `Model.ends`."""
    places = {
        path.relative_to(SRC).as_posix()
        for path in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign)
        and any(
            isinstance(to, ast.Attribute) and to.attr == "ends" and ast.unparse(to) != "self.ends"
            for to in node.targets
        )
    }
    assert places == {"loaded.py", "training/trained.py", "conversion/weights.py"}


def moves_files(node: ast.AST) -> bool:
    """Returns True for code that renames, flushes or locks a file: `os.replace`, `Path.rename`, `fcntl.flock`."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        return bool({"fcntl", "msvcrt"} & {name.split(".")[0] for name in names})
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    name, owner = node.func.attr, ast.unparse(node.func.value)
    if owner in ("os", "shutil"):
        return name in ("replace", "rename", "renames", "move", "link")
    return name in ("replace", "rename") and len(node.args) == 1 and not node.keywords  # of a string, it takes two


def test_files_are_replaced_and_folders_locked_in_one_file():
    """`files.atomic_file` and its like: written aside, flushed, renamed; `files.only_writer`."""
    places = {
        path.relative_to(SRC).as_posix()
        for path in SRC.rglob("*.py")
        if any(map(moves_files, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert places == {"files.py"}


@pytest.mark.parametrize(
    "line", ["os.replace(a, b)", "a.rename(b)", "path.replace(target)", "shutil.move(a, b)", "import fcntl"]
)
def test_another_writer_is_seen(line: str):
    assert any(map(moves_files, ast.walk(ast.parse(line))))
    assert not any(map(moves_files, ast.walk(ast.parse("a.replace('x', 'y'); replace(a, b=1); moment.replace(day=1)"))))


def makes_text(node: ast.AST) -> bool:
    """Returns True for code that turns tokens into growing text, such as `Detokenizer(...)`."""
    made = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
    return made in ("GrowingText", "Detokenizer", "Stops")


def test_tokens_become_text_in_one_loop():
    """`generation.text.GrowingText`, which requests of the engine hold, and a search for its finished beams."""
    places = {
        path.relative_to(SRC).as_posix(): sum(map(makes_text, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
        for path in SRC.rglob("*.py")
    }
    assert {name: count for name, count in places.items() if count} == {
        "generation/text.py": 2, "generation/engine.py": 1, "generation/session.py": 1
    }  # fmt: skip


@pytest.mark.parametrize("line", ["Detokenizer(t)", "text.Stops(['x'])", "GrowingText(t, ends)"])
def test_another_text_loop_is_seen(line: str):
    assert any(map(makes_text, ast.walk(ast.parse(line)))) and not makes_text(ast.parse("check_stops(x)").body[0])


def test_codes_of_errors_are_of_one_list():
    """The type checker asks of every error that its code is in the list; here every code of the list is an error's."""
    used = set()
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.Constant):
                used.add(node.value.value)
    assert used >= set(CODES) and set(CODES) == set(get_args(Code))


def out_of_memory() -> Tensor:
    return torch.empty(1 << 55, dtype=torch.uint8)


def test_the_allocators_error_is_known():
    with pytest.raises(RuntimeError) as caught:
        out_of_memory()
    assert no_memory(caught.value)
    assert no_memory(MemoryError()) and no_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ..."))
    assert no_memory(RuntimeError("MPS backend out of memory"))
    assert not no_memory(RuntimeError("shape mismatch")) and not no_memory(ValueError("out of memory"))


def test_length_without_memory_has_a_reason(monkeypatch: pytest.MonkeyPatch):
    def score(model: object, windows: EvaluationWindows, how: object, objective: object) -> dict[str, float]:
        if windows.context > 16:
            out_of_memory()
        return {"loss": 1.0, "tokens": 64}

    monkeypatch.setattr(import_module("glassformer.training.evaluate"), "score", score)
    text = SimpleNamespace(validation=np.zeros(200, dtype=np.uint16), token_bytes=np.ones(4, dtype=np.int64))
    rows = extrapolate(SimpleNamespace(config=None), text, 16, Settings("cpu", "float32", 1, False))
    assert [row["context"] for row in rows] == [16, 32, 64, 128] and rows[0]["loss"] == 1.0
    assert {row.get("reason") for row in rows[1:]} == {"cannot: out of memory at this length"}


@pytest.mark.parametrize("name", ["gpt2@10m", "gpt2@10m+mup", "llama@1m+mup:32"])
def test_diagnosis_compares_a_rate_with_trainings_default(name: str):
    config = gf.preset(name)
    usual = default_learning_rate(config)
    for recipe in ({}, {"optimizer": {"kind": "adamw"}}, {"optimizer": {"kind": "muon"}}):
        run = SimpleNamespace(config=config, recipe=recipe, rates=np.array([usual / 2, 3 * usual]))
        assert rules._above_usual(run) == pytest.approx(3)
    other = SimpleNamespace(config=config, recipe={"optimizer": {"kind": "sgd"}}, rates=np.array([3 * usual]))
    assert math.isnan(rules._above_usual(other))


ROOM_OF_STATISTICS = {
    f"runs/{name}.py" for name in ("contrasts", "simultaneous", "looks", "verdicts", "power", "effects")
}
"""The files that say which differences are shown."""
PAGES = ("report/", "laboratory/pages/")
"""Folders of pages."""
READ_BY_PAGES = {"results", "arms", "diff", "wording", "effects"}
"""Files of `runs` that the report may use: types, and words about them."""


def judging(path: str, tree: ast.Module) -> list[str]:
    """Marks of a second judge in a file: what only the room of statistics does, or only the words of verdicts say."""
    found = []
    pages = path.startswith(PAGES) or path.startswith("figures/")
    documented = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, DOCUMENTED) and _has_text(node)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
        found += [one for one in names if one.startswith(("scipy.stats", "scipy.special"))]
        if path.startswith(PAGES):
            inside = [one.split("runs.", 1)[1].split(".")[0] for one in names if "runs." in one]
            found += [f"runs.{one}" for one in inside if one not in READ_BY_PAGES]
        if isinstance(node, ast.Compare) and path not in BESIDES and ZERO.search(ast.unparse(node)):
            found.append(ast.unparse(node))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            spelled = node.value in ("a better", "b better") and path != "runs/results.py"
            if spelled or (pages and path not in OPTIMA and re.search(r"\b(better|best)\b", node.value)):
                found.append(repr(node.value))
    return found


DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef
ZERO = re.compile(r"\blow\b['\"\]]*( or 0\.0\)?)? > 0\b|\bhigh\b['\"\]]*( or 0\.0\)?)? < 0\b")
"""Pattern of a comparison of an interval with zero."""
BESIDES = {"runs/results.py", "text/patterns.py"}
"""Files exempt from ZERO: a verdict's own property, and the repetitions of regular expressions."""
OPTIMA = {"laboratory/pages/scaling.py", "report/summary.py"}
"""Files that may write "best": for the best use of compute by a law, and for the mark of the best arm in the style
sheet."""


def _has_text(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> bool:
    return bool(node.body) and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)


def test_there_is_one_judge():
    """Better and best come only from the verdicts: no other file tests a difference, and no page has its own words."""
    found = {}
    for path in SRC.rglob("*.py"):
        name = path.relative_to(SRC).as_posix()
        if name not in ROOM_OF_STATISTICS and (marks := judging(name, ast.parse(path.read_text(encoding="utf-8")))):
            found[name] = marks
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "from scipy.stats import ttest_rel", "def f():\n    import scipy.special",
        "from ..runs.contrasts import contrasts",
        "from glassformer.runs.verdicts import verdicts", "decided = one['low'] > 0 or one['high'] < 0",
        "if pair.high < 0: pass", "words = 'a better'", "mark = 'best'", "words = f'{name} is better'",
    ],
)  # fmt: skip
def test_a_second_judge_is_seen(line: str):
    assert judging("report/finding.py", ast.parse(line))


def numbered(tree: ast.AST) -> list[int]:
    """Returns the lines on which a dictionary gives its schema as a number."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == "schema" and isinstance(value, ast.Constant)
        and isinstance(value.value, int)
    ]  # fmt: skip


DESIGNING = {"common_context", "fairness", "recipes", "tokens_of_steps"}
"""Functions that make or refuse an experiment."""


def designs(tree: ast.AST) -> set[str]:
    """Functions of DESIGNING that the code calls."""
    return {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in DESIGNING
    }


def test_an_experiment_is_designed_in_one_file():
    """Whatever trains several models makes a `Design`, which calls these."""
    places = {
        path.relative_to(SRC).as_posix()
        for path in SRC.rglob("*.py")
        if designs(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert places == {"comparison/design.py"}
    assert designs(ast.parse("fairness(configs)")) and not designs(ast.parse("design.plans(configs)"))


def test_a_command_that_repeats_an_experiment_is_made_in_one_file():
    makers = {
        path.relative_to(SRC).as_posix()
        for path in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.List) and ast.unparse(node).startswith("['glassformer', 'run'")
    }
    assert makers == {"comparison/experiment.py"}


def test_versions_of_file_formats_are_known_in_one_place():
    found = {path.name: numbered(ast.parse(path.read_text(encoding="utf-8"))) for path in SRC.rglob("*.py")}
    assert not {name: lines for name, lines in found.items() if lines}
    assert numbered(ast.parse('{"schema": 1}')) == [1]


@pytest.mark.parametrize("found", [None, 0, "1", 99])
def test_a_file_of_another_version_is_refused(found: object):
    for kind, version in SCHEMAS.items():
        check_schema(kind, version, "file.json")
        with refused(code="schema", field="schema") as caught:
            check_schema(kind, found, "file.json")
        assert caught.value.expected == str(version)


def test_training_steps_are_timed_in_one_file():
    """The loop's single step is called by the loop and by the stop-watch; whatever needs a speed asks the latter."""
    callers = {
        path.relative_to(SRC).as_posix()
        for path in SRC.rglob("*.py")
        if re.search(r"training\.loop import .*\b(one_step|warm_up)\b", path.read_text(encoding="utf-8"))
    }
    assert callers == {"training/pace.py"}


def test_options_of_generation_are_declared_once():
    """The command line, `Sampling` and the keyword arguments of Python have the names and types of one declaration."""
    declared = get_type_hints(GenerationOptions)
    keywords = get_type_hints(GenerationKeywords)
    assert set(keywords) == set(declared) - {"n"}
    assert {name: kind for name, kind in keywords.items() if name != "stop"} == {
        name: declared[name] for name in keywords if name != "stop"
    }
    assert set(Sampling.model_fields) == set(get_type_hints(SamplingOptions))
    for verb in (ChatOptions, AskOptions, GenerateOptions):
        assert issubclass(verb, GenerationOptions)
    again = [
        f"{path.relative_to(SRC)}:{node.lineno}"
        for path in SRC.rglob("*.py")
        if path.name != "options.py" and path.parent.name not in ("serving", "studio")  # requests have bounds
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id in {"top_p", "min_p"}
    ]
    assert not again


def test_text_is_written_by_one_mechanism():
    """Whatever answers asks a session, or `generate` for rows of ids; no other file makes tokens with `stream`."""
    users = {
        path.relative_to(SRC).as_posix()
        for path in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("glassformer.generation")
        and any(one.name == "stream" for one in node.names)
    }  # fmt: skip
    assert users == {"__init__.py", "generation/__init__.py", "generation/session.py", "runs/measure.py"}  # times it


def framing(text: str) -> bool:
    """Returns True if the code reads the style sheet of pages, which only their frame does."""
    return "report.css" in text


def test_pages_have_one_frame():
    places = {path.relative_to(SRC).as_posix() for path in SRC.rglob("*.py") if framing(path.read_text("utf-8"))}
    assert places == {"report/html.py"}
    assert framing('style = files("glassformer.report").joinpath("report.css")')


def declared_twice(function: Callable[..., None]) -> set[str]:
    """Parameters of a verb that a shared group of options declares."""
    shared = {field.name for kind in (options.TrainingOptions, options.ExecutorOptions) for field in fields(kind)}
    return shared & inspect.signature(function).parameters.keys()


def test_options_that_verbs_share_are_declared_once():
    verbs = (training.compare, training.train, laboratory.ablate, laboratory.scale, laboratory.run)
    assert {verb.__name__: declared_twice(verb) for verb in verbs if declared_twice(verb)} == {}
    assert declared_twice(lambda *, batch_size=16, workers=1: None) == {"batch_size", "workers"}


def test_pages_and_tables_of_values_are_written_by_their_bases():
    """A value gives `html()` and `records()`; `Reported` writes the page, and `Tabular` makes the DataFrame."""
    places = {
        (path.relative_to(SRC).as_posix(), method.name)
        for path in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name in ("report", "to_pandas")
    }
    assert places == {("figures/terminal.py", "report"), ("figures/terminal.py", "to_pandas")}
