"""The house: arrows between rooms go one way, and what must never happen in the code."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from torch import nn

from glassformer.parts.core.base import _CLASSES, BuildContext, PartConfig
from glassformer.parts.core.heads import Heads
from glassformer.parts.core.init import Init
from glassformer.parts.embedding import EmbeddingConfig
from glassformer.parts.ffn import Router
from glassformer.parts.head import HeadConfig
from glassformer.parts.kernel import Kernel
from glassformer.parts.mixer import AttentionConfig
from glassformer.parts.mixer.attend import SoftmaxAttentionConfig
from glassformer.parts.norm import LayerNormConfig, NormConfig
from glassformer.parts.position.scaling import RotaryScaling
from glassformer.parts.projection import Projection, ProjectionConfig
from glassformer.parts.residual import ResidualConfig
from glassformer.parts.visibility import CausalConfig, LongformerConfig, SlidingWindowConfig, Visibility
from tools.imports import COMPUTED, SRC, dotted, files_used, imported, parsed, walk

LEVELS: list[set[str]] = [
    {"errors", "progress", "version", "thresholds"},
    {"files", "options", "typed", "units"},
    {"figures", "machine", "names"},
    {"parts"},
    {"model", "text"},
    {"config", "introspection"},
    {"architectures", "dynamics", "generation", "parallel", "register"},
    {"loaded"},
    {"conversion", "lens", "training"},
    {"naming"},
    {"runs"},
    {"report"},
    {"comparison", "planning", "retrieval"},
    {"laboratory", "serving"},
    {"agents"},
    {"studio"},
    {"cli"},
    {"__main__"},
]
"""A room may use its own files and rooms above it here."""

ONLY: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "files": {"errors"},
    "figures": {"files"},
    "parts": {"errors", "machine"},
    "model": {"errors", "parts"},
    "report": {"errors", "figures", "config", "runs", "thresholds"},
}
"""Room -> the rooms that it may use, for rooms that may use fewer than all below."""

RANK = {room: rank for rank, rooms in enumerate(LEVELS) for room in rooms}
FILES = sorted(SRC.rglob("*.py"))
TREES = {path: parsed(path) for path in FILES}


def named(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(SRC).with_suffix("").parts[0]


UNREAD = {"parts/core/outside.py"}
"""A run imports the modules of parts from outside: no rooms of this house."""


FACADE = "__init__"
"""The package itself, which reaches every room."""


def rooms_used(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, room) of all rooms that a file imports; FACADE for the package itself, also for `__file__`."""
    for line, name in imported(path, tree):
        steps = name.split(".")
        if steps[0] != "glassformer":
            continue
        if name == COMPUTED:
            if named(path) not in UNREAD:
                yield line, name
        else:
            room = steps[1] if len(steps) > 1 else FACADE
            yield line, room if room in RANK or (SRC / room).exists() else FACADE


def test_every_room_has_a_place():
    """A new folder or file at the top must be given its rank here, and one that is gone loses it."""
    assert {room_of(path) for path in FILES} - {"__init__"} == set(RANK)


def check_no_circle(top: Path) -> None:
    """Raises CycleError, which holds the circle."""
    facade = top / "__init__.py"  # imports lazily, by name
    graph = {path: set(files_used(path, top)) - {path, facade} for path in top.rglob("*.py") if path != facade}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("folder", ["src/glassformer", "benchmarks", "experiments"])
def test_no_files_import_each_other(folder: str):
    check_no_circle(SRC.parents[1] / folder)


@pytest.mark.parametrize(
    "line",
    [
        "from top.b import x",
        "import top.b",
        "from .b import x",
        "from . import b",
        "import_module('top.b')",
        "if TYPE_CHECKING: from top.b import x",
    ],
)
def test_a_circle_is_seen(line: str, tmp_path: Path):
    for name, text in {
        "__init__": "",
        "a": f"def f():\n    {line}\n",
        "b": "from top import c",
        "c": "import top.a",
    }.items():
        (tmp_path / "top").mkdir(exist_ok=True)
        (tmp_path / "top" / f"{name}.py").write_text(text)
    with pytest.raises(CycleError):
        check_no_circle(tmp_path / "top")


