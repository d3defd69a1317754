"""A named place inside the model where one can look or reach in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from glassformer.parts.core.running import Edit, Look, Tap, put, thread


class Joint(Protocol):
    """A value of which each of several owners has a piece (`parallel/tensor.py`)."""

    def gather(self, x: Tensor) -> Tensor:
        """The pieces of all, joined."""

    def cut(self, x: Tensor) -> Tensor:
        """This owner's piece of the whole."""


@runtime_checkable
class Choosy(Protocol):
    """A look that wants some heads alone, which a part that computes for it need not do for the others."""

    def among(self, heads: int) -> tuple[Look, list[int]]:
        """A look at these heads, and which of so many they are."""


class Site(nn.Module):
    """The identity, with a name: `Site()(x) is x`.

    Its path in the module tree is its public name (`layers.3.mixer.pattern`). `edit_at` and `look_at` say what the
    thread that enters them does with the value: it is changed by the edits, of which forward hooks come first, and
    shown to the looks. Without any the call returns at once and costs about 0.2 us.
    """

    axes: str
    name: str | None
    joint: Joint | None = None
    """How pieces become the value that is shown, and edited; None: this is all of it."""

    def __init__(self, axes: str = "bsd", name: str | None = None):
        """`axes`: what the value's dimensions are, in the alphabet of the field. `name` replaces the last step of the
        path, where an attribute of that name stands already."""
        super().__init__()
        # Half of all modules are sites: a quarter of the time a model takes to build is torch looking for parameters.
        self.__dict__.update(axes=axes, name=name)

    def forward(self, x: Tensor) -> Tensor:
        return x

    @property
    def edits(self) -> tuple[Edit, ...]:
        """Functions by which this thread changes what passes."""
        return self._tap.edits

    @property
    def looks(self) -> tuple[Look, ...]:
        """Functions to which this thread shows what passes."""
        return self._tap.looks

    @property
    def _tap(self) -> Tap:
        taps = thread.now.taps
        return _NO_TAP if taps is None else taps.get(self, _NO_TAP)

    @property
    def edited(self) -> bool:
        """Whether somebody may change what passes: the part must then compute with it."""
        taps = thread.now.taps  # asked of several sites at every token
        return bool(self._forward_hooks) or (taps is not None and bool(taps.get(self, _NO_TAP).edits))

    @property
    def watched(self) -> bool:
        """Whether somebody looks: a part may then compute what it would otherwise not hand out."""
        taps = thread.now.taps  # asked of every site at every token
        return bool(self._forward_hooks) or (taps is not None and self in taps)

    def show(self, x: Tensor, first: int, total: int) -> None:
        """Rows first, first + 1, ... of `total` to whoever looks."""
        looks = self._tap.looks
        if looks and self.joint is not None:
            x = self.joint.gather(x)
        for look in looks:
            look(x, first, total)

    def lookers(self, heads: int) -> Iterator[tuple[Look, list[int]]]:
        """Everybody who looks, and which of so many heads to show it: those alone it has asked for, if any."""
        looks = self._tap.looks
        if self.joint is not None and looks:  # each owner has heads of its own, which are shown together
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
    """Inside, in this thread, each site calls these besides what it called before. Leaving takes these away, whatever
    has been added or taken away since."""
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
    """The entries less the last one that is each of `gone`."""
    kept = list(entries)
    for one in gone:
        if places := [i for i, entry in enumerate(kept) if entry is one]:
            del kept[places[-1]]
    return tuple(kept)


def look_at(looks: Iterable[tuple[Site, Look]]) -> AbstractContextManager[None]:
    """Inside, in this thread, each look is shown what passes its site."""
    return tapped((site, Tap(looks=(look,))) for site, look in looks)


def edit_at(edits: Iterable[tuple[Site, Edit]]) -> AbstractContextManager[None]:
    """Inside, in this thread, each edit changes what passes its site, behind those entered before."""
    return tapped((site, Tap(edits=(edit,))) for site, edit in edits)


def unseen(module: nn.Module) -> bool:
    """Whether nobody looks at or reaches into what a module and its parts compute, by a site or a hook of torch."""
    return not any(
        each._forward_hooks
        or each._forward_pre_hooks
        or each._backward_hooks
        or each._backward_pre_hooks
        or (isinstance(each, Site) and each.watched)
        for each in module.modules()
    )
