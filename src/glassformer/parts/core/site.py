"""Sites: named places inside the model, at which activations can be observed and edited."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn.modules import module as every_module

from glassformer.parts.core.running import Edit, Look, Tap, put, thread


class Joint(Protocol):
    """Interface that converts between the whole value at a site and the shard of each tensor-parallel rank ("owner")
    (`parallel/tensor.py`)."""

    def gather(self, x: Tensor) -> Tensor:
        """Returns the whole value, gathered from the shard x of each owner."""

    def cut(self, x: Tensor) -> Tensor:
        """Returns this owner's shard of the whole value x."""


@runtime_checkable
class Choosy(Protocol):
    """Interface of an observer that wants the values of only some heads, so that a part need not compute those of other
    heads."""

    def among(self, heads: int) -> tuple[Look, list[int]]:
        """Returns (look, heads): the function to call with the values of the wanted heads, and the indices of these
        heads, of `heads` in all."""


class Site(nn.Module):
    """Identity with a name: `Site()(x) is x`.

    Its path in the module tree is its public name (`layers.3.mixer.pattern`). `edit_at` and `look_at` set the functions
    of a thread: the value is changed by the edits, after any forward hooks of torch, and shown to the looks
    (observers). Without such functions the call returns at once and costs about 0.2 us.
    """

    axes: str
    name: str | None
    joint: Joint | None = None
    """Conversion between the shard of this tensor-parallel rank and the whole value, which is observed and edited; None
    if the value is not divided."""

    def __init__(self, axes: str = "bsd", name: str | None = None):
        """`axes`: names of the axes of the value, one letter each, such as "bsd". `name` replaces the last step of the
        site's path in the module tree, where another attribute has that name already; None to keep the path."""
        super().__init__()
        # bypasses __setattr__: half of all modules are sites, and a quarter of the time a model takes to build is torch
        # looking for parameters
        self.__dict__.update(axes=axes, name=name)

    def forward(self, x: Tensor) -> Tensor:
        return x

    @property
    def edits(self) -> tuple[Edit, ...]:
        """Functions of this thread that change the value that passes this site."""
        return self._tap.edits

    @property
    def looks(self) -> tuple[Look, ...]:
        """Functions of this thread that are called with the value that passes this site."""
        return self._tap.looks

    @property
    def _tap(self) -> Tap:
        taps = thread.now.taps
        return _NO_TAP if taps is None else taps.get(self, _NO_TAP)

    @property
    def edited(self) -> bool:
        """True if an edit or a forward hook may change the value: the part must then compute with the result."""
        taps = thread.now.taps  # read at several sites for every token
        return bool(self._forward_hooks) or (taps is not None and bool(taps.get(self, _NO_TAP).edits))

    @property
    def watched(self) -> bool:
        """True if the value is observed or edited: a part may then compute a value that it would otherwise skip."""
        taps = thread.now.taps  # read at every site for every token
        return bool(self._forward_hooks) or (taps is not None and self in taps)

    def show(self, x: Tensor, first: int, total: int) -> None:
        """Calls all observers of this site with x, which holds rows first, first + 1, ... of the `total` rows along the
        axis s."""
        looks = self._tap.looks
        if looks and self.joint is not None:
            x = self.joint.gather(x)
        for look in looks:
            look(x, first, total)

    def lookers(self, heads: int) -> Iterator[tuple[Look, list[int]]]:
        """Yields (function, indices of heads) for every observer of this site: the function takes the values of these
        heads, which are all of the `heads` heads, or those that a `Choosy` observer wants."""
        looks = self._tap.looks
        if self.joint is not None and looks:  # each owner has separate heads, which are shown together
            yield self.show, list(range(heads))
            return
        for look in looks:
            yield look.among(heads) if isinstance(look, Choosy) else (look, list(range(heads)))

    def __call__(self, x: Any) -> Any:
        if self._forward_hooks:
            x = super().__call__(x)
        taps = thread.now.taps
        if taps is not None and (tap := taps.get(self)) is not None:
            x = self._edited(tap.edits, x) if tap.edits else x
            if tap.looks:
                whole = x if self.joint is None else self.joint.gather(x)
                for look in tap.looks:
                    look(whole, 0, whole.shape[self.axes.index("s")])
        return x

    def _edited(self, edits: tuple[Edit, ...], x: Tensor) -> Tensor:
        whole = x if self.joint is None else self.joint.gather(x)
        for edit in edits:
            whole = edit(whole)
        return whole if self.joint is None else self.joint.cut(whole)


_NO_TAP = Tap()


@contextmanager
def tapped(taps: Iterable[tuple[Site, Tap]]) -> Iterator[None]:
    """Context manager that makes each site call the functions of its `Tap`, after those of earlier contexts. Leaving
    removes exactly these functions, whatever was added or removed since."""
    ours = list(taps)
    held = dict(thread.now.taps or {})
    for site, tap in ours:
        before = held.get(site, _NO_TAP)
        held[site] = Tap((*before.edits, *tap.edits), (*before.looks, *tap.looks))
    put(replace(thread.now, taps=held))
    try:
        yield
    finally:
        left = dict(thread.now.taps or {})
        for site, tap in ours:
            before = left.pop(site, _NO_TAP)
            rest = Tap(_without(before.edits, tap.edits), _without(before.looks, tap.looks))
            if rest.edits or rest.looks:
                left[site] = rest
        put(replace(thread.now, taps=left or None))


def _without(entries: tuple[Any, ...], gone: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns `entries` without the last occurrence of each element of `gone`."""
    kept = list(entries)
    for one in gone:
        if places := [i for i, entry in enumerate(kept) if entry is one]:
            del kept[places[-1]]
    return tuple(kept)


def look_at(looks: Iterable[tuple[Site, Look]]) -> AbstractContextManager[None]:
    """Returns a context manager in which each function is called with the values that pass its site, in this thread."""
    return tapped((site, Tap(looks=(look,))) for site, look in looks)


def edit_at(edits: Iterable[tuple[Site, Edit]]) -> AbstractContextManager[None]:
    """Returns a context manager in which each edit changes the values that pass its site, in this thread, after earlier
    edits."""
    return tapped((site, Tap(edits=(edit,))) for site, edit in edits)


def unseen(module: nn.Module) -> bool:
    """Returns True if nothing observes or edits values inside the module: no function at a site, no hook of torch, of a
    module or of all, no `forward` that replaces that of a class, and no module that torch.compile calls."""
    if every_module._has_any_global_hook():
        return False
    taps, below = thread.now.taps or (), [module]
    while below:  # written for speed: a training step of a small model asks for every module
        one = below.pop()
        own = vars(one)
        hooked = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"]
        changed = "forward" in own or own.get("_compiled_call_impl") is not None
        if hooked or own["_backward_pre_hooks"] or changed or one in taps:
            return False
        below += filter(None, own["_modules"].values())
    return True
