"""Fast copies of a module on the meta device, in a fifth of the time that building it takes."""

from __future__ import annotations

import copy
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.parts.core.base import Value
from glassformer.parts.core.shard import Shard

ATOMS = (bool, int, float, str, type(None), torch.dtype, FunctionType, BuiltinFunctionType, Value, Shard)


class ModuleTemplate:
    """Template of a module: `make()` returns a copy like `copy.deepcopy(module)`, which shares only immutable values.

    For modules on the meta device, because a large model has many equal layers: the template examines the module once,
    and torch's `nn.Module.__init__` and `__setattr__` do not run again."""

    def __init__(self, module: nn.Module):
        self._root = id(module)
        self._forms = [_Form(one) for one in module.modules()]

    def make(self) -> nn.Module:
        memo: dict[int, Any] = {form.id: object.__new__(form.kind) for form in self._forms}
        for form in self._forms:
            made = memo[form.id].__dict__
            made.update(form.shared)
            for name, kind in form.empty:
                made[name] = kind()
            for name, tensors in form.tensors:
                made[name] = {key: _like(tensor, memo) for key, tensor in tensors.items()}
            if form.children:
                made["_modules"] = {key: memo.get(child) for key, child in form.children}
            for name, value in form.others:
                made[name] = copy.deepcopy(value, memo)
        return memo[self._root]


class _Form:
    """Contents of one module inside a template, grouped by the way that a copy gets them (shared, new and empty,
    copied)."""

    def __init__(self, module: nn.Module):
        self.module, self.id, self.kind = module, id(module), type(module)
        self.children = [(key, id(child)) for key, child in module._modules.items()]
        self.shared: dict[str, Any] = {}
        self.empty: list[tuple[str, type]] = []
        self.tensors: list[tuple[str, dict[str, Tensor | None]]] = []
        self.others: list[tuple[str, Any]] = []
        for name, value in module.__dict__.items():
            if name == "_modules" and value:
                continue
            if _never_changes(value):
                self.shared[name] = value
            elif not value and type(value).__module__ in ("builtins", "collections"):
                self.empty.append((name, type(value)))
            elif name in ("_parameters", "_buffers"):
                self.tensors.append((name, value))
            else:
                self.others.append((name, value))


def _never_changes(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_never_changes, value))
    return isinstance(value, ATOMS)


def _like(tensor: Tensor | None, memo: dict[int, Any]) -> Tensor | None:
    if tensor is None:
        return None
    if id(tensor) not in memo:
        made = tensor.detach()  # has no storage that two copies could share
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return memo[id(tensor)]
