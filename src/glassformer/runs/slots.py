"""Several runs at once on one machine, each on a device of its own."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

from glassformer import machine
from glassformer.errors import RequestError
from glassformer.runs.events import Notify
from glassformer.runs.executor import Local
from glassformer.runs.workers import Training

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Slots(Local):
    """`Local` with one run at a time on each of `devices`, such as cuda:0 and cuda:1. A device that is named twice has
    two runs, whose speeds are then not judged.

    Raises RequestError for a device that is not on this machine, and where runs ask for another one (`device`)."""

    def __init__(self, devices: Sequence[str], device: str = "auto"):
        if not devices:
            raise RequestError(code="missing", field="slots", value="", expected="devices such as cuda:0,cuda:1")
        named = [_device(name) for name in devices]
        super().__init__(len(named))
        self.shared = max(Counter(named).values()) > 1
        self.free = deque(named)
        if wrong := [one for one in named if device not in ("auto", one.split(":")[0])]:
            raise RequestError(
                f"device={device} and slots={','.join(named)} do not go together; leave the device out",
                code="conflict", field="device", value=device, expected=f"auto or {wrong[0].split(':')[0]}",
            )  # fmt: skip

    def training(self, place: Path) -> Training:
        return _OnDevice(place, self.free)


class _OnDevice(Training):
    """Takes a free device, and gives it back."""

    def __init__(self, place: Path, free: deque[str]):
        self.device, self.free = free.popleft(), free
        super().__init__(place, {VISIBLE: _visible(self.device)})

    def run(self, notify: Notify) -> tuple[str | None, int]:
        try:
            return super().run(notify)
        finally:
            self.free.append(self.device)


def _device(name: str) -> str:
    """The device of a slot, by number where it is a graphics card."""
    named = machine.device_named(name)
    if named != "cpu" and not named.startswith("cuda"):
        raise RequestError(f"slots={name}: use cpu, or cuda:0 and so on", field="slots", value=name, code="unknown")
    return "cuda:0" if named == "cuda" else named


def _visible(device: str) -> str:
    """What the process of a run is to see of the graphics cards."""
    if device == "cpu":
        return ""
    seen = [one for one in os.environ.get(VISIBLE, "").split(",") if one]
    number = int(device.split(":")[1])
    return seen[number] if number < len(seen) else str(number)
