"""Looking inside: the values at named sites of one forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from glassformer.callable_module import make_callable
from glassformer.errors import RequestError, did_you_mean
from glassformer.model import Model
from glassformer.parts.site import Site


def sites(model: nn.Module) -> dict[str, Site]:
    """Public name -> site, in the order of the module tree: `embed`, `layers.3.mixer.pattern`, `logits`, ...

    A module that declares itself `transparent` lends its children to its parent."""

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, Site]]:
        for name, child in module.named_children():
            if isinstance(child, Site):
                yield prefix + (child.name or name), child
            else:
                yield from walk(child, prefix if getattr(child, "transparent", False) else f"{prefix}{name}.")

    return dict(walk(model, ""))


def capture(model: Model, tokens: Tensor, patterns: Iterable[str], **kwargs: object) -> dict[str, Tensor]:
    """{site: value} at every site that one of the shell-style `patterns` names, of model(tokens, **kwargs).

    >>> gf.capture(model, tokens, ["layers.*.mixer.pattern"])["layers.0.mixer.pattern"]   # (b, n, s, t)

    Values are detached. Raises RequestError for a pattern that names no site."""
    known = sites(model)
    chosen: dict[str, Site] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = {name: site for name, site in known.items() if fnmatchcase(name, pattern)}
        if not found:
            raise RequestError(f"no site is named {pattern!r}{did_you_mean(pattern, known)}")
        chosen |= found
    seen: dict[str, Tensor] = {}

    def record(name: str) -> object:
        def hook(module: nn.Module, args: object, value: Tensor) -> None:
            seen[name] = value.detach()

        return hook

    hooks = [site.register_forward_hook(record(name)) for name, site in chosen.items()]  # type: ignore[arg-type]
    try:
        with torch.no_grad():
            model(tokens, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: seen[name] for name in chosen if name in seen}


make_callable(__name__)
