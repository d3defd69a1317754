"""Parts outside this package: they register when their module is imported, or are installed with a package that names
the module as an entry point of the group `glassformer.parts`."""

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
"""File with the sources of parts from outside the package: {module: {file, sha256}}."""
LARGEST = 1 << 20
"""Bytes of this file at most."""
HOME = __name__.partition(".")[0]


@cache
def load_installed() -> tuple[str, ...]:
    """Imports the modules of the group's entry points, once in a process, and returns their names. A module that fails
    to import is left out with a warning, because users may not need it."""
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
    """Returns {module: folder of its import} of the classes from outside this package, for another process to import.
    Raises RequestError for a class that another process cannot find: one of a script, a notebook or a function."""
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
    """Keeps the hash of the file in which a class from outside this package is being defined."""
    file = getattr(sys.modules.get(one.__module__), "__file__", None)
    if is_outside(one) and file is not None and Path(file).is_file():
        sha = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        SOURCES[one.__module__] = {"file": str(Path(file).resolve()), "sha256": sha}


def sources_of(classes: Iterable[type]) -> dict[str, dict[str, str]]:
    """Returns the sources of the modules outside this package that define the classes or their bases."""
    modules = dict.fromkeys(base.__module__ for one in classes for base in one.__mro__)
    return {name: SOURCES[name] for name in modules if name in SOURCES}


def missing_imports(folder: Path) -> str:
    """Returns a clause with the options that import the parts of a run or design; empty if all are imported.

    The sources.json in its folder names their files, which are never imported without being asked for."""
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
    """Adds to a refusal of the files in a folder the options that import their parts, if any are missing here."""
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
    """Raises RequestError if a module that is imported here has another source than the one hashed. `start` names the
    event at which it was hashed."""
    for name, sha in hashes.items():
        if name in SOURCES and SOURCES[name]["sha256"] != sha:
            raise RequestError(
                f"the parts in {name}, from {SOURCES[name]['file']}, have changed since {start}; name another folder",
                code="changed", field="part", value=name,
            )  # fmt: skip


def import_options(classes: Iterable[type]) -> list[str]:
    """Returns the words of a command that import the files of the classes from outside this package, but no script."""
    files = [source["file"] for name, source in sources_of(classes).items() if name != "__main__"]
    return [word for file in files for word in ("--import", file)]


def import_files(paths: Iterable[str]) -> None:
    """Imports .py files, which registers their parts. Raises RequestError."""
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
    """Imports the modules that `modules_of` named in another process. Raises RequestError."""
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
