"""Reads and edits the values at named sites of a running model.

>>> gf.capture(model, tokens, ["layers.*.mixer.pattern"])["layers.0.mixer.pattern"]     # (b, n, s, t)
>>> with gf.edit(model, {"layers.2.mixer.z": lambda z: z * 0}):
...     model(tokens)
"""

from __future__ import annotations

import inspect
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.errors import RequestError, did_you_mean, shown
from glassformer.model import Model
from glassformer.parts.core.running import Edit, Look, thread
from glassformer.parts.core.site import Site, edit_at, look_at
from glassformer.parts.forward_pass import Pass
from glassformer.parts.region import eager_regions

MEMORY = 1 << 30
LARGEST_UNASKED = 1024
"""Largest side of a map that is pooled because of its memory and not on request"""
MAPS = "st"
"""Last axes of a site that holds a map of queries against keys"""


def sites(model: nn.Module) -> dict[str, Site]:
    """Lists the places inside a model whose values `gf.capture` returns and `gf.edit` replaces.

    The sites of a module that is marked `transparent` belong to its parent.

    Parameters
    ----------
    model
        The model.

    Returns
    -------
    dict of str to Site
        Name -> site, in the order of the module tree.

    Examples
    --------
    >>> model = gf.preset("gpt2@1m+vocab_size=64").build(seed=0)
    >>> list(gf.sites(model))[:3]
    ['embed', 'layers.0.resid_pre', 'layers.0.mixer.q']
    """

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
    """Returns the sites that match shell-style `patterns`, only of the given layers if any are given.

    Raises RequestError for a pattern that matches no site, and for a layer out of range."""
    known = sites(model)
    if layers is not None:
        wanted = within(layers, len(eager(model).layers), "layer")
        ours = tuple(f"layers.{layer}." for layer in wanted)
        known = {name: site for name, site in known.items() if name.startswith(ours) or "layers." not in name}
    found: dict[str, Site] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        named = {name: site for name, site in known.items() if fnmatchcase(name, pattern)}
        if not named:
            where = "" if layers is None else f" in layers={layers}"
            why = _no_such_layer(pattern, len(getattr(eager(model), "layers", ())))
            raise RequestError(
                f"{why}no site{where} is named {pattern!r}{did_you_mean(pattern, known)}",
                code="unknown", field="sites", value=pattern,
            )  # fmt: skip
        found |= named
    return found


def _no_such_layer(pattern: str, count: int) -> str:
    """Returns a clause with the range of layers if the pattern names a layer outside it; otherwise an empty text."""
    asked = re.match(r"layers\.(-?\d+)(\.|$)", pattern)
    if asked is None or 0 <= int(asked[1]) < count:
        return ""
    return f"layer {asked[1]} is out of range: the model has layers 0 to {count - 1}, and "


def within(given: int | Iterable[int], count: int, what: str, owner: str = "the model") -> list[int]:
    """Returns indices below `count`, with negative ones counted from the end. Raises RequestError for an index out of
    range, and for an empty list."""
    try:
        indices = [operator.index(given)]  # type: ignore[arg-type]  # otherwise not a number
    except TypeError:
        try:
            indices = [operator.index(index) for index in given]  # type: ignore[union-attr]
        except TypeError:
            raise RequestError(
                f"{what}s={given!r}: give a whole number, or several", code="type", field=what, value=given
            ) from None
    if not indices:
        raise RequestError(f"{what}s={given} is empty; leave it out for all of them", code="missing", field=what)
    for index in indices:
        if not -count <= index < count:
            raise RequestError(
                f"{what} {index} is out of range: {owner} has {what}s 0 to {count - 1}",
                code="range", field=what, value=index,
            )  # fmt: skip
    return [index % count for index in indices]


