"""Watch of a training run: statistics at an interval, spikes at every step, and detail around spikes.

Watching does not change the run: values come from a separate pass over a few sequences of the batch, in evaluation mode
and without gradients, and from the existing gradients and weights. `weight_norm`, `gradient_norm` and `gradient_rms` go
into a ring at every step. At a spike the whole ring is written, so that these three are known for each of the RING
steps before; the step of the spike and the DENSE steps after it are recorded in full, one by one. Activations, updates
and spectra are not in the ring, because they cost a pass: before a spike they are known only at the interval. The
windows of the spike detectors and the ring are part of the checkpoint.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from glassformer.dynamics.probe import probe
from glassformer.dynamics.records import Records
from glassformer.dynamics.spikes import Spikes
from glassformer.dynamics.weights import named_matrices, pulse, rows_of, spectra, updates
from glassformer.errors import RequestError
from glassformer.introspection import looking, sites
from glassformer.machine.threads import paced
from glassformer.model import Model
from glassformer.parts.loss import IGNORED

RING = 64
"""Steps before a spike whose norms are kept."""
GRADIENT_TIMES = 10.0
"""Minimum ratio of a spike of the gradient norm to its forecast; smaller ones are usual for text (see Spikes)."""
DENSE = 16
"""Steps after a spike that are recorded one by one."""
SPECTRA = 8
"""Number of records of all other statistics between two of the weights' spectra, which cost the most and move the
least."""
PROBE_TOKENS, PROBE_LENGTH = 256, 1024
"""Maximum tokens of a batch that are run again for statistics, in whole sequences and at least one; maximum length of a
sequence."""
BATCH_TOKENS = 4096
"""Maximum tokens of a batch that are run at once, to find the sequences with the largest losses."""
SHOWN = 3
ROUNDED_AT = 10
"""Step at which weights are checked for lost bits: by then each has moved."""
ROUNDED, FOLLOWING, KNOWN = 0.999, 0.9, 0.8
"""Shares: of weights that a short format represents exactly, above which bits are lost; of targets that are the next
inputs, below which they are not the next tokens; of the loss of a uniform guess, below which a model has learned enough
to detect rubbish."""
NEARLY = 0.9
"""Share of the way from the mean loss to that of a uniform guess, above which a sequence is rubbish. Tables and
drawings of a healthy text reached 0.75; noise costs more than a uniform guess."""
LONGEST_TEXT = 240


@dataclass
class Moment:
    """State of one training step, for the watch and for callbacks."""

    step: int
    """Number of the step, from 1."""
    loss: float
    grad_norm: float
    """Gradient norm before clipping."""
    learning_rate: float
    inputs: Tensor
    targets: Tensor
    model: Model
    optimizer: torch.optim.Optimizer
    beside: dict[str, Tensor] = field(default_factory=dict)
    """Further inputs of the model, by the names of `Model.loss`, with a row for each sequence."""

    def given(self, rows: slice) -> dict[str, Any]:
        """Returns the further inputs of the sequences `rows`, on the model's device."""
        return {name: tensor[rows].to(self.model.device) for name, tensor in self.beside.items()}

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Watch:
    """Watch of a model in training: call `before_update` and `after_update` around every step of the optimizer.

    `every`: steps between statistics; None for spikes only. `records` receives the rows; without it events are only
    returned. `autocast` is the context the run computes in, `decode` turns tokens into text. Call `not_finite` for a
    step whose loss or gradient norm is not finite, and `skipped` in place of `after_update` for a step that the
    optimizer does not take.

    >>> config = gf.preset("llama@1m+layers=2+d_model=32+heads=2+vocab_size=65+context=32")
    >>> model = config.build(seed=0)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> records = gf.dynamics.Records(Path("dynamics.jsonl"))
    >>> watch, metrics = gf.dynamics.Watch(model, every=25, records=records), []
    >>> for step in range(1, 101):
    ...     tokens = torch.randint(65, (4, 33))
    ...     inputs, targets = tokens[:, :-1], tokens[:, 1:]
    ...     loss = model.loss(inputs, targets)
    ...     loss.backward()
    ...     norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf))  # measured, not clipped
    ...     moment = gf.dynamics.Moment(step, loss.item(), norm, 1e-3, inputs, targets, model, optimizer)
    ...     for event in watch.before_update(moment):
    ...         print(event)  # a spike
    ...     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    ...     optimizer.step()
    ...     watch.after_update(moment)
    ...     optimizer.zero_grad()
    ...     metrics.append({"step": step, "loss": loss.item(), "grad_norm": norm, "learning_rate": 1e-3})
    >>> records.close()
    >>> found = gf.dynamics.diagnose(metrics, gf.dynamics.read_records(records.path), config)
    >>> print(found.verdict)
    nothing wrong
    """

    def __init__(
        self,
        model: Model,
        every: int | None = None,
        records: Records | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        decode: Callable[[list[int]], str] | None = None,
    ):
        if every is not None and every < 1:
            raise RequestError(
                f"watch={every} must be at least 1: it is the number of steps between looks",
                code="range", field="watch", value=every,
            )  # fmt: skip
        self.model, self.every, self.records = model, every, records
        self.autocast, self.decode = autocast, decode
        self.spikes = {"loss": Spikes(), "grad_norm": Spikes(sigma=6.0, log=True, times=GRADIENT_TIMES)}
        self.matrices = named_matrices(model)
        self.whole = model.embedding is not None and model.head is not None
        """True if all layers are on this rank, so that a pass can be observed."""
        self.ring: deque[dict[str, Any]] = deque(maxlen=RING)
        self.written: list[int] = []
        """Last steps whose rows of statistics were written, at most RING."""
        self.dense_until = 0
        self.before: dict[int, Tensor] = {}
        self.spiked: list[dict[str, Any]] = []
        """Spikes of the last step, or its event of a value that is not finite."""
        self.latest: dict[str, Any] | None = None
        """Latest row with all statistics; None before the first."""

    def before_update(self, moment: Moment) -> list[dict[str, Any]]:
        """Records norms and spikes of a step, before clipping and before the weights move. Returns the events of its
        spikes."""
        found = []
        for what, spikes in self.spikes.items():
            value = getattr(moment, what)
            if (sigmas := spikes.see(value)) is not None:
                found.append({"step": moment.step, "event": "spike", "what": what, "value": value, "sigmas": sigmas})
        self.spiked = found
        if found:
            self.dense_until = moment.step + DENSE
            found[0] |= self._batch(moment)
        if self.every is not None:
            with self._paced("norms"):
                norms = pulse(self.matrices)
            self.ring.append({"step": moment.step, "statistics": norms})
            if self._due(moment.step):
                self.before = {id(one): one.detach().clone() for one in self._parameters()}
        if found:
            self._write(*(row for row in self._unwritten() if row["step"] < moment.step), *found)
        if moment.step == ROUNDED_AT:
            self._look_at_precision(moment.step)
        return found

    def check_targets(self, moment: Moment) -> list[dict[str, Any]]:
        """Returns the event of targets that are not the next tokens of their inputs, which would teach a model
        something else than to continue a text; empty for next tokens."""
        next_tokens, targets = moment.inputs[:, 1:], moment.targets[:, :-1]
        asked = targets != IGNORED
        share = 1 - float((next_tokens == targets)[asked].float().mean()) if asked.any() else 0.0
        if share <= 1 - FOLLOWING:
            return []
        event = {"step": moment.step, "event": "targets_not_next", "value": share}
        self._write(event)
        return [event]

    def after_update(self, moment: Moment) -> None:
        """Records updates and activations of a step at which statistics are due, and more rarely spectra of weights;
        otherwise does nothing."""
        if not self.before:
            return
        row = self.ring[-1]["statistics"]
        with self._paced("updates"):
            row |= updates(self.matrices, self.before)
        self.before = {}
        if moment.step == 1 or (self.every and moment.step % (SPECTRA * self.every) == 0):
            with self._paced("spectra"):
                row |= merged(row, spectra(self.matrices))
        rows = max(1, PROBE_TOKENS // moment.inputs.shape[1])
        with self._paced("probe"), self.autocast():
            row |= merged(row, probe(moment.model, *self._some(moment, rows)))
        self._write(self.ring[-1])
        self.latest = self.ring[-1]
        if self.every and moment.step % self.every == 0:
            self._look_for_rubbish(moment)

    def skipped(self, moment: Moment) -> None:
        """Records that the optimizer did not take the step."""
        self.before = {}
        self._write(*self._unwritten(), {"step": moment.step, "event": "skipped"})

    def rolled_back(self, step: int, to: int) -> list[dict[str, Any]]:
        """Records the return from `step` to the checkpoint of `to`, whose state this watch has restored. Rows of later
        steps no longer count, except the spikes that caused the return. Returns the event."""
        self.before = {}
        event = {"step": to, "event": "rolled_back", "from": step, "to": to}
        self._write(*({**one, "step": to, "from": step} for one in self.spiked), event)
        return [event]

    def not_finite(self, moment: Moment) -> dict[str, Any]:
        """Records a loss or gradient that is not finite, with its first site. Returns the event."""
        what = "loss" if not math.isfinite(moment.loss) else "grad_norm"
        event = {"step": moment.step, "event": "not_finite", "what": what, "value": getattr(moment, what)}
        event["site"] = self._first_not_finite(moment)
        event |= self._in_float32(moment)
        event |= self._batch(moment)
        self.spiked = [event]
        self._write(*self._unwritten(), event)
        return event

    def ended(self, step: int, why: str) -> None:
        """Records that the run ended because it diverged, with the reason `why`."""
        self._write(*self._unwritten(), {"step": step, "event": "diverged", "what": "loss", "why": why})

    # State

    def state(self) -> dict[str, Any]:
        """Returns the detectors' windows, the ring and the steps written, as JSON can hold them, for `restore`."""
        return {
            **{what: spikes.state() for what, spikes in self.spikes.items()},
            "ring": list(self.ring),
            "written": list(self.written),
            "dense_until": self.dense_until,
        }

    def restore(self, state: Any) -> None:
        """Restores the watch from `state()`. Raises RequestError for an invalid state."""
        rows = state.get("ring") if isinstance(state, dict) else None
        if not isinstance(rows, list) or not all(_is_row(row) for row in rows):
            raise RequestError(
                "the state of the watch is damaged: it has no ring of rows", code="damaged", field="state.ring"
            )
        written = state.get("written")
        if not isinstance(written, list) or any(type(step) is not int for step in (*written, state.get("dense_until"))):
            raise RequestError(
                "the state of the watch is damaged: it does not say what is written",
                code="damaged", field="state.written",
            )  # fmt: skip
        for what, spikes in self.spikes.items():
            spikes.restore(state.get(what))
        self.ring = deque(rows, maxlen=RING)
        self.written, self.dense_until = written[-RING:], state["dense_until"]

    # Statistics and events

    def _parameters(self) -> list[Tensor]:
        return [matrix.parameter for matrix in self.matrices.values()]

    def _paced(self, what: str) -> AbstractContextManager[None]:
        """Returns a context whose time is measured apart and does not count as training."""
        return paced(self.model, f"watch: {what}", free=False, apart=True)

    def _due(self, step: int) -> bool:
        return step == 1 or step <= self.dense_until or (self.every is not None and step % self.every == 0)

    def _unwritten(self) -> list[dict[str, Any]]:
        return [row for row in self.ring if row["step"] not in self.written]

    def _write(self, *rows: dict[str, Any]) -> None:
        for row in rows:
            if "statistics" in row:
                self.written = [*self.written[1 - RING :], row["step"]]
            if self.records is not None:
                self.records.write(row)

    def _here(self, tokens: Tensor) -> Tensor:
        return tokens.to(self.model.device)

    def _some(self, moment: Moment, rows: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the first `rows` sequences and their further inputs; without further inputs, cut to PROBE_LENGTH
        tokens."""
        inputs, given = moment.inputs[:rows], moment.given(slice(rows))
        if not given:
            inputs = inputs[:, :PROBE_LENGTH]
        return self._here(inputs), given

    def _batch(self, moment: Moment) -> dict[str, Any]:
        """Returns the texts and losses (nats per token) of the SHOWN sequences of the batch with the largest losses;
        empty without `records`."""
        if self.records is None:
            return {}
        losses: list[float] = []
        trains = moment.model.training
        moment.model.eval()
        with torch.no_grad(), self.autocast():
            for some in self._pieces(moment):
                x, y = moment.inputs[some], moment.targets[some]
                nats = moment.model.loss(self._here(x), self._here(y), reduction="none", **moment.given(some))
                nats = nats.view(len(y), -1).cpu()
                losses += (nats.float().sum(1) / (y.cpu() != IGNORED).sum(1)).tolist()
        moment.model.train(trains)
        worst = sorted(range(len(losses)), key=lambda row: -losses[row] if losses[row] == losses[row] else -math.inf)
        texts = [self._text(moment.inputs[row]) for row in worst[:SHOWN]]
        return {"batch": texts, "batch_losses": [losses[row] for row in worst[:SHOWN]]}

    def _text(self, tokens: Tensor) -> str:
        ids = tokens[:LONGEST_TEXT].tolist()
        text = self.decode(ids) if self.decode else " ".join(map(str, ids))
        return text[:LONGEST_TEXT]

    def _look_at_precision(self, step: int) -> None:
        """Records an event if nearly all weights are representable in a short format, in which small updates are
        lost."""
        moving = [one.detach() for one in self._parameters() if one.grad is not None]
        weights = [weight[weight != 0] for weight in moving]
        total = sum(weight.numel() for weight in weights)
        for dtype in (torch.bfloat16, torch.float16):
            kept = sum(int((weight.to(dtype) == weight).sum()) for weight in weights)
            if total and kept > ROUNDED * total:
                name = str(dtype).removeprefix("torch.")
                self._write({"step": step, "event": "rounded_weights", "what": name, "value": kept / total})
                return

    def _look_for_rubbish(self, moment: Moment) -> None:
        """Records an event if the batch has a sequence whose loss is nearly that of a uniform guess, once the mean loss
        is well below."""
        blind = math.log(max(2, moment.model.vocab_size)) if self.whole else 0.0
        if self.records is None or not moment.loss < KNOWN * blind:
            return
        with self._paced("batch"):
            found = self._batch(moment)
        if (worst := found["batch_losses"][0]) > moment.loss + NEARLY * (blind - moment.loss):
            self._write({"step": moment.step, "event": "unlike_sequence", "value": worst, **found})

    def _in_float32(self, moment: Moment) -> dict[str, Any]:
        """Returns {"finite_in_float32": True if loss and gradients of the batch are finite in float32}; empty for a run
        that already computes in float32, or a rank without the whole model."""
        with self.autocast():
            lower = torch.is_autocast_enabled(moment.model.device.type)
        if not lower or not self.whole:
            return {}
        parameters = [one for one in moment.model.parameters() if one.requires_grad]
        for some in self._pieces(moment):
            inputs, targets = self._here(moment.inputs[some]), self._here(moment.targets[some])
            with torch.enable_grad():
                loss = moment.model.loss(inputs, targets, **moment.given(some))
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            if not all(torch.isfinite(one).all() for one in (loss, *gradients) if one is not None):
                return {"finite_in_float32": False}
        return {"finite_in_float32": True}

    def _pieces(self, moment: Moment) -> Iterator[slice]:
        """Returns an iterator over slices of the batch: the sequences that are run at once."""
        rows = max(1, BATCH_TOKENS // moment.inputs.shape[1])
        return (slice(first, first + rows) for first in range(0, len(moment.inputs), rows))

    def _first_not_finite(self, moment: Moment) -> str | None:
        """Returns the first place, in the order of computation, with a value that is not finite: a weight, a site, a
        gradient."""
        for name, matrix in self.matrices.items():
            if not torch.isfinite(rows_of(matrix, matrix.parameter)).all():
                return f"{name} (its weights)"
        first: list[str] = []

        def look(name: str) -> Callable[[Tensor, int, int], None]:
            def see(x: Tensor, _: int, __: int) -> None:
                if not first and not torch.isfinite(x).all():
                    first.append(name)

            return see

        if not self.whole:
            return None
        names: Iterable[str] = (name for name in sites(moment.model) if not name.endswith((".scores", ".pattern")))
        with torch.no_grad(), self.autocast(), looking(moment.model, {name: look(name) for name in names}):
            for i in range(len(moment.inputs)):
                moment.model(self._here(moment.inputs[i : i + 1]), **moment.given(slice(i, i + 1)))
                if first:
                    return first[0]
        for name, matrix in reversed(self.matrices.items()):
            grad = matrix.parameter.grad
            if grad is not None and not torch.isfinite(rows_of(matrix, grad)).all():
                return f"{name} (its gradient)"
        return None


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and type(row.get("step")) is int and isinstance(row.get("statistics"), dict)


def merged(row: dict[str, Any], more: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns each statistic of `more`, with the places that `row` has for it and the places of `more`, which
    prevail."""
    return {name: {**row.get(name, {}), **places} for name, places in more.items()}
