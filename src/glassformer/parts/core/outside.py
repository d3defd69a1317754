"""Parts defined outside this package: they register when their module is imported, or are installed with a package that
names the module as an entry point of the group `glassformer.parts`."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from glassformer.errors import RequestError, shown

GROUP = "glassformer.parts"
FILE = "sources.json"
"""Name of the file that records the sources of parts from outside the package: {module: {file, sha256}}."""
LARGEST = 1 << 20
"""Maximum size in bytes of the file `sources.json` that is read."""
HOME = __name__.partition(".")[0]


@cache
def load_installed() -> tuple[str, ...]:
    """Imports the modules that installed packages name as entry points of the group `glassformer.parts`, once in a
    process, and returns the names of those modules. A module that fails to import is left out with a warning, because
    users may not need it."""
    names = []
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist else "an installed package"
            warnings.warn(f"{package} offers parts in {entry.value}, which cannot be imported: {shown(error, 200)}")
            continue
        names.append(entry.value)
    return tuple(names)


def is_outside(one: type) -> bool:
    """Returns True for a class that is defined outside this package."""
    return one.__module__.partition(".")[0] != HOME


def modules_of(classes: Iterable[type]) -> dict[str, str]:
    """Returns {module: folder that it is imported from} for the modules of the classes that are defined outside this
    package, so that another process can import them. Raises RequestError for a class that another process cannot find:
    one of a script, a notebook or a function."""
    found: dict[str, str] = {}
    for one in classes:
        name = one.__module__
        if not is_outside(one):
            continue
        file = getattr(sys.modules.get(name), "__file__", None)
        if name == "__main__" or file is None or "<locals>" in one.__qualname__:
            raise RequestError(
                f"{one.__qualname__} is defined in {name}, where another process cannot import it; put it into a file "
                "by itself and import that",
                code="unsupported", field="part", value=one.__qualname__,
            )  # fmt: skip
        depth = name.count(".") + (Path(file).name == "__init__.py")
        found[name] = str(Path(file).resolve().parents[depth])
    return found


SOURCES: dict[str, dict[str, str]] = {}
"""Module outside this package -> `file` and `sha256` of its source, as it was when it defined a part."""


def keep_source(one: type) -> None:
    """Records in `SOURCES` the file, and its hash, in which a class from outside this package is being defined."""
    file = getattr(sys.modules.get(one.__module__), "__file__", None)
    if is_outside(one) and file is not None and Path(file).is_file():
        sha = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        SOURCES[one.__module__] = {"file": str(Path(file).resolve()), "sha256": sha}


def sources_of(classes: Iterable[type]) -> dict[str, dict[str, str]]:
    """Returns the entries of `SOURCES` for the modules outside this package that define the classes or their bases."""
    modules = dict.fromkeys(base.__module__ for one in classes for base in one.__mro__)
    return {name: SOURCES[name] for name in modules if name in SOURCES}


def missing_imports(folder: Path) -> str:
    """Returns a clause for a message, with the options `--import` that would import the parts of the run or design in a
    folder; empty if all are imported.

    The folder's sources.json names the files of these parts, which are never imported unless the user asks."""
    try:
        if (folder / FILE).stat().st_size > LARGEST:
            return ""
        held = json.loads((folder / FILE).read_text(encoding="utf-8"))
        files = [str(source["file"]) for name, source in held.items() if name not in (*SOURCES, "__main__")]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ""
    return f"; it was made with {' '.join(f'--import {shown(file, 200)}' for file in files)}" if files else ""


@contextmanager
def naming_imports(folder: Path) -> Iterator[None]:
    """Context manager that appends `missing_imports(folder)` to a RequestError of the block inside."""
    try:
        yield
    except RequestError as problem:
        if not (missing := missing_imports(folder)):
            raise
        raise RequestError(
            f"{problem}{missing}",
            code=problem.code,
            field=problem.field,
            value=problem.value,
            expected=problem.expected,
        ) from problem


def check_sources(hashes: Mapping[str, str], start: str) -> None:
    """Raises RequestError if the source of a module outside this package differs from the hash recorded for it.
    `hashes`: {module: sha256}; `start`: the event at which they were recorded, for the message."""
    for name, sha in hashes.items():
        if name in SOURCES and SOURCES[name]["sha256"] != sha:
            raise RequestError(
                f"the parts in {name}, from {SOURCES[name]['file']}, have changed since {start}; name another folder",
                code="changed", field="part", value=name,
            )  # fmt: skip


def import_options(classes: Iterable[type]) -> list[str]:
    """Returns the arguments ["--import", file, ...] for a command that imports the files that define these classes
    outside this package; a script is left out."""
    files = [source["file"] for name, source in sources_of(classes).items() if name != "__main__"]
    return [word for file in files for word in ("--import", file)]


def import_files(paths: Iterable[str]) -> None:
    """Imports .py files, which registers the parts that they define. Raises RequestError for a file that cannot be
    imported."""
    for path in paths:
        file = Path(path).expanduser().resolve()
        if file.suffix != ".py" or not file.is_file():
            raise RequestError(
                f"--import {shown(path) or 'lacks a file'}: give a .py file that exists",
                code="missing", field="import", value=path, expected="a .py file",
            )  # fmt: skip
        name, folder = file.stem, file.parent
        while (folder / "__init__.py").is_file():  # in a package: under its name in Python
            name, folder = f"{folder.name}.{name}", folder.parent
        name = name.removesuffix(".__init__")
        import_modules({name: str(folder)})
        found = getattr(sys.modules[name], "__file__", None)
        if found is None or Path(found).resolve() != file:
            raise RequestError(
                f"--import {path}: {name} is the name of another module ({found}); rename the file",
                code="conflict", field="import", value=path,
            )  # fmt: skip


def import_modules(modules: Mapping[str, str]) -> None:
    """Imports the modules of the mapping that `modules_of` returned in another process, {module: folder}. Raises
    RequestError for a module that cannot be imported."""
    for name, folder in modules.items():
        if folder not in sys.path:
            sys.path.append(folder)  # last, because a user's file may have the name of a library's module
        try:
            import_module(name)
        except Exception as error:
            raise RequestError(
                f"the parts in {name}, from {folder}, cannot be imported: {shown(error, 200)}",
                code="missing", field="part", value=name,
            ) from error  # fmt: skip