def rows_of(model: Model, tokens: Any, least: int = 1) -> Tensor:
    """Returns tokens (b, s) for tokens (b, s) or (s,), given as a tensor, an array or lists; for a model that reads
    images or vectors, returns its input. Raises RequestError if they are not a valid input, or too short."""
    try:
        tokens = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise RequestError(f"tokens must be rows of ids: {problem}", code="type", field="tokens") from None
    whole = eager(model)
    if whole.embedding.reader is not None:
        whole.embedding.places(tokens)
        return tokens.to(whole.device)
    if tokens.dim() not in (1, 2) or tokens.numel() == 0 or tokens.shape[-1] < least:
        enough = "at least one token" if least == 1 else f"at least {least} in a row"
        raise RequestError(
            f"tokens must be (length,) or (b, s) with {enough}, and are {tuple(tokens.shape)}",
            code="range", field="tokens", value=tuple(tokens.shape),
        )  # fmt: skip
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise RequestError(
            f"tokens are {tokens.dtype}; ids are whole numbers", code="type", field="tokens", value=str(tokens.dtype)
        )
    tokens = tokens.to(whole.device, torch.int64)  # unsigned dtypes have no minimum below 0
    for token in (int(tokens.min()), int(tokens.max())):
        in_vocabulary(token, whole.vocab_size)
    return tokens.reshape(-1, tokens.shape[-1])


def in_vocabulary(token: int, size: int, what: str = "token", field: str = "tokens") -> int:
    """Returns the token. Raises RequestError, for `field`, if it is not an id of the vocabulary."""
    if not 0 <= token < size:
        raise RequestError(
            f"{what} {token} is outside the vocabulary of {size}: ids are 0 to {size - 1}",
            code="range", field=field, value=token,
        )  # fmt: skip
    return token


