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
from glassformer.serving.app import Api, make_api
from glassformer.serving.computing import Computer, Served
from glassformer.serving.server import chats

PIECE = 128
"""Tokens of a text that are read at once for the next token's distribution."""
SHOWN = 16
"""Tokens of a distribution that a page shows."""
SLOTS, CONTEXT = 4, 2048
"""Texts of a model that are computed at once, and tokens of each."""
BYTES = 4
"""Bytes of a weight in memory."""


def installed() -> list[str]:
    """Returns the names of checkpoints that are installed as packages."""
    return [name for name, (module, _) in PACKAGED.items() if find_spec(module) is not None]


def none_trained() -> dict[str, Path]:
    """Returns no runs."""
    return {}


class Models:
    """The models that a page may name: those that are installed, the one that the studio was started with, and the
    finished runs of its folder, which `trained` lists by the path that commands take."""

    def __init__(self, own: str | None, trained: Callable[[], dict[str, Path]] = none_trained) -> None:
        self.names = list(dict.fromkeys([*([own] if own else []), *installed()]))
        self.trained = trained
        self._written: dict[str, float] = {}
        self.api = Api(Computer([]))
        self.app: Starlette = make_api(self.api)
        self._loading = threading.Lock()

    def served(self, name: str) -> Served:
        """Returns a model, loaded when it is first asked for, and again if its run has been trained on. Raises
        RequestError for one without weights or too large for the memory, and for any other name: a page names no
        file."""
        with self._loading:
            written = self._written_at(name)
            if name not in self.api.models or self._written.get(name, written) != written:
                check_weights(name)
                loaded = load(name)
                self.api.add(Served(name, loaded, SLOTS, min(loaded.config.context, CONTEXT)))
            self._written[name] = written
            return self.api.models[name]

    def _written_at(self, name: str) -> float:
        """Returns the time at which a run was written; 0 for other models. Raises RequestError for an unknown name."""
        if name in self.names:
            return 0.0
        with suppress(OSError):
            if (run := self.trained().get(name)) is not None:
                return (run / "latest").stat().st_mtime
        raise RequestError(
            f"this studio has no model {shown(name)}; it has {', '.join(self.names) or 'none'}",
            code="unknown", field="model", value=shown(name),
        )  # fmt: skip

    def listed(self) -> list[dict[str, str]]:
        """Returns name, kind and label of each model; the kind is own, or run for a finished one of the folder."""
        kinds = dict.fromkeys(self.names, "own")
        kinds |= {name: "run" for name in self.trained() if name not in kinds}
        return [{"name": name, "kind": kind, "label": self._label(name)} for name, kind in kinds.items()]

    def _label(self, name: str) -> str:
        """Returns the name that a page shows: of a run, its comparison and its folder there."""
        parts = Path(name).parts
        return name if name in self.names or len(parts) < 4 else f"{parts[-4]}: {parts[-2]}"

    def about(self, name: str) -> dict[str, Any]:
        """Returns what a page must know of a model, which is loaded for it."""
        served = self.served(name)
        return {
            "name": name, "label": self._label(name), "chats": chats(served), "generates": served.session is not None,
            "context": served.context, "parameters": f"{served.loaded.config.num_params():,}",
        }  # fmt: skip

    def close(self) -> None:
        """Ends the thread that computes."""
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
    """Returns the most likely next tokens with their probabilities, of the model and after the sampling settings.

    At temperature 0 the most likely token is certain. Raises RequestError."""
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
