"""Looking inside and reaching in: the values at named sites of a running model.

>>> gf.capture(model, tokens, ["layers.*.mixer.pattern"])["layers.0.mixer.pattern"]     # (b, n, s, t)
>>> with gf.edit(model, {"layers.2.mixer.z": lambda z: z * 0}):
...     model(tokens)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.callable_module import make_callable
from glassformer.errors import RequestError, did_you_mean
from glassformer.model import Model
from glassformer.parts.site import Look, Site

MEMORY = 1 << 30
MAPS = "st"
"""How the axes of a site end that holds a map of queries against keys."""

Edit = Callable[[Tensor], Tensor]


def sites(model: nn.Module) -> dict[str, Site]:
    """Public name -> site, in the order of the module tree: `embed`, `layers.3.mixer.pattern`, `logits`, ...

    A module that declares itself `transparent` lends its children to its parent."""

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, Site]]:
        for name, child in module.named_children():
            if isinstance(child, Site):
                yield prefix + (child.name or name), child
            else:
                yield from walk(child, prefix if getattr(child, "transparent", False) else f"{prefix}{name}.")

    return dict(walk(eager(model), ""))


def choose(
    model: nn.Module, patterns: str | Iterable[str], layers: int | Sequence[int] | None = None
) -> dict[str, Site]:
    """The sites that shell-style `patterns` name, of these layers alone where some are given.

    Raises RequestError for a pattern that names no site, and for a layer out of range."""
    known = sites(model)
    found: dict[str, Site] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        named = {name: site for name, site in known.items() if fnmatchcase(name, pattern)}
        if not named:
            raise RequestError(f"no site is named {pattern!r}{did_you_mean(pattern, known)}")
        found |= named
    if layers is None:
        return found
    wanted = {f"layers.{layer}." for layer in within(layers, len(eager(model).layers), "layer")}
    return {name: site for name, site in found.items() if name.startswith(tuple(wanted)) or "layers." not in name}


def within(given: int | Sequence[int], count: int, what: str) -> list[int]:
    """Indices below `count`, negative ones from the end. Raises RequestError where one is out of range."""
    indices = [given] if isinstance(given, int) else list(given)
    for index in indices:
        if not -count <= index < count:
            raise RequestError(f"{what} {index} is out of range: the model has {what}s 0 to {count - 1}")
    return [index % count for index in indices]


def capture(
    model: Model,
    tokens: Tensor,
    sites: str | Iterable[str],
    *,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    positions: int | Sequence[int] | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
    pool: int | None = None,
    memory: int = MEMORY,
    **kwargs: object,
) -> dict[str, Tensor]:
    """{site: value} at every site that one of the shell-style patterns names, of model(tokens, **kwargs).

    `layers`, `heads`, `positions` (of queries) keep those alone; heads count along the site's own axis of heads.
    `reduce` is applied at the site and its result kept: a function of the value, called for a map of queries against
    keys with blocks of queries, whose results are joined along the axis of queries. `pool` brings such maps down to at
    most pool x pool, keeping the largest value of every tile; a map of more than `memory` bytes is pooled unasked, with
    a warning. The fast kernel computes z all the same: logits with and without capture are identical.

    Values are detached. Raises RequestError for a pattern that names no site and an index out of range."""
    chosen = choose(model, sites, layers)
    if heads is not None and not any(_head_axis(site) for site in chosen.values()):
        raise RequestError(f"heads={heads}: none of the sites {', '.join(list(chosen)[:3])} has heads")
    gathers = {name: Gather(name, site.axes, heads, positions, reduce, pool, memory) for name, site in chosen.items()}
    with looking(model, gathers), torch.no_grad():
        eager(model)(tokens, **kwargs)
    return {name: gather.value() for name, gather in gathers.items() if gather.parts}


@contextmanager
def looking(model: nn.Module, looks: Mapping[str, Look]) -> Iterator[None]:
    """Inside, every value that passes a named site is shown: look(x, first, total), see `parts.site.Look`."""
    known = sites(model)
    before = {name: known[name].looks for name in looks}
    with running_eagerly(model):
        try:
            for name, look in looks.items():
                known[name].looks = (*known[name].looks, look)
            yield
        finally:
            for name, was in before.items():
                known[name].looks = was


@contextmanager
def edit(model: nn.Module, *edits: Mapping[str, Edit]) -> Iterator[None]:
    """Inside, f(value) stands for the value at the sites that each shell-style pattern names: {"layers.2.mixer.z": f}.

    Edits of one site are applied in the order given, after those of a `with` around this one; leaving undoes them.
    They hold for every pass, decoding with a state included. Raises RequestError for a pattern that names no site,
    and, when the model runs, for an edit that returns another shape."""
    with ExitStack() as undo:
        undo.enter_context(running_eagerly(model))
        for pattern, function in (pair for given in edits for pair in given.items()):
            for name, site in choose(model, pattern).items():
                hook = site.register_forward_hook(_checked(name, function))
                undo.callback(hook.remove)
        yield


def _checked(name: str, function: Edit) -> Any:
    def hook(module: nn.Module, args: object, value: Tensor) -> Tensor:
        edited = function(value)
        if not isinstance(edited, Tensor):
            raise RequestError(f"the edit at {name} returned {type(edited).__name__}; return a tensor")
        if edited.shape != value.shape:
            raise RequestError(
                f"the edit at {name} returned shape {tuple(edited.shape)}; the value there has {tuple(value.shape)}"
            )
        return edited.to(value)

    return hook


# What compiling hides


def eager(model: Any) -> Any:
    """The module behind `torch.compile(model)`."""
    return getattr(model, "_orig_mod", model)


@contextmanager
def running_eagerly(model: nn.Module) -> Iterator[None]:
    """Compiled code does not stop at sites: inside, what was compiled of the model runs as it is written."""
    parts = [model, *eager(model).modules()]
    if all(part is eager(part) and part._compiled_call_impl is None for part in parts):
        yield
        return
    warnings.warn("this model is compiled; looked at or edited, it runs eagerly", stacklevel=4)
    with torch.compiler.set_stance("force_eager"):
        yield


# Gathering what passes


def _head_axis(site: Site) -> int | None:
    return next((i for i, axis in enumerate(site.axes) if axis in "ng"), None)


class Gather:
    """A look that keeps what it is shown: chosen heads and positions, reduced or pooled at the site."""

    def __init__(
        self,
        name: str,
        axes: str,
        heads: int | Sequence[int] | None = None,
        positions: int | Sequence[int] | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
        pool: int | None = None,
        memory: int = MEMORY,
    ):
        if pool is not None and pool < 1:
            raise RequestError(f"pool={pool} must be at least 1")
        self.name, self.axes, self.heads, self.positions, self.reduce = name, axes, heads, positions, reduce
        self.pool, self.memory = pool, memory
        self.rows = axes.index("s")
        self.head_axis = next((i for i, axis in enumerate(axes) if axis in "ng"), None)
        self.parts: list[Tensor] = []
        self.tiles: Tiles | None = None

    def __call__(self, x: Tensor, first: int, total: int) -> None:
        x = x.detach()
        if self.heads is not None and self.head_axis is not None:
            x = x.index_select(self.head_axis, _index(self.heads, x.shape[self.head_axis], "head", x))
        if self.positions is not None:
            at = [i - first for i in within(self.positions, total, "position")]
            x = x.index_select(self.rows, torch.tensor([i for i in at if 0 <= i < x.shape[self.rows]], device=x.device))
            first, total = 0, len(at)
        if self.reduce is not None:
            self.parts.append(self.reduce(x))
        elif self.axes.endswith(MAPS) and self._too_large(x, total):
            assert self.pool is not None
            self.tiles = self.tiles or Tiles(x, total, self.pool)
            self.tiles.add(x, first)
            self.parts = [self.tiles.values]
        else:
            self.parts.append(x)

    def _too_large(self, x: Tensor, total: int) -> bool:
        """Whether this map is to be pooled; sets how far, where it does not fit in memory."""
        b, n, _, t = x.shape
        if self.pool is None and b * n * total * t * x.element_size() > self.memory:
            self.pool = max(1, int((self.memory / (b * n * x.element_size())) ** 0.5))
            self.pool = min(self.pool, 1024)
            warnings.warn(
                f"{self.name}: {total} x {t} values for each of {b * n} heads are more than memory={self.memory:,} "
                f"bytes; pooled to {self.pool} x {self.pool}, keeping the largest value of every tile"
            )
        return self.pool is not None and max(total, t) > self.pool

    def value(self) -> Tensor:
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts, dim=self.rows)


def _index(given: int | Sequence[int], count: int, what: str, like: Tensor) -> Tensor:
    return torch.tensor(within(given, count, what), device=like.device)


class Tiles:
    """The largest value of every tile of a map (b, n, s, t) that arrives by blocks of rows: (b, n, S, T)."""

    def __init__(self, like: Tensor, rows: int, size: int):
        b, n, _, t = like.shape
        self.height, self.width = -(-rows // size), -(-t // size)
        shape = (b, n, -(-rows // self.height), -(-t // self.width))
        self.values = like.new_full(shape, float("-inf"))

    def add(self, x: Tensor, first: int) -> None:
        pad = self.values.shape[-1] * self.width - x.shape[-1]
        x = nn.functional.pad(x, (0, pad), value=float("-inf")).unflatten(-1, (-1, self.width)).amax(-1)
        into = torch.arange(first, first + x.shape[2], device=x.device) // self.height
        self.values.index_reduce_(2, into, x, "amax")


make_callable(__name__)
