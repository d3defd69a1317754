"""Stored results of claims: FOLDER/NAME.json, with machine and date; the verdict is computed from the measured
values."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from glassformer import machine
from glassformer.errors import RequestError
from glassformer.files import Written, replace_text
from glassformer.laboratory.evidence.bench import DATA
from glassformer.laboratory.evidence.claim import Claim
from glassformer.laboratory.evidence.figure import OPEN, Figure, Kind, Outcome, Verdict, verdict

LARGEST = 1 << 20
"""Most bytes of a result that is read; results here have a few thousand."""
NUMBERS = re.compile(r"\[[\d\s.,e+-]+\]")
"""Pattern of the values of a curve, which the file has on one line."""
MEASURED = Path(__file__).parents[1] / "measured"
"""Folder of the results that come with the library."""
SHORT = ("processor", "cores", "torch", "glassformer")
"""Keys of a machine's description that are shown next to a verdict."""


class Stored(Written):
    """Stored result of a claim: the claim's definition at the time, the outcome, place and date."""

    name: str
    statement: str
    source: str
    published: str
    kind: Kind
    tiny: bool
    data: str = DATA
    """Name of the training text."""
    seeds: int | None = None
    """Requested seeds of each arm; None for the claim's default."""
    verdict: Verdict
    outcome: Outcome
    machine: dict[str, Any]
    measured: str
    seconds: float

    @classmethod
    def of(
        cls, claim: Claim, outcome: Outcome, seconds: float, tiny: bool, data: str = DATA, seeds: int | None = None
    ) -> Stored:
        here = machine.machine()
        return cls(
            name=claim.name, statement=claim.statement, source=claim.source, published=claim.published,
            kind=claim.kind, tiny=tiny, data=data, seeds=seeds,
            verdict=verdict(claim.kind, outcome.figures, tiny), outcome=outcome,
            machine={name: here[name] for name in SHORT},
            measured=datetime.now(UTC).date().isoformat(), seconds=round(seconds, 1),
        )  # fmt: skip

    def answers(self, claim: Claim, tiny: bool) -> bool:
        """Returns True if this result is of the claim as it is defined now, measured at the requested size."""
        held = (self.statement, self.published, self.kind)
        return held == (claim.statement, claim.published, claim.kind) and self.tiny <= tiny

    def check_asked(self, folder: Path, data: str | None, seeds: int | None) -> None:
        """Raises RequestError if the result is from another text or other seeds than requested. Exact results depend on
        neither."""
        if self.kind in ("exact", "undecidable"):
            return
        for field, held, asked in (("data", self.data, data), ("seeds", self.seeds, seeds)):
            if asked is not None and asked != held:
                own = "the number it takes" if held is None else held
                raise RequestError(
                    f"{folder / self.name}.json was measured with {field}={own}, and {field}={asked} is asked for; "
                    "name another folder (--out), or replace it with --again",
                    code="conflict", field=field, value=asked, expected=str(own),
                )  # fmt: skip

    @property
    def words(self) -> str:
        """Verdict with the scale of its measurement, as text; exact verdicts without a scale."""
        if self.verdict == OPEN or self.kind == "exact":
            return self.verdict
        return f"{self.verdict} at {self.outcome.size}"


def read(folder: Path, name: str) -> Stored | None:
    """Returns the result of a claim that the folder stores; None without a file. The verdict is computed from the
    measured values, not read from the file. Raises RequestError for a file of another format."""
    path = folder / f"{name}.json"
    try:
        if path.stat().st_size > LARGEST:
            raise RequestError(f"{path} is too large for a measured claim", code="range", field="out", value=str(path))
        found = Stored.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValidationError, UnicodeDecodeError, OSError):
        raise RequestError(
            f"{path} is not a measured claim; move it away, or name another folder", code="damaged", field="out",
            value=str(folder),
        ) from None  # fmt: skip
    return found.model_copy(update={"verdict": verdict(found.kind, found.outcome.figures, found.tiny)})


def quoted(name: str) -> tuple[Figure, ...]:
    """Returns the measured values that have bounds from the result of a claim that comes with the library; empty
    without such a result."""
    held = read(MEASURED, name)
    return () if held is None else tuple(figure for figure in held.outcome.figures if figure.judged)


def write(stored: Stored, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = NUMBERS.sub(lambda found: " ".join(found[0].split()), stored.model_dump_json(indent=1))
    replace_text(folder / f"{stored.name}.json", text + "\n")
