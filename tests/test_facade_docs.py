"""Public names are documented to a standard that a tool checks (numpydoc), and each example runs."""

from __future__ import annotations

import ast
import doctest
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer.comparison import experiment
from glassformer.figures.terminal import Reported, Tabular
from glassformer.runs import executor
from tests.runs.stand_in import AT_ONCE

CODES = ("GL03", "GL06", "GL07", "GL08", "SS01", "SS03", "SS06", "PR01", "PR02", "PR03", "PR07", "RT01", "RT03", "YD01")
"""Checks of numpydoc.validate that must pass: https://numpydoc.readthedocs.io/en/latest/validation.html"""
HOOKS = {"Callback"}
"""Classes whose methods a user writes: the example of the class shows them."""
TEXT = "Once upon a time there was a king who had three daughters, and each of them asked for a different story.\n"


def defined(cls: type) -> Iterator[tuple[str, Any]]:
    """Yields (name, member) of the public members that a class defines itself."""
    for name, member in vars(cls).items():
        if not name.startswith("_") and (
            inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod)
        ):
            yield name, member


def home(cls: type, name: str) -> type:
    """Returns the class whose docstring of a member counts: of an override with a line at most, its base in the
    package, if the parameters are the same."""
    member = vars(cls)[name]
    if "\n" in (member.__doc__ or ""):
        return cls
    owners = [one for one in cls.__mro__ if name in vars(one) and one.__module__.startswith("glassformer.")]
    return owners[-1] if parameters(vars(owners[-1])[name]) == parameters(member) else cls


def parameters(member: Any) -> list[str]:
    return list(inspect.signature(member).parameters) if inspect.isfunction(member) else []


def public() -> Iterator[tuple[str, Any, type | None]]:
    """Yields (dotted name, object, class that documents it) of what `gf` makes public, each once."""
    found: dict[str, tuple[Any, type | None]] = {}
    for name in gf.__all__:
        one = getattr(gf, name)
        if inspect.ismodule(one):
            continue
        found[f"{one.__module__}.{one.__qualname__}"] = one, None
        if inspect.isclass(one):
            for member, _ in defined(one):
                cls = home(one, member)
                found[f"{cls.__module__}.{cls.__qualname__}.{member}"] = vars(cls)[member], cls
    yield from ((path, *held) for path, held in found.items())


def test_docstrings_pass_numpydoc() -> None:
    validate = pytest.importorskip("numpydoc.validate").validate
    faults = []
    for path, one, _ in public():
        codes = [code for code in CODES if not (inspect.isclass(one) and code == "PR01")]
        found = [f"{code} {text}" for code, text in validate(path)["errors"] if code in codes]
        faults += [f"{path}: {fault}" for fault in found]
    assert not faults, "\n".join(faults)


def test_functions_and_methods_have_an_example() -> None:
    missing = [
        path
        for path, one, cls in public()
        if not isinstance(one, property) and (cls is None or cls.__name__ not in HOOKS) and ">>>" not in documented(one)
    ]
    assert not missing, "\n".join(missing)


def test_a_short_override_is_documented_by_its_base() -> None:
    assert home(gf.Comparison, "html") is Reported and home(gf.Scaling, "records") is Tabular
    assert home(gf.Comparison, "without_notes") is gf.Comparison
    other = type("Other", (Reported,), {"report": lambda self, path, command: path})
    assert home(other, "report") is other, "a parameter that the base has not"


def documented(one: Any) -> str:
    return inspect.getdoc(getattr(one, "__func__", one)) or ""


def test_fields_are_documented() -> None:
    """By a docstring below the field, or in the Attributes or Parameters of its class."""
    missing = []
    for name in gf.__all__:
        cls = getattr(gf, name)
        if not inspect.isclass(cls):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        following = [*body.body[1:], ast.Pass()]
        for field, after in zip(body.body, following, strict=True):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            has = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            listed = f"\n{field.target.id} : " in documented(cls) or f"\n{field.target.id}\n" in documented(cls)
            if not field.target.id.startswith("_") and not has and not listed:
                missing.append(f"{name}.{field.target.id}")
    assert not missing, "\n".join(missing)


def examples() -> list[tuple[str, list[Any]]]:
    """Returns (name, objects): a function, or a class and its methods, whose examples continue the class's."""
    held = [(one, cls) for _, one, cls in public()]
    bases = dict.fromkeys(cls for _, cls in held if cls is not None)
    found = {one.__name__: [one] for one, cls in held if cls is None}
    for base in bases:
        found[base.__name__] = [base, *(one for one in vars(base).values() if (one, base) in held)]
    return list(found.items())


@pytest.mark.parametrize(("name", "objects"), [pytest.param(n, o, id=n) for n, o in examples()])
def test_examples_run(name: str, objects: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "Local", lambda *_: AT_ONCE)
    monkeypatch.setattr(experiment, "Local", lambda *_: AT_ONCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny.txt").write_text(TEXT * 400, encoding="utf-8")
    known: dict[str, Any] = {"gf": gf, "torch": torch, "Path": Path}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for one in objects:
        test = doctest.DocTestParser().get_doctest(documented(one), known, name, None, 0)
        report: list[str] = []
        runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
        runner.run(test, out=report.append, clear_globs=False)
        known = test.globs
        assert runner.failures == 0, "".join(report)
