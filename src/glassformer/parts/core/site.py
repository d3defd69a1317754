"""A named place inside the model where one can look or reach in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

Look = Callable[[Tensor, int, int], None]
"""look(x, first, total): x holds rows first, first + 1, ... of `total` along the axis s; most sites show all at
once."""

Edit = Callable[[Tensor], Tensor]
"""edit(x) -> what stands for x from here on."""


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

    Its path in the module tree is its public name (`layers.3.mixer.pattern`). Whoever changes the value is a member of
    `edits`, or a forward hook, which comes first; whoever only looks is a member of `looks` and sees it changed. With
    none of them the call returns at once and costs about 0.2 us.
    """

    axes: str
    name: str | None
    # Plain attributes, not hooks: code that somebody compiled around the model is guarded by them.
    edits: tuple[Edit, ...]
    looks: tuple[Look, ...]
    joint: Joint | None = None
    """How pieces become the value that is shown, and edited; None: this is all of it."""

    def __init__(self, axes: str = "bsd", name: str | None = None):
        """`axes`: what the value's dimensions are, in the alphabet of the field. `name` replaces the last step of the
        path, where an attribute of that name stands already."""
        super().__init__()
        # Half of all modules are sites: a quarter of the time a model takes to build is torch looking for parameters.
        self.__dict__.update(axes=axes, name=name, edits=(), looks=())

    def forward(self, x: Tensor) -> Tensor:
        return x

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a model is a model that nobody looks at or reaches into."""
        return {**self.__dict__, "edits": (), "looks": ()}

    @property
    def edited(self) -> bool:
        """Whether somebody may change what passes: the part must then compute with it."""
        return bool(self.edits or self._forward_hooks)

    @property
    def watched(self) -> bool:
        """Whether somebody looks: a part may then compute what it would otherwise not hand out."""
        return bool(self.looks or self.edits or self._forward_hooks)  # asked of every site at every token

    def show(self, x: Tensor, first: int, total: int) -> None:
        """Rows first, first + 1, ... of `total` to whoever looks."""
        if self.looks and self.joint is not None:
            x = self.joint.gather(x)
        self._show(x, first, total)

    def _show(self, x: Tensor, first: int, total: int) -> None:
        for look in self.looks:
            look(x, first, total)

    def lookers(self, heads: int) -> Iterator[tuple[Look, list[int]]]:
        """Everybody who looks, and which of so many heads to show it: those alone it has asked for, if any."""
        if self.joint is not None and self.looks:  # each owner has heads of its own, which are shown together
            yield self.show, list(range(heads))
            return
        for look in self.looks:
            yield look.among(heads) if isinstance(look, Choosy) else (look, list(range(heads)))

    def __call__(self, x: Any) -> Any:
        if self._forward_hooks:
            x = super().__call__(x)
        if self.edits:
            x = self._edited(x)
        if self.looks:
            whole = x if self.joint is None else self.joint.gather(x)
            self._show(whole, 0, whole.shape[self.axes.index("s")])
        return x

    def _edited(self, x: Tensor) -> Tensor:
        whole = x if self.joint is None else self.joint.gather(x)
        for edit in self.edits:
            whole = edit(whole)
        return whole if self.joint is None else self.joint.cut(whole)


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
