"""Models with weights, loaded when a page first asks for one, and served by the API of `glassformer serve`."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from starlette.applications import Starlette

from glassformer import machine
from glassformer.errors import RequestError, shown
from glassformer.figures import fixed
from glassformer.figures.terminal import size
from glassformer.generation.sampling import Sampling, warp
from glassformer.names.known import PACKAGED
from glassformer.naming.loading import load
from glassformer.naming.models import preset
from glassformer.naming.resolve import has_weights
from glassformer.serving.app import Api, make_api
from glassformer.serving.computing import Computer, Served
from glassformer.serving.server import chats

PIECE = 128
"""Number of tokens of a text that are read at once for the distribution of the next token."""
SHOWN = 16
"""Number of tokens of a distribution that a page shows."""
SLOTS, CONTEXT = 4, 2048
"""Largest numbers of texts of a model that are computed at once, and of tokens of each."""
BYTES = 4
"""Bytes of a weight in memory."""


def installed() -> list[str]:
    """Returns the names of checkpoints that are installed as packages."""
    return [name for name, (module, _) in PACKAGED.items() if find_spec(module) is not None]


class Models:
    """Models with weights that a page may name: installed ones, the one that the studio was started with, and finished
    runs of its folder: `trained()` returns the latest as path -> folder, `folder_of(path)` the folder of any, None for
    another path. A model is loaded when it is first used."""

    def __init__(
        self, own: str | None, trained: Callable[[], dict[str, Path]], folder_of: Callable[[str], Path | None]
    ) -> None:
        self.names = list(dict.fromkeys([*([own] if own else []), *installed()]))
        self.trained, self.folder_of = trained, folder_of
        self._written: dict[str, float] = {}
        self.api = Api(Computer([]))
        self.app: Starlette = make_api(self.api)
        self._loading = threading.Lock()

    def served(self, name: str) -> Served:
        """Returns a model; loads it at the first call, and again after its run was continued. Raises RequestError for a
        model too large for the memory, and for a name that is not listed, because a page may not open other files."""
        with self._loading:
            written = self._written_at(name)
            if name not in self.api.models or self._written.get(name, written) != written:
                check_weights(name)
                loaded = load(name)
                self.api.add(Served(name, loaded, SLOTS, min(loaded.config.context, CONTEXT)))
            self._written[name] = written
            return self.api.models[name]

    def trained_here(self, name: str) -> bool:
        """Returns True for a model of this studio that has weights: False for an expression without, and for any other
        name, whose files are not opened."""
        if name in self.names:
            return name in self.api.models or has_weights(name)
        return self.folder_of(name) is not None

    def _written_at(self, name: str) -> float:
        """Returns the time of a run's latest checkpoint; 0 for a model that is not a run. Raises RequestError for an
        unknown name."""
        if name in self.names:
            return 0.0
        with suppress(OSError):
            if (run := self.folder_of(name)) is not None:
                return (run / "latest").stat().st_mtime
        raise RequestError(
            f"this studio has no model {shown(name)}; it has {', '.join(self.names) or 'none'}",
            code="unknown", field="model", value=shown(name),
        )  # fmt: skip

    def listed(self, also: Sequence[str] = ()) -> list[dict[str, str]]:
        """Returns name, kind and label of each model; the kind is "run" for a finished run of the folder, else "own".
        `also` are names that a link gave, of older runs, which are not looked for here."""
        kinds = dict.fromkeys(self.names, "own")
        kinds |= {name: "run" for name in [*self.trained(), *also] if name not in kinds}
        return [{"name": name, "kind": kind, "label": self.label(name)} for name, kind in kinds.items()]

    def label(self, name: str) -> str:
        """Returns the name that a page shows for a model: for a run, COMPARISON: RUN."""
        parts = Path(name).parts
        return name if name in self.names or len(parts) < 4 else f"{parts[-4]}: {parts[-2]}"

    def about(self, name: str) -> dict[str, Any]:
        """Loads a model; returns its name, label, context and parameters, and if it chats and generates."""
        served = self.served(name)
        return {
            "name": name, "label": self.label(name), "chats": chats(served), "generates": served.session is not None,
            "context": served.context, "parameters": f"{served.loaded.config.num_params():,}",
        }  # fmt: skip

    def close(self) -> None:
        """Stops the thread that computes for the models."""
        self.api.computer.stop()


def check_weights(name: str) -> None:
    """Raises RequestError if the weights of a model need more memory than is free."""
    needed, free = BYTES * preset(name).num_params(), machine.free_memory()
    if free is not None and needed > free:
        raise RequestError(
            f"the weights of {shown(name)} take {size(needed)}, and {size(free)} of memory are free",
            code="memory", field="model", value=shown(name), expected=f"at most {size(free)}",
        )  # fmt: skip


def read_next(served: Served, text: str) -> tuple[list[int], torch.Tensor]:
    """Returns the ids of a text and the logits (1, v) of the token after it. Raises RequestError for a text that is
    empty or too long."""
    if served.session is None:
        raise RequestError(f"{served.name} generates no text", code="unsupported", field="model", value=served.name)
    ids, _ = served.session.read(text)
    served.room(ids, None)
    model = served.loaded.model
    if not ids:
        raise RequestError("the text is empty; type at least one character", code="missing", field="text")
    with torch.inference_mode():
        state = model.init_state(1, len(ids))
        for part in torch.tensor([ids], device=model.device).split(PIECE, 1):
            logits = model(part, state)[:, -1]
    return ids, logits


def distribution(api: Api, served: Served, text: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the most likely next tokens with their probabilities, by the model and after the sampling settings
    `given`.

    At temperature 0 the most likely token has probability 1. Raises RequestError for wrong settings, and for a text
    that cannot be read."""
    sampling = Sampling(**given)
    ids, logits = read_next(served, text)
    model = logits.float().softmax(-1)[0]
    after = warp(logits, sampling, [torch.tensor(ids)], [len(ids)]).softmax(-1)[0]
    if sampling.temperature == 0:
        after = torch.nn.functional.one_hot(logits.argmax(-1)[0], logits.shape[-1]).float()
    best = torch.topk(model + 1e-9 * after, min(SHOWN, len(model))).indices.tolist()
    spelling = api.spellings[served.name]
    rows = [
        {"token": spelling.text(token), "before": _percent(model[token]), "after": _percent(after[token]),
         "share": round(float(after[token]), 4)}
        for token in best
    ]  # fmt: skip
    entropy = -(model * model.clamp_min(1e-30).log()).sum()
    return {
        "tokens": rows, "kept": int((after > 0).sum()), "vocabulary": f"{len(model):,}",
        "entropy": fixed(float(entropy), 2), "count": len(ids), **_how(served.name, text, given),
    }  # fmt: skip


def _percent(share: torch.Tensor) -> str:
    value = 100 * float(share)
    return "–" if value == 0 else f"{value:.1f} %" if value >= 0.1 else "< 0.1 %"


def _how(name: str, text: str, given: dict[str, Any]) -> dict[str, Sequence[str]]:
    flags = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in given.items())
    keywords = "".join(f", {key}={value}" for key, value in given.items())
    return {
        "commands": [f"glassformer generate {shlex.quote(name)} {shlex.quote(text)} {flags}".strip()],
        "python": [f"gf.load({name!r}).generate({text!r}{keywords})"],
    }
