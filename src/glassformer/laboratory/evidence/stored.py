"""Measured claims as files: FOLDER/NAME.json, with machine and date; the verdict is computed from the figures."""

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
"""Bytes of a result; ours have a few thousand."""
NUMBERS = re.compile(r"\[[\d\s.,e+-]+\]")
"""Values of a curve, a line of the file."""
MEASURED = Path(__file__).parents[1] / "measured"
"""The results that come with the library."""
SHORT = ("processor", "cores", "torch", "glassformer")
"""Of the description of a machine, what stands beside a verdict."""


class Stored(Written):
    """A claim as it was when it was measured, what was found, where and when."""

    name: str
    statement: str
    source: str
    published: str
    kind: Kind
    tiny: bool
    data: str = DATA
    """Name of the text that models were trained on."""
    seeds: int | None = None
    """Of each arm, where they were asked for; None: as many as the claim takes."""
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
        """Whether this is a measurement of the claim as it stands today, at the size that is asked for."""
        held = (self.statement, self.published, self.kind)
        return held == (claim.statement, claim.published, claim.kind) and self.tiny <= tiny

    def check_asked(self, folder: Path, data: str | None, seeds: int | None) -> None:
        """Raises RequestError where it was measured on another text or with other seeds than those asked for. What is
        exact depends on neither."""
        if self.kind in ("exact", "undecidable"):
            return
        for field, held, asked in (("data", self.data, data), ("seeds", self.seeds, seeds)):
            if asked is not None and asked != held:
                own = "as many as it takes" if held is None else held
                raise RequestError(
                    f"{folder / self.name}.json was measured with {field}={own}, and {field}={asked} is asked for; "
                    "name another folder (--out), or replace it with --again",
                    code="conflict", field=field, value=asked, expected=str(own),
                )  # fmt: skip

    @property
    def words(self) -> str:
        """The verdict with what it was shown at; only what is exact is said without."""
        if self.verdict == OPEN or self.kind == "exact":
            return self.verdict
        return f"{self.verdict} at {self.outcome.size}"


def read(folder: Path, name: str) -> Stored | None:
    """What is stored of a claim; None where nothing is. Its verdict follows from its figures, whatever the file says.
    Raises RequestError for a file that is none of ours."""
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
    """Returns the judged figures of a claim that comes measured with the library; none if no measurement does."""
    held = read(MEASURED, name)
    return () if held is None else tuple(figure for figure in held.outcome.figures if figure.judged)


def write(stored: Stored, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = NUMBERS.sub(lambda found: " ".join(found[0].split()), stored.model_dump_json(indent=1))
    replace_text(folder / f"{stored.name}.json", text + "\n")