@cache
def bound(file: Path) -> set[str]:
    """Returns the names that a file binds; `*` if it computes them."""
    names: set[str] = set()
    for node in walk(parsed(file)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add("*" if node.name == "__getattr__" else node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


IMPORT = re.compile(r"^ *(from glassformer\S* import (?:\([^)]*\)|[^\n]*))", re.MULTILINE)


def missing(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of each import from this package that fails."""
    for found in IMPORT.finditer(text):
        node = ast.parse(found[1]).body[0]
        assert isinstance(node, ast.ImportFrom) and node.module
        place = SRC.parent.joinpath(*node.module.split("."))
        files = [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
        names = bound(files[0]) if files else set()
        for alias in node.names:
            inside = place / alias.name
            there = inside.with_suffix(".py").is_file() or inside.is_dir()
            if not (there or names & {alias.name, "*"} or (alias.name == "*" and files)):
                yield text.count("\n", 0, found.start()) + 1, f"{node.module}.{alias.name}"


def test_imports_of_tests_and_experiments_exist():
    """Tests and experiments follow each move in the house, even if no run imports them."""
    wrong = [
        f"{path.relative_to(SRC.parents[1])}:{line}: {name}"
        for folder in ("tests", "experiments", "benchmarks", "tools")
        for path in sorted((SRC.parents[1] / folder).rglob("*.py"))
        for line, name in missing(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "from glassformer.parts.nowhere import x",
        "from glassformer.errors import Nothing",
        "from glassformer.parts import x",
    ],
)
def test_import_of_a_missing_name_is_detected(line: str):
    assert list(missing(line))


MOST_SENTENCES = 60
"""The largest number of errors and warnings whose sentence a test holds, because the sentence is its subject."""


def test_few_tests_hold_a_sentence():
    """Words may change without a test that breaks: tests ask for code and field (`tests/refused.py`)."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((SRC.parents[1] / "tests").rglob("*.py"))}
    held = {path.name: len(found) for path, text in texts.items() if (found := re.findall(r"\bmatch[=]", text))}
    assert sum(held.values()) <= MOST_SENTENCES, held


def test_the_drawing_of_the_house_is_true():
    """docs/architecture.md draws the levels in this order, each with these rooms."""
    page = (SRC.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawing = page.split("```")[1].strip().splitlines()
    drawn = [set(re.split(r"\s{3,}", line)[0].split()) for line in drawing if line.strip() != "|"]
    assert drawn == LEVELS


def test_arrows_go_one_way():
    wrong = [
        f"{named(path)}:{line}: {room_of(path)} uses {used}"
        for path, tree in TREES.items()
        if (room := room_of(path)) != "__init__"  # it imports lazily, by name
        for line, used in rooms_used(path, tree)
        if used != room and (RANK.get(used, 99) >= RANK[room] or used not in ONLY.get(room, RANK))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "from glassformer.training import train",
        "from ..training import train",
        "import glassformer.cli",
        "import glassformer as gf; gf.train",
        "import glassformer; glassformer.ModelConfig",
        "import glassformer; Path(glassformer.__file__)",
        "from glassformer import train",
        "import_module('glassformer.cli')",
        "importlib.import_module(name)",
    ],
)
def test_an_arrow_that_runs_back_is_seen(line: str):
    used = {room for _, room in rooms_used(SRC / "parts" / "init.py", ast.parse(line))}
    assert used and all(RANK.get(room, 99) > RANK["parts"] for room in used)


def test_the_package_itself_imports_nothing_when_imported():
    """`glassformer/__init__` may name the rooms only for type checkers, or inside its lazy loader."""
    tree = TREES[SRC / "__init__.py"]
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {getattr(node, "module", None) or node.names[0].name for node in top}
    assert names <= {"__future__", "importlib", "typing"}


def test_a_public_class_name_is_borne_by_one_class():
    """A search for a name finds the class that is meant."""
    places: dict[str, list[str]] = {}
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{named(path)}:{node.lineno}")
    twins = [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]
    assert not twins, "\n".join(twins)


def test_an_init_file_names_and_does_nothing_else():
    """Under sixty lines, of imports, tables of names and a docstring; the package's own loads what it names lazily."""
    wrong = [
        f"{named(path)}: {len(path.read_text(encoding='utf-8').splitlines())} lines"
        for path in FILES
        if path.name == "__init__.py" and path.parent != SRC
        and (len(path.read_text(encoding="utf-8").splitlines()) >= 60 or any(
            isinstance(node, ast.FunctionDef | ast.ClassDef) for node in TREES[path].body))
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


ADAPTS = {"parts/mixer/installed.py": {"fla", "mamba_ssm"}}
"""Files that call optional libraries -> the libraries."""


def strangers(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of each import of a model's file that is neither torch nor an allowed library."""
    allowed = {
        "torch",
        "einops",
        "jaxtyping",
        "pydantic",
        "pydantic_core",
        "numpy",
        "glassformer",
        *sys.stdlib_module_names,
        *ADAPTS.get(named(path), ()),
    }
    for line, name in imported(path, tree):
        far = name.startswith(("torch.distributed", "torch.optim", "torch.utils.data"))
        if far or name.split(".")[0] not in allowed:
            yield line, name
    for node in walk(tree):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if name.startswith(("torch.distributed", "torch.optim", "dist.")):
                yield node.lineno, name


def test_models_know_no_trainer_no_cluster_and_no_library():
    wrong = [
        f"{named(path)}:{line}: {name}"
        for path, tree in TREES.items()
        if room_of(path) in ("parts", "model")
        for line, name in strangers(path, tree)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "import fla",
        "from torch.optim import Adam",
        "torch.distributed.barrier()",
        "dist.barrier()",
        "import torch.optim",
    ],
)
def test_forbidden_import_in_a_model_is_detected(line: str):
    assert list(strangers(SRC / "parts" / "init.py", ast.parse(line)))


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in walk(tree):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


def dangers(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of each call that unpickles, evaluates or runs text that may come from outside."""
    roots = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "code", "codeop"}
    full = {"torch.load", "torch.hub", "numpy.load", "builtins.eval", "builtins.exec"}
    called = {"eval", "exec", "__import__", "torch.load", "torch.jit.load", "torch.hub.load", "builtins.eval"}
    called |= {"os.system", "os.popen", "yaml.unsafe_load", "yaml.full_load"}
    for line, name in imported(path, tree):
        if name in full or name.split(".")[0] in roots:
            yield line, name
    for name, call in calls(tree):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name in called:
            yield call.lineno, name
        for argument in ("allow_pickle", "shell", "trust_remote_code"):
            if given.get(argument) not in (None, "False"):
                yield call.lineno, f"{name}({argument}={given[argument]})"
        if name == "yaml.load":
            loader = given.get("Loader") or (ast.unparse(call.args[1]) if len(call.args) > 1 else "")
            if loader not in {"_NoAliases", "yaml.SafeLoader"}:
                yield call.lineno, f"{name} with {loader or 'no loader'}"


def test_nothing_is_unpickled_or_evaluated():
    wrong = [f"{named(path)}:{line}: {what}" for path, tree in TREES.items() for line, what in dangers(path, tree)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from code import interact",
        "from torch import load",
        "eval(text)",
        "torch.load(path)",
        "os.system(line)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(line, shell=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=trusted)",
        "yaml.load(text)",
        "yaml.load(text, yaml.Loader)",
    ],
)
def test_unpickling_and_evaluation_are_detected(line: str):
    assert list(dangers(SRC / "parts" / "init.py", ast.parse(line)))


OUTSIDE = ("../", "/home/", *(f"{place}/" for place in (Path.home(), Path(tempfile.gettempdir()), SRC.parents[1])))
"""Beginnings of places that only one computer has."""


def places(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, word) of each place outside the package that a text names."""
    if any(word in text for word in OUTSIDE):
        for i, line in enumerate(text.splitlines(), 1):
            yield from ((i, word) for word in OUTSIDE if word in line)


def test_nothing_names_a_place_outside_the_package():
    """The installed package must make sense without the repository."""
    wrong = [
        f"{named(path)}:{line}: {word}"
        for path in sorted(SRC.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
        for line, word in places(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_place_outside_is_seen():
    assert list(places(f'one\nroot = "{SRC.parents[1]}/docs"')) and [line for line, _ in places("a\nb ../c")] == [2]


# What changes while models run

HOLDS_A_THREAD = "parts/core/running.py"
"""The one file of parts with a value that changes while models run: a frozen one for each thread."""
BY_THREAD = {"local", "ContextVar"}


def changing(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of each changing value of a module: a `global` name, a lower-case variable at its top that is
    bound twice, a value by thread."""
    bound_at_top: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from ((node.lineno, name) for name in node.names)
        called = node.func if isinstance(node, ast.Call) else None
        for one in [called] if called is not None else getattr(node, "bases", ()):
            if getattr(one, "attr", getattr(one, "id", "")) in BY_THREAD:
                yield node.lineno, ast.unparse(one)
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for name in (one.id for one in targets if isinstance(one, ast.Name)):
            if name.islower() and (name in bound_at_top or isinstance(node, (ast.AugAssign, ast.For))):
                yield node.lineno, name
            bound_at_top.add(name)


def test_parts_keep_one_value_that_changes():
    """Two threads that run one model at once must not see what the other enters."""
    wrong = [
        f"{named(path)}:{line}: {name}"
        for path in FILES
        if room_of(path) in ("parts", "model", "introspection") and named(path) != HOLDS_A_THREAD
        for line, name in changing(TREES[path])
    ]
    assert not wrong, "a field of `Running`: " + "; ".join(wrong)
    assert list(changing(TREES[SRC / HOLDS_A_THREAD]))


@pytest.mark.parametrize(
    "text",
    [
        "count = 0\ndef f():\n    global count\n    count += 1",
        "count = 0\ncount = 1",
        "count = 0\ncount += 1",
        "now = threading.local()",
        "class Held(threading.local): ...",
        "now = ContextVar('now')",
    ],
)
def test_a_value_that_changes_is_seen(text: str):
    assert list(changing(ast.parse(text)))


# Questions to the device or the compiler are asked in files of fast twins, not in the math

OPERATORS = {
    "memory.py": "pages that a CPU's system gives as they are written",
    "precision.py": "dtypes that devices have, and the questions that several parts share",
    "region.py": "compiles elementwise bodies",
    "grouped.py": "products of oneDNN, and sizes that a compiler cannot follow",
    "quantized.py": "each device packs weights in its own way",
    "ffn/fused_activation.py": "the fast twins of activations",
    "norm/fused_layer_norm.py": "the compiled twin of LayerNorm",
    "position/turn.py": "the fast twins of rotations",
    "mixer/chunked.py": "recurrences as operators of torch",
    "mixer/installed.py": "kernels of other libraries",
    "kernel/auto.py": "chooses a kernel",
    "kernel/base.py": "the facts of a call that choose a kernel",
    "kernel/direct.py": "blocks whose number a compiler cannot follow",
    "few_rows.py": "is machine code for one kind of processor",
    "many_rows.py": "is machine code for processors that are slow in bf16",
    "fused_loops.py": "is machine code for steps in fp32 on a CPU",
    "fused_products.py": "is machine code for steps in fp32 on a CPU",
    "kernel/flex.py": "needs a compiler",
    "kernel/sdpa.py": "torch has another algorithm for each device",
    "kernel/table.py": "chooses a kernel by measurements of a device",
    "core/cost.py": "what dropout keeps depends on the device",
    "core/init.py": "draws in place on CPUs",
}
"""Files of parts that may ask for the device or the compiler, and why."""
ASKS = {
    "is_compiling", "is_dynamo_compiling", "compiling_regions", "is_cuda", "is_cpu", "is_mps", "is_autocast_enabled",
    "is_autocast_cpu_enabled", "get_autocast_dtype", "slow_in_bf16", "packs_bf16", "onednn_in_bf16", "mkldnn",
    "_dynamo",
}  # fmt: skip
DEVICES = {"cpu", "cuda", "mps", "xpu", "meta"}


def device_questions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of each question to the device, the compiler or the clock."""
    for node in walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "type" and ast.unparse(node.value).endswith("device"):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            if (name := getattr(node, "attr", getattr(node, "id", ""))) in ASKS:
                yield node.lineno, name
        elif isinstance(node, ast.Compare):
            found = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
            yield from ((node.lineno, name) for name in DEVICES & found)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {getattr(node, "module", None) or "", *(alias.name for alias in node.names)}
            yield from ((node.lineno, name) for name in names if name == "time" or ".machine" in name)


def test_math_asks_neither_device_nor_compiler():
    asking: dict[str, list[str]] = {}
    for path in FILES:
        if room_of(path) in ("parts", "model") and (found := list(device_questions(TREES[path]))):
            asking[named(path).removeprefix("parts/")] = [f"line {line}: {what}" for line, what in found]
    wrong = {name: lines for name, lines in asking.items() if name not in OPERATORS}
    assert not wrong, f"ask in a separate file of the fast twin: {wrong}"
    assert set(OPERATORS) == set(asking), "only files that ask are exceptions"


@pytest.mark.parametrize(
    "line",
    [
        "import time",
        "from time import perf_counter",
        "from glassformer.machine.device import bf16_gain",
        "fast = x.device.type == kind",
        "fast = device == 'cuda'",
        "fast = kind in ('cuda', 'xpu')",
        "fast = torch.compiler.is_compiling()",
        "fast = compiling_regions()",
    ],
)
def test_a_question_to_the_device_is_seen(line: str):
    assert list(device_questions(ast.parse(line)))


# Capability: outside parts and families, a part is asked what it can do, never what it is

AXES = sorted(folder.name for folder in (SRC / "parts").iterdir() if (folder / "__init__.py").exists())
DEFINED = [
    (path.parent.name, node.name)
    for path, tree in TREES.items()
    if room_of(path) == "parts"
    for node in walk(tree)
    if isinstance(node, ast.ClassDef)
]
CHOICES = {name for folder, name in DEFINED if folder in AXES or name.endswith("Config")}
CHOICES -= {name for folder, name in DEFINED if folder not in AXES and not name.endswith("Config")} | {"PartConfig"}
"""Names of classes of a single choice: those of an axis' folder, and every config."""
PART_NAMES = {*AXES, "block", "embedding", "head", "layer", "module", "part", "reparam", "scaling", "wiring"}
"""Names of variables that hold a part."""
ASKED_FREELY = {
    ("parts/building.py", "getattr"): "init_weights and reset_parameters are optional methods of any module",
    ("config.py", "getattr"): "shows every field of a part's config",
    ("training/optimizers/muon.py", "getattr"): "any module may declare the roles of its weight",
    ("conversion/family.py", "AttentionConfig"): "narrows a block for the families, its only users",
    ("conversion/family.py", "ExpertsConfig"): "narrows a block for the families, its only users",
    ("conversion/gguf.py", "AttentionConfig"): "llama.cpp's fields are those of attention",
    ("conversion/gguf.py", "RotaryConfig"): "llama.cpp's fields are those of rotary positions",
    ("conversion/gguf.py", "Llama3ScalingConfig"): "llama.cpp has a separate table for this scaling",
    ("conversion/gguf.py", "LongRopeScalingConfig"): "llama.cpp has a separate table for this scaling",
    ("conversion/rope.py", "RotaryConfig"): "transformers' fields are those of rotary positions",
}
"""(file, what it asks) -> why it may."""


def asked(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of each question by class or attribute name that the part should answer."""
    for node in walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            words = {getattr(one, "id", getattr(one, "attr", "")) for one in ast.walk(node.args[0])}
            if node.func.id in ("getattr", "hasattr") and words & PART_NAMES:
                yield node.lineno, node.func.id
            kinds = node.args[1] if node.func.id in ("isinstance", "issubclass") else None
        elif isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type("):
            kinds = node.comparators[0]
        else:
            continue
        for one in ast.walk(kinds) if kinds is not None else ():
            name = getattr(one, "id", getattr(one, "attr", ""))
            if name in CHOICES:
                yield node.lineno, name


def test_parts_are_queried_by_methods_not_types():
    """No `isinstance(x, AttentionConfig)`, no `getattr(mixer, "visibility", None)`: such a question assumes an answer
    that an unknown part did not give."""
    wrong = [
        f"{named(path)}:{line}: {what}"
        for path, tree in TREES.items()
        if room_of(path) != "parts" and path.parent.name != "families"
        for line, what in asked(tree)
        if (named(path), what) not in ASKED_FREELY
    ]
    assert not wrong, "add a question to the axis' base class:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("isinstance(block.mixer, AttentionConfig)", "AttentionConfig"),
        ("isinstance(module, (mixers.Mamba, int))", "Mamba"),
        ("type(block.residual) is PostConfig", "PostConfig"),
        ('getattr(layer.mixer, "visibility", None)', "getattr"),
        ("hasattr(block.ffn, name)", "hasattr"),
    ],
)
def test_a_question_by_class_or_name_is_seen(line: str, what: str):
    assert [found for _, found in asked(ast.parse(line))] == [what]


def test_every_exception_is_used():
    used = {(named(path), what) for path, tree in TREES.items() for _, what in asked(tree)}
    assert set(ASKED_FREELY) <= used


# What is read as one formula


def statements(path: str, method: str) -> list[ast.stmt]:
    """Returns the statements of a method, `Class.name`, without its docstring."""
    of, name = method.split(".")
    classes = (node for node in TREES[SRC / path].body if isinstance(node, ast.ClassDef) and node.name == of)
    found = next(
        node for cls in classes for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return found.body[ast.get_docstring(found) is not None :]


def test_a_block_is_three_lines():
    """Its wiring joins a mixer and an FFN. Code of parallelism, experts and losses is in their own files."""
    *made, last = statements("model.py", "Block.forward")
    assert len(made) <= 2 and all(isinstance(node, ast.Assign) for node in made), [*map(ast.unparse, made)]
    assert ast.unparse(last) == "return self.resid_post(self.residual(self.resid_pre(x), mixer, ffn))"


def test_the_arguments_of_a_model_are_written_once():
    """`Model.forward` names them all; inside, they travel as one `Inputs`."""
    found = [
        f"{named(path)}: {node.name}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and {"source_documents", "segments"} <= {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
    ]
    assert found == ["model.py: forward"]


# The kernels of the models compute attention


def test_every_kernel_is_a_choice():
    """Each kernel of the parts is a choice that a config builds, or refuses to, and that tests compare with `naive`."""
    classes = [node for path, tree in TREES.items() if "kernel" in path.parts for node in ast.walk(tree)]
    names = {node.name for node in classes if isinstance(node, ast.ClassDef)}
    kernels = {
        node.name for node in classes if isinstance(node, ast.ClassDef) and "Kernel" in map(ast.unparse, node.bases)
    }
    assert kernels >= {"Naive", "Sdpa", "Banded"} and {f"{name}Config" for name in kernels} <= names


# A decode state is written by its own methods

STATE_FIELDS = {"length", "rows", "seen", "read", "documents", "positions"}
OTHER_FIELDS = {
    ("conversion/fields.py", "seen"): "fields of a file that a family has read",
    ("parts/mixer/chunked.py", "length"): "the context of an autograd function",
    ("parts/mixer/cross_attention.py", "documents"): "the state of a memory, made by its own `over`",
    ("parts/mixer/delta.py", "length"): "the context of an autograd function",
    ("runs/slurm.py", "read"): "how much of a file has been shown",
    ("training/callbacks/log.py", "rows"): "the metrics of a run",
    ("training/callbacks/watch.py", "seen"): "the statistics of a run",
}
"""(file, field) -> whose field of that name is written there."""


def state_writes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, field) of each assignment to a field of a decode state, or into it, except those to `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            place = node.value if isinstance(node, ast.Subscript) else node
            if isinstance(place, ast.Attribute) and place.attr in STATE_FIELDS and ast.unparse(place.value) != "self":
                yield node.lineno, place.attr


def test_a_decode_state_is_written_by_its_own_methods():
    found = [
        (named(path), field, line)
        for path, tree in TREES.items()
        if path.name != "state.py"
        for line, field in state_writes(tree)
    ]
    wrong = [f"{path}:{line}: {field}" for path, field, line in found if (path, field) not in OTHER_FIELDS]
    assert not wrong, "give ModelState a method: " + ", ".join(wrong)
    assert {(path, field) for path, field, _ in found} == set(OTHER_FIELDS)


@pytest.mark.parametrize(
    "line", ["state.length = 3", "state.length += 1", "self.state.rows = None", "layer.read = 2", "a.rows[0] = 1"]
)
def test_a_write_into_a_decode_state_is_seen(line: str):
    assert list(state_writes(ast.parse(line)))


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SRC.parent)}
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )


HELP = """
import sys
from glassformer.__main__ import entry
for words in ("--help", "--version", "train --help", "compare --help"):
    sys.argv = ["glassformer", *words.split()]
    try:
        entry()
    except SystemExit as leaving:
        assert not leaving.code, (words, leaving.code)
    heavy = {"torch", "numpy", "pandas", "transformers", "datasets", "tokenizers", "jaxtyping"} & set(sys.modules)
    assert not heavy, (words, heavy)
"""


def test_help_imports_no_torch():
    done = python(HELP)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout or "usage" in done.stdout


def test_importing_the_package_imports_no_torch():
    done = python("import sys, glassformer; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


def test_pages_import_no_torch():
    """Reports read files: they use only the types of runs."""
    done = python("import sys, glassformer.report; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


# Parts: every registered config builds at its defaults, and its module speaks of the same things

CTX = BuildContext(
    d_model=16, vocab_size=11, context=32, n_layers=2, outs=(16, 16), n_heads=4, n_kv_heads=2, head_dim=8,
    norm=LayerNormConfig(),
)  # fmt: skip
CTX.offer(("keys", "kv"), (4, 4, CausalConfig(), None))
NEEDED = {
    "attention": {"n_heads": 4},
    "shared_attention": {"n_heads": 4},
    "cross_attention": {"n_heads": 4},
    "beside": {"mixers": ("mamba", "s4")},
    "latent_attention": {"n_heads": 4},
    "global_attention": {"n_heads": 4, "visibility": LongformerConfig(window=4, causal=False)},
    "sliding_window": {"window": 3},
    "longformer": {"window": 4},
    "bigbird": {"block": 3},
    "dilated": {"window": 3, "rate": 2},
    "chunked": {"chunk": 3},
    **{kind: {"factor": 2.0} for kind in ("linear", "ntk", "dynamic_ntk", "yarn", "llama3")},
    "longrope": {"factor": 2.0, "short": (1.0, 1.0), "long": (2.0, 2.0)},
}
"""Fields without a default."""


def own(cls: type[PartConfig]) -> bool:
    return cls.__module__.startswith("glassformer.parts.")


PARTS = sorted((cls for cls in _CLASSES if own(cls)), key=lambda cls: (cls.axis, cls.kind))


def built(config: PartConfig) -> object:
    if isinstance(config, ProjectionConfig):
        return config.build(CTX)(Heads(CTX.n_heads, CTX.n_kv_heads, CTX.head_dim), None)
    return config.build(CTX)


def part_name(cls: type[PartConfig]) -> str:
    return f"{cls.axis}.{cls.kind}"


@pytest.mark.parametrize("cls", PARTS, ids=part_name)
def test_every_registered_part_builds_at_its_defaults(cls: type[PartConfig]):
    config = cls(**NEEDED.get(cls.kind, {}))
    made = built(config)
    assert isinstance(made, (nn.Module, Init, RotaryScaling, Kernel, Visibility, Projection))
    if isinstance(made, nn.Module):
        assert config.num_params(CTX) == sum(p.numel() for p in made.parameters())


FROM_THE_MODEL = {
    "d_model", "vocab_size", "width", "sets", "n_heads", "head_dim", "length", "hidden",
    "in_features", "outs", "reparam", "heads", "clip", "value_dim", "layer", "feeds_products",
}  # fmt: skip
"""Constructor arguments that a config may leave to the model around it."""
ELSEWHERE = {
    "rotary": {"dim"},  # `fraction` of the head
    "alibi": {"scale"},  # only if `scaled`
    "relative_bias": {"table"},  # the table of `buckets` rows
    "latent_attention": {"q_norm", "kv_norm"},  # both from `norm`
    "experts": {"router", "shared"},  # separate parts
}
NOT_ARGUMENTS = {
    "head": {"labels"},  # names for a reader, no tensor depends on them
    "attention": {"clip", "value_dim"},  # its projection's
    "global_attention": {"clip", "value_dim"},
    "rotary": {"fraction"},
    "glu": {"multiple_of"},
    "alibi": {"scaled"},
    "relative_bias": {"buckets", "shared"},  # the table's, and whose it is
    "latent_attention": {"norm"},
    "identity": {"eps"},  # without a quotient
    "pre": {"mixer_normed"},  # a norm is given, or none
    "parallel": {"shared_norm"},  # one norm is given, or two
    "experts": {"n_shared", "shared_hidden", "router_bias", *inspect.signature(Router).parameters},
    "retention": {"lightning"},  # what its decays are in this layer
}


@pytest.mark.parametrize("cls", [cls for cls in PARTS if cls.axis not in ("init", "rotary_scaling")], ids=part_name)
def test_config_and_constructor_agree(cls: type[PartConfig]):
    module = type(built(cls(**NEEDED.get(cls.kind, {}))))
    given = {} if module.__init__ is object.__init__ else dict(inspect.signature(module.__init__).parameters)
    given.pop("self", None)
    fields = cls.model_fields
    norms = {name for name in given if name.endswith("norm")} if issubclass(cls, ResidualConfig) else set()
    assert set(given) - set(fields) <= FROM_THE_MODEL | ELSEWHERE.get(cls.kind, set()) | norms
    derived = {"depth_scaled"} if issubclass(cls, ResidualConfig) else set()  # what it is given is the scale
    assert set(fields) - set(given) <= NOT_ARGUMENTS.get(cls.kind, set()) | derived
    for name in set(given) & set(fields):
        mine, theirs = given[name].default, fields[name].get_default(call_default_factory=True)
        if mine is inspect.Parameter.empty or fields[name].is_required() or theirs is None or mine is None:
            continue  # required somewhere, or left to the model
        if isinstance(theirs, ProjectionConfig):
            theirs = theirs.build(CTX)
            theirs = theirs.func if isinstance(theirs, partial) else theirs
        assert mine == theirs, f"{name}: {mine!r} in the constructor, {theirs!r} in the config"


def test_softmax_attention_answers_once():
    """Answers that follow from heads, visibility, position and kernel only are in one config."""
    family = [cls for cls in PARTS if cls.axis == "mixer" and "kernel" in cls.model_fields]
    assert len(family) >= 6 and all(issubclass(cls, SoftmaxAttentionConfig) for cls in family)
    shared = {"check_training", "takes_prefix", "_call_keeps", "_out_bias", "_scale", "_state_cost", "_within"}
    again = {cls.kind: shared & vars(cls).keys() for cls in family}
    assert shared <= vars(SoftmaxAttentionConfig).keys() and not any(again.values()), again


def test_the_table_of_parts_is_whole():
    """A kind that disappears breaks files; one that is added is entered here."""
    expected = {
        "embedding": "embedding",
        "ffn": "expert_choice experts glu mlp",
        "head": "head",
        "init": "deepnorm gpt2 small xavier",
        "kernel": "auto banded direct flex naive sdpa",
        "mixer": "attention conv cross_attention gated_deltanet global_attention gru latent_attention linear_attention "
        "linformer lstm mamba mamba2 performer retention rglru s4 shared_attention xl_memory",
        "norm": "batchnorm identity layernorm rmsnorm",
        "position": "alibi learned relative_bias rotary sinusoidal temperature",
        "projection": "cross fused separate",
        "reparam": "sigma",
        "residual": "deepnorm no_residual normed parallel post pre res_post sandwich",
        "rotary_scaling": "dynamic_ntk linear llama3 longrope ntk yarn",
        "visibility": "bidirectional bigbird causal chunked dilated longformer prefix sliding_window",
    }
    kinds = {(axis, kind) for axis in expected for kind in expected[axis].split()}
    assert {(cls.axis, cls.kind) for cls in PARTS} == kinds | {("mixer", "beside")}
    assert AttentionConfig.kind == "attention" and SlidingWindowConfig.kind == "sliding_window"
    assert EmbeddingConfig.kind == "embedding" and HeadConfig.kind == "head" and NormConfig.kind == ""


JSON_ELSEWHERE = {"cli/verbs/planning.py", "cli/program.py"}
"""Files of the command line that write JSON themselves: schema, which is JSON with --json and without; and the program,
which writes an error before anything heavy is imported."""


def writers_of_json(trees: dict[Path, ast.Module]) -> set[str]:
    """Returns the names of the files that call `dumps`."""
    return {
        named(path)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "dumps"
    }


def test_the_command_line_prints_values_in_one_place():
    """`show` in cli/show.py prints a value as text or JSON; a verb parses and calls."""
    inside = {path: tree for path, tree in TREES.items() if room_of(path) == "cli"}
    assert writers_of_json(inside) - JSON_ELSEWHERE == {"cli/show.py"}


@pytest.mark.parametrize("line", ["json.dumps(x)", "print(dumps({}))"])
def test_a_second_printer_of_json_is_seen(line: str):
    assert writers_of_json({SRC / "cli" / "new.py": ast.parse(line)}) == {"cli/new.py"}
