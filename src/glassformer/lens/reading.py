"""Base of readings: data about a model that prints itself, draws itself, and is saved to a file."""

from __future__ import annotations

import base64
import html
import io
import math
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from glassformer.errors import RequestError
from glassformer.figures.document import write_figure


@dataclass(frozen=True, eq=False, repr=False)
class Reading:
    """Base of all readings: a dataclass of tensors, numbers and words. A subclass defines its drawing and its text.

    In a notebook it shows its figure; `print` shows it in words; `to_dict` is plain JSON. It equals only itself."""

    title: ClassVar[str] = ""

    def __str__(self) -> str:
        return self.title

    def __repr__(self) -> str:
        first, _, _ = str(self).partition("\n")
        return f"{type(self).__name__}({first})"

    def draw(self, figure: Any) -> None:
        """Draws this reading on an empty matplotlib figure."""
        raise NotImplementedError

    def figure(self, width: float = 7.0, height: float = 4.5) -> Any:
        """Returns a matplotlib figure of this reading, of `width` x `height` inches. Raises RequestError without
        matplotlib."""
        made = blank(width, height)
        self.draw(made)
        return made

    def save(self, path: str | Path) -> None:
        """Saves the figure of this reading as .png, .svg, .pdf or another format of matplotlib, by the suffix.

        Raises RequestError for an unknown suffix and a missing folder, WorkError if the disk fails."""
        path, figure = Path(path), self.figure()
        known = [f".{kind}" for kind in figure.canvas.get_supported_filetypes()]
        if path.suffix.lower() not in known:
            raise RequestError(
                f"{str(path)!r} names no kind of picture; it may end in {', '.join(known)}",
                code="unknown", field="path", value=str(path),
            )  # fmt: skip
        if not path.parent.is_dir():
            raise RequestError(
                f"{str(path)!r} is in a missing folder; make {str(path.parent)!r} first",
                code="missing", field="path", value=str(path),
            )  # fmt: skip
        write_figure(figure, path, dpi=150)

    def to_dict(self) -> dict[str, Any]:
        return {one.name: plain(getattr(self, one.name)) for one in fields(self)}

    def _repr_html_(self) -> str:
        if find_spec("matplotlib") is None:
            return f"<pre>{html.escape(str(self))}</pre>"
        picture = io.BytesIO()
        self.figure().savefig(picture, format="png", dpi=110)
        coded = base64.b64encode(picture.getvalue()).decode("ascii")
        return f'<img alt="{self.title}" src="data:image/png;base64,{coded}">'


def blank(width: float, height: float) -> Any:
    """Returns an empty matplotlib figure of `width` x `height` inches, without a window."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RequestError(
            "figures are drawn by matplotlib; install it: pip install 'glassformer[figures]'",
            code="missing", field="matplotlib",
        ) from None  # fmt: skip
    return Figure(figsize=(width, height), layout="constrained")


def plain(value: Any) -> Any:
    """Returns the value as plain JSON: tensors as nested lists, with null for numbers that are not finite."""
    if isinstance(value, Tensor):
        value = value.detach().to("cpu", torch.float64 if value.is_floating_point() else None).tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