def capture(
    model: nn.Module,
    tokens: Any,
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
    """Runs a model, or a part by itself, and returns the values at named sites inside it.

    The fast kernel still computes the output of attention: logits with and without capture are identical. Compiled
    parts of the model run eagerly during the call, with a warning. Values are detached, and include the edits of a
    surrounding `gf.edit`; sites that hold the same value may share one tensor.

    Parameters
    ----------
    model
        The model, or one part: a mixer, a feed-forward network, a norm.
    tokens
        Ids (b, s), or (s,) for one text. For a part: its input (b, s, d), or (s, d).
    sites
        Shell-style patterns of site names, such as "layers.*.mixer.pattern".
    layers, heads, positions
        Indices to keep, in the given order; negative ones count from the end. Heads are indices of the site's axis of
        heads; a site without that axis is kept whole. Positions are indices of queries in `tokens`, without the tokens
        of a decode state.
    reduce
        Function of the value, applied at the site; its result is kept. Maps of queries against keys are passed in
        blocks of queries: `reduce` must keep that axis, and the results are joined along it.
    pool
        Largest side of a map of queries against keys: larger maps are reduced to the maximum of each tile.
    memory
        Limit on the bytes of all maps together; above it, they are pooled with a warning.
    **kwargs
        Further arguments of the model's call: state, positions, documents, source.

    Returns
    -------
    dict of str to Tensor
        Site name -> value.

    Raises
    ------
    RequestError
        For a pattern without a site, an index out of range, and ids outside the vocabulary.

    Examples
    --------
    >>> model = gf.preset("llama@0.3m+vocab_size=100").build(seed=0)
    >>> seen = gf.capture(model, [[1, 2, 3]], ["layers.*.mixer.pattern", "layers.0.ffn.out"], heads=0)
    >>> seen["layers.1.mixer.pattern"].shape, seen["layers.0.ffn.out"].shape
    (torch.Size([1, 1, 3, 3]), torch.Size([1, 3, 88]))
    """
    run = eager(model)
    alone = not isinstance(run, Model)
    if alone and layers is not None:
        raise RequestError(
            f"layers={layers}: {type(run).__name__} is a part and has no layers; leave layers out",
            code="conflict", field="layers", value=layers,
        )  # fmt: skip
    chosen = choose(model, sites, layers)
    tokens = rows_of(run, tokens) if isinstance(run, Model) else _input_of(run, tokens)
    for name, value in (("pool", 1 if pool is None else pool), ("memory", memory)):
        if not isinstance(value, int) or value < 1:
            raise RequestError(
                f"{name}={value!r} must be a whole number of at least 1", code="range", field=name, value=value
            )
    if heads is not None and not any(head_axis(site.axes) is not None for site in chosen.values()):
        raise RequestError(
            f"heads={heads}: none of the sites {', '.join(list(chosen)[:3])} has heads",
            code="conflict", field="heads", value=heads,
        )  # fmt: skip
    share = memory // max(1, sum(site.axes.endswith(MAPS) for site in chosen.values()))
    gathers = {name: Gather(name, site.axes, heads, positions, reduce, pool, share) for name, site in chosen.items()}
    with looking(model, gathers), torch.no_grad():
        if alone:
            _run_part(run, tokens, kwargs)
        else:
            (run if "logits" in chosen else run.hidden_states)(tokens, **kwargs)  # the head only if captured
    if large := [gather for gather in gathers.values() if gather.unasked]:
        warnings.warn(
            f"{len(large)} maps such as {large[0].name} need {sum(gather.unasked for gather in large):,} bytes, more "
            f"than their share of memory={memory:,}; they are pooled to {large[0].size}, keeping the largest "
            "value of every tile"
        )
    return {name: gather.kept for name, gather in gathers.items() if gather.kept is not None}


def _input_of(part: nn.Module, x: Any) -> Tensor:
    """Returns the input (b, s, d) of a part. Raises RequestError for other values."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() not in (2, 3) or x.numel() == 0:
        raise RequestError(
            f"{type(part).__name__} is a part and reads vectors: give a floating-point tensor (b, s, d)",
            code="type", field="tokens", value=str(getattr(x, "dtype", type(x).__name__)),
        )  # fmt: skip
    return x if x.dim() == 3 else x[None]


def _run_part(part: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> None:
    """Calls a part by itself, with a pass over all of x if it takes one. Raises RequestError if it cannot run without a
    model."""
    if "pass_" in inspect.signature(part.forward).parameters:
        kwargs = {"pass_": Pass(0, x.shape[1]), **kwargs}
    try:
        part(x, **kwargs)
    except (TypeError, AttributeError, RuntimeError, AssertionError) as problem:
        raise RequestError(
            f"{type(part).__name__} does not run by itself on x {tuple(x.shape)}: {shown(problem)}",
            code="unsupported", field="model", value=type(part).__name__, expected="a model, or a part of x (b, s, d)",
        ) from problem  # fmt: skip


@contextmanager
def looking(model: nn.Module, looks: Mapping[str, Look]) -> Iterator[None]:
    """Calls look(x, first, total) with every value at the named sites, within the block and in this thread; see
    `parts.core.running.Look`."""
    known = sites(model)
    with running_eagerly(model), look_at((known[name], look) for name, look in looks.items()):
        yield


@contextmanager
def edit(model: nn.Module, *edits: Mapping[str, Edit]) -> Iterator[None]:
    """Replaces the values at named sites by functions of them, inside a `with` block and in the current thread.

    Edits of one site are applied in the given order, after those of a surrounding `with`; leaving the block removes
    them. They apply to every pass, including decoding with a state, where a function gets only the tokens of that pass.
    Attention with edited scores or pattern is computed by the naive kernel.

    Parameters
    ----------
    model
        The model.
    *edits
        Mappings from a shell-style pattern of site names to a function of the value. The function may modify its
        argument, and returns a tensor of the same shape.

    Yields
    ------
    None
        Nothing; the model is called inside the block.

    Raises
    ------
    RequestError
        For a pattern without a site, and, when the model runs, for a function that returns another shape.

    Examples
    --------
    >>> model = gf.preset("llama@0.3m+vocab_size=100").build(seed=0)
    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> with gf.edit(model, {"layers.2.mixer.z": lambda z: z * 0}):
    ...     ablated = model(tokens)
    >>> torch.equal(ablated, model(tokens))
    False
    """
    chosen: list[tuple[Site, Edit]] = []
    for pattern, function in (pair for given in edits for pair in given.items()):
        for name, site in choose(model, pattern).items():
            if not callable(function):
                raise RequestError(
                    f"the edit at {name} is {type(function).__name__}; give a function of the value",
                    code="type", field=name, value=type(function).__name__,
                )  # fmt: skip
            chosen.append((site, _checked(name, function)))
    with running_eagerly(model), edit_at(chosen):
        yield


def _checked(name: str, function: Edit) -> Edit:
    def checked(value: Tensor) -> Tensor:
        edited = function(value.clone())  # a copy, because other sites may hold the same tensor
        if not isinstance(edited, Tensor):
            raise RequestError(
                f"the edit at {name} returned {type(edited).__name__}; return a tensor",
                code="type", field=name, value=type(edited).__name__,
            )  # fmt: skip
        if edited.shape != value.shape:
            raise RequestError(
                f"the edit at {name} returned shape {tuple(edited.shape)}; the value there has {tuple(value.shape)}",
                code="conflict", field=name, value=tuple(edited.shape),
            )  # fmt: skip
        return edited.to(value)

    return checked


# Compiled models


def eager(model: Any) -> Any:
    """Returns the module behind `torch.compile(model)`."""
    return getattr(model, "_orig_mod", model)


class _GivesWay:
    """A compiled call together with the eager one, which is used in threads that observe or edit sites."""

    def __init__(self, compiled: Callable[..., Any], written: Callable[..., Any]):
        self.compiled, self.written = compiled, written

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.compiled if thread.now.eagerly is None else self.written)(*args, **kwargs)


@contextmanager
def running_eagerly(model: nn.Module) -> Iterator[None]:
    """Runs compiled modules of the model eagerly in this thread, within the block, because compiled code does not stop
    at sites. This includes compiled elementwise regions, which stop at sites but round differently: captured values are
    those of the definition."""
    with eager_regions() as eagerly:
        if _give_way([model, *eager(model).modules()]) and eagerly.first("models"):
            warnings.warn("this model is compiled; while observed or edited, it runs eagerly")
        yield


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode, without dropout, within the block. Afterwards parts that were in training
    mode return to it."""
    training = [part for part in eager(model).modules() if part.training]
    eager(model).eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _give_way(parts: Iterable[Any]) -> bool:
    """Makes the compiled modules among `parts` run eagerly in threads that observe or edit, permanently.

    Returns True if any module is compiled."""
    found = False
    for part in parts:
        if (written := eager(part)) is not part:  # torch.compile(part)
            found = True
            if not isinstance(part.forward, _GivesWay):
                part.forward = _GivesWay(part.forward, written.__call__)
        elif part._compiled_call_impl is not None:  # part.compile()
            found = True
            if not isinstance(part._compiled_call_impl, _GivesWay):
                part._compiled_call_impl = _GivesWay(part._compiled_call_impl, part._call_impl)
    return found


# Collection of values


def head_axis(axes: str) -> int | None:
    """Returns the index of the first axis of heads in the axes of a site, such as "bnsh"; None without one."""
    return next((i for i, axis in enumerate(axes) if axis in "ng"), None)


class OfHeads:
    """Observer of some heads only, at a site that computes for it (`parts.core.site.Choosy`); at other sites, of all
    heads"""

    def __init__(self, look: Look, heads: list[int]):
        self.look, self.heads = look, heads

    def __call__(self, x: Tensor, first: int, total: int) -> None:
        self.look(x, first, total)

    def among(self, heads: int) -> tuple[Look, list[int]]:
        return self.look, self.heads


class Gather:
    """Observer that keeps the values in `kept`: selected heads and positions, reduced or pooled at the site."""

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
        self.name, self.heads, self.positions, self.reduce = name, heads, positions, reduce
        self.pool, self.memory = pool, memory
        self.rows, self.head_axis, self.map = axes.index("s"), head_axis(axes), axes.endswith(MAPS)
        self.kept: Tensor | None = None
        self.unasked = 0
        """Bytes that a map would take without pooling, if it is pooled only to save memory"""
        self._tiles: Tiles | None = None

    def __call__(self, x: Tensor, first: int, total: int) -> None:
        if self.heads is not None and self.head_axis is not None:
            x = _select(x, self.head_axis, self._among(x.shape[self.head_axis]))
        self._take(x, first, total)

    @property
    def size(self) -> str:
        """Size of the kept map of queries and keys as text, such as `64 x 64`. A pooled map has a value for each tile
        of the whole map; a tile has a whole number of rows, so the pooled map may be smaller than `pool`."""
        assert self.kept is not None
        return " x ".join(map(str, self.kept.shape[-2:]))

    def among(self, heads: int) -> tuple[Look, list[int]]:
        """Returns an observer of the selected heads only, and their indices among `heads`."""
        return self._take, self._among(heads)

    def _among(self, heads: int) -> list[int]:
        return list(range(heads)) if self.heads is None else within(self.heads, heads, "head", self.name)

    def _take(self, x: Tensor, first: int, total: int) -> None:
        """Processes the values of the selected heads, as `__call__` passes them."""
        x, places = x.detach(), list(range(first, first + x.shape[self.rows]))
        if self.positions is not None:
            wanted = within(self.positions, total, "position", "the text")
            held = {place: row - first for place, row in enumerate(wanted) if 0 <= row - first < len(places)}
            if not held:
                return
            x, places, total = _select(x, self.rows, list(held.values())), list(held), len(wanted)
        if self.reduce is not None:
            self._keep(self._reduced(self.reduce, x, len(places) < total), places, total)
        elif self.map and self._pooled(x, total):
            assert self.pool is not None
            self._tiles = self._tiles or Tiles(x, total, self.pool)
            self._tiles.add(x, places)
            self.kept = self._tiles.values
        else:
            self._keep(x, places, total)

    def _reduced(self, reduce: Callable[[Tensor], Tensor], x: Tensor, part: bool) -> Tensor:
        made = reduce(x)
        if (self.map or part) and (made.dim() <= self.rows or made.shape[self.rows] != x.shape[self.rows]):
            raise RequestError(
                f"reduce made {tuple(made.shape)} of a block {tuple(x.shape)} at {self.name}; axis {self.rows} counts "
                f"{'queries' if self.map else 'positions'} and must stay",
                code="conflict", field="reduce", value=tuple(made.shape),
            )  # fmt: skip
        return made

    def _keep(self, x: Tensor, places: list[int], total: int) -> None:
        """Stores the rows of x at the ascending `places` of `total`."""
        if len(places) == total:
            alone = x.untyped_storage().nbytes() == x.numel() * x.element_size()
            self.kept = x if alone else x.clone()  # a view, such as q in qkv, would keep the whole tensor in memory
            return
        if self.kept is None:
            self.kept = x.new_empty([*x.shape[: self.rows], total, *x.shape[self.rows + 1 :]])
        self.kept.index_copy_(self.rows, torch.tensor(places, device=x.device), x)

    def _pooled(self, x: Tensor, total: int) -> bool:
        """Returns True if this map has to be pooled; sets the size to pool to if it does not fit into memory."""
        b, n, _, t = x.shape
        row = b * n * x.element_size()
        if self.pool is None and row * total * t > self.memory:
            self.unasked = row * total * t
            self.pool = min(LARGEST_UNASKED, max(1, isqrt(self.memory // row)))
        return self.pool is not None and max(total, t) > self.pool


def _select(x: Tensor, axis: int, indices: list[int]) -> Tensor:
    return x.index_select(axis, torch.tensor(indices, device=x.device))


class Tiles:
    """Maximum of each tile of a map (b, n, s, t) that is passed in blocks of rows: (b, n, S, T)."""

    def __init__(self, like: Tensor, rows: int, size: int):
        b, n, _, t = like.shape
        self.height, self.width = -(-rows // size), -(-t // size)
        shape = (b, n, -(-rows // self.height), -(-t // self.width))
        self.values = like.new_full(shape, float("-inf"))

    def add(self, x: Tensor, places: list[int]) -> None:
        """Adds the rows of x, which are at `places` of the map."""
        pad = self.values.shape[-1] * self.width - x.shape[-1]
        x = nn.functional.pad(x, (0, pad), value=float("-inf")).unflatten(-1, (-1, self.width)).amax(-1)
        into = torch.tensor(places, device=x.device) // self.height
        for tile in into.unique().tolist():
            most = x[:, :, into == tile].amax(2)
            self.values[:, :, tile] = torch.maximum(self.values[:, :, tile], most)
