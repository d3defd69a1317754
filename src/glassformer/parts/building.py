"""Initial weights of a model: filling of all tensors, and drawing of single rows without building the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from glassformer.errors import RequestError, check_seed
from glassformer.parts.core.init import Init, Numbers, key_of, storage_of


def fill(module: nn.Module, init: Init, path: str = "") -> None:
    """Fills the parameters and buffers of a module on the CPU with their initial values; `path` is the module's path in
    the model.

    Calls every module's `init_weights(init)`, parents first, and torch's `reset_parameters` for values that are still
    unfilled. Raises RequestError for a module that has uninitialised values and neither method."""
    held = dict(_tensors(module, path))
    init = replace(init, names={storage_of(tensor): name for name, tensor in reversed(held.items())})
    with _all_filled(module, held, init, path):
        for name, init_weights in _filling(module, path):
            init_weights(init.at(name))


class InitialWeights:
    """Initial weights of a model, computed a slice at a time.

    >>> initial = config.initial_weights(seed=0)
    >>> initial.piece("layers.0.ffn.up_proj.weight", rows=slice(0, 64))  # equal to those rows of config.build(seed=0)

    Weights that `Init` fills are drawn only for the requested rows. Other values of a part (a norm's weights, a bias, a
    spectral norm) are computed by filling that one part.
    """

    def __init__(self, outline: nn.Module, init: Init):
        self.outline, self.init = outline.to_empty(device="meta"), init  # copies of a layer share their storage
        self.tensors = dict(_tensors(outline))
        self._part: dict[str, dict[str, Tensor]] = {}
        """Cache with one entry: path of the part that was filled last -> that part's tensors by full name."""
        drawn: dict[str, list[tuple[Tensor, Numbers]]] = {}
        names = {storage_of(tensor): name for name, tensor in reversed(self.tensors.items())}
        before = {name: tensor._version for name, tensor in self.tensors.items()}
        recorder = replace(init, names=names, recorded=drawn)
        for path, init_weights in _filling(outline):
            init_weights(recorder.at(path))
        self._maps = {
            name: [(view.storage_offset() // max(1, tensor[0].numel()), numbers) for view, numbers in drawn[name]]
            for name, tensor in self.tensors.items()
            if name in drawn and tensor._version == before[name] and _stacked(tensor, [v for v, _ in drawn[name]])
        }

    def piece(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Returns the given rows and columns of the parameter or buffer `name`, on the CPU. Whole rows are drawn even
        if only some columns are requested."""
        if name not in self.tensors:
            raise RequestError(code="unknown", field="name", value=name, expected="the name of a parameter or buffer")
        if any(one.step not in (None, 1) for one in (rows, columns)):
            raise RequestError(code="range", field="rows", value=(rows, columns), expected="slices without a step")
        like = self.tensors[name]
        if not like.dim():
            return self._filled(name).clone()
        cut = (rows,) if columns == slice(None) else (rows, columns)
        if name not in self._maps:
            return self._filled(name)[cut].clone()
        shape = torch.empty(like.shape, device="meta")[cut].shape
        made = torch.empty(shape, dtype=like.dtype, device="cpu")
        first, last, _ = rows.indices(len(like))
        for begin, numbers in self._maps[name]:
            low, high = max(first, begin) - begin, min(last, begin + numbers.shape[0]) - begin
            for a, b, values in numbers.blocks(low, high) if low < high else ():
                made[a + begin - first : b + begin - first] = values[(slice(None), *cut[1:])]
        return made

    def _filled(self, name: str) -> Tensor:
        """Returns the tensor `name` with its initial values, which it computes by filling the smallest part that can be
        filled separately: the outermost enclosing module with `init_weights`, or else the module that holds the
        tensor."""
        steps = name.split(".")[:-1]
        paths = (".".join(steps[:n]) for n in range(len(steps)))
        having = (path for path in paths if hasattr(self.outline.get_submodule(path), "init_weights"))
        path = next(having, ".".join(steps))
        if path not in self._part:  # names come part by part, and several of a part are often requested
            part = copy.deepcopy(self.outline.get_submodule(path)).to_empty(device="cpu")
            fill(part, self.init, path)
            self._part = {path: {name: one.detach() for name, one in _tensors(part, path)}}
        return self._part[path][name]


def _filling(module: nn.Module, path: str = "") -> Iterator[tuple[str, Callable[[Init], None]]]:
    """Yields (path, method `init_weights`) of `module` and of every module inside it that has this method; parents
    first."""
    for name, part in module.named_modules(prefix=path):
        if callable(init_weights := getattr(part, "init_weights", None)):
            yield name, init_weights


def _tensors(module: nn.Module, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields (full name, tensor) for all parameters, then all buffers, of a module whose path is `path`."""
    yield from module.named_parameters(prefix=path)
    yield from module.named_buffers(prefix=path)


def _stacked(tensor: Tensor, views: list[Tensor]) -> bool:
    """Returns True if the tensors `views`, in order, are blocks of whole rows that together make up `tensor`."""
    row = max(1, tensor[0].numel()) if tensor.dim() else 0
    end = 0
    for view in views:
        if not row or view.storage_offset() != end * row or view.shape[1:] != tensor.shape[1:]:
            return False
        end += len(view)
    return end == len(tensor) and all(view.is_contiguous() for view in views) if tensor.dim() else False


@contextmanager
def _all_filled(module: nn.Module, held: dict[str, Tensor], init: Init, path: str) -> Iterator[None]:
    """Context manager that completes the filling of a module: after the `with` block, it fills those of the tensors
    `held` that are still uninitialised by calling torch's `reset_parameters`, seeded by (seed, path of the module).
    Raises RequestError for a tensor that nothing fills."""
    with torch.no_grad():
        for tensor in held.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
    before = {name: tensor._version for name, tensor in held.items()}
    yield
    # tensors filled through `.data` keep their version, but are not NaN any more
    same = [(name, tensor) for name, tensor in held.items() if tensor.numel() and tensor._version == before[name]]
    left = {name for name, tensor in same if not tensor.is_floating_point() or tensor.isnan().any()}
    for name, one in module.named_modules(prefix=path) if left else ():
        own = {f"{name}.{key}" for key in (*one._parameters, *one._buffers)}
        if own & left and callable(reset := getattr(one, "reset_parameters", None)):
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.default_generator.manual_seed(key_of(init.seed, name))
                reset()
            left -= own
    if left:
        methods = "init_weights(init) or reset_parameters()"
        message = f"nothing fills {', '.join(sorted(left)[:4])}: the module needs an {methods}"
        raise RequestError(message, code="missing", field=min(left), expected=methods)


def generator_of(seed: int) -> torch.Generator:
    """Returns a torch generator on the CPU with this seed. Raises RequestError for a seed that `check_seed` refuses."""
    return torch.Generator("cpu").manual_seed(check_seed(seed))
