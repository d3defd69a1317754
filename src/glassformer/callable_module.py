"""Modules that are called by the name of their main function: `gf.train(...)` and `glassformer.train.loop` both work.

A submodule becomes an attribute of its package when it is imported, and would hide a function of the same name.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """glassformer.train(...) is glassformer.train.train(...)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._main(*args, **kwargs)

    @property
    def _main(self) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._main)


def make_callable(name: str) -> None:
    """Call at the end of a module, with its `__name__`."""
    sys.modules[name].__class__ = CallableModule
