"""Claims measured and stored, and all that is stored of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glassformer.errors import RequestError
from glassformer.laboratory.claims.bench import TINY, Bench, Text
from glassformer.laboratory.claims.catalogue import known, named
from glassformer.laboratory.claims.claim import Claim
from glassformer.laboratory.claims.stored import Stored, read, write
from glassformer.runs.events import Notify, StageEvent
from glassformer.runs.executor import Executor
from glassformer.runs.live import shown

RUNS = "runs"
"""Folder of the models that are trained for claims, beside their results."""


def claims(
    names: Sequence[str] | str = (),
    out: str | Path = "claims",
    *,
    quick: bool = False,
    tiny: bool = False,
    data: str | Path | None = None,
    seeds: int | None = None,
    again: bool = False,
    executor: Executor | None = None,
    progress: bool | Notify = True,
) -> dict[str, Stored]:
    """Measures published claims, and gives what was found, by name.

    names    of claims; none: all, but for those whose text is not given
    quick    exact claims alone: counts and identities, which take seconds
    out      the folder of the results, FOLDER/NAME.json; what it holds is kept, and what was broken off goes on
    again    measures also what `out` holds, from the runs there that have finished: to train them anew, name another
    tiny     a few steps of two seeds, to see that it runs: the verdict of what is trained is then open
    data     the text that models are trained on, by default python-docs; claims about a text of their own need it
    progress as in `compare`

    Raises RequestError for an unknown claim, for one whose text is missing, and for one that `out` holds from another
    text or other seeds than those given, before anything is measured.
    """
    chosen = named([names] if isinstance(names, str) else names)
    for claim in chosen:
        if claim.needs and data is None:
            raise missing(claim)
    if not chosen:
        chosen = [claim for claim in known().values() if data is not None or not claim.needs]
    if quick:
        chosen = [claim for claim in chosen if claim.quick]
    with shown(progress) as notify:
        return _measured(chosen, Path(out), Text(data, notify), tiny, seeds, again, executor, notify)


def _measured(
    chosen: Sequence[Claim], folder: Path, text: Text, tiny: bool, seeds: int | None, again: bool,
    executor: Executor | None, notify: Notify,
) -> dict[str, Stored]:  # fmt: skip
    found: dict[str, Stored] = {}
    kept = {} if again else {claim.name: read(folder, claim.name) for claim in chosen}
    for one in kept.values():
        if one is not None:
            one.check_asked(folder, None if text.given is None else text.name, seeds)
    for claim in chosen:
        held = kept.get(claim.name)
        if held is None or not held.answers(claim, tiny):
            notify(StageEvent(words=f"{claim.name}: about {claim.minutes:g} min"))
            place = folder / RUNS / (f"{claim.name}{TINY}" if tiny else claim.name)
            bench = Bench(place, text, tiny, seeds, executor, notify)
            began = time.perf_counter()
            outcome = claim.measure(bench)
            held = Stored.of(claim, outcome, time.perf_counter() - began, tiny, text.name, seeds)
            write(held, folder)
        found[claim.name] = held
        notify(StageEvent(words=f"{claim.name}: {held.words}"))
    return found


def missing(claim: Claim) -> RequestError:
    return RequestError(
        f"{claim.name} is about {claim.needs}, which is not here; give the file as --data FILE",
        code="missing", field="data", value=None, expected=claim.needs,
    )  # fmt: skip


def overview(folder: Path, besides: Path | None = None) -> list[dict[str, Any]]:
    """All claims as plain data, with what is stored of each: for the terminal, a page, and programs.

    measured, low, high   of the first figure that is judged, with its interval
    verdict               "holds", "does not hold", "cannot be shown at this size"; None: not measured
    result                all that is stored, of `folder`, or else of the folder `besides`
    """
    rows = []
    for claim in known().values():
        stored = (read(place, claim.name) for place in (folder, besides) if place is not None)
        held = next((one for one in stored if one is not None and one.answers(claim, tiny=True)), None)
        judged = next((one for one in held.outcome.figures if one.judged), None) if held else None
        rows.append({
            "name": claim.name, "statement": claim.statement, "source": claim.source, "published": claim.published,
            "kind": claim.kind, "size": claim.size, "minutes": claim.minutes, "needs": claim.needs,
            "measured": judged and judged.value, "low": judged and judged.low, "high": judged and judged.high,
            "verdict": held and held.verdict,
            "result": held and held.model_dump(mode="json") | {"words": held.words},
        })  # fmt: skip
    return rows
