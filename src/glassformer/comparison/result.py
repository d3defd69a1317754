"""`Comparison`: the results of a comparison as a value."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Self

from rich.console import RenderableType

from glassformer.comparison.design import FILE, VERB, Design
from glassformer.comparison.terminal import comparison_lines
from glassformer.config import read_tree
from glassformer.errors import Code, RequestError, WorkError, shown
from glassformer.figures.terminal import Reported, Tabular, unbroken
from glassformer.names.places import CONFIG
from glassformer.report import render
from glassformer.runs.files import RESULTS, read_results
from glassformer.runs.request import place_of
from glassformer.runs.results import Power, Results, RunResult, Tuning, Verdict


@dataclass(frozen=True)
class Comparison(Reported, Tabular):
    """A finished comparison; `print` shows its tables, verdicts and notes.

    Attributes
    ----------
    results : Results
        Content of results.json.
    design : Design
        The experiment.
    folder : Path or None
        Folder of results.json, report.html and design.yaml; None if nothing was written.

    Examples
    --------
    >>> found = gf.compare(["gpt2@0.3m", "llama@0.3m"], "tiny.txt", tokens="4k", context=32, batch_size=4, seeds=2)
    >>> [run.status for run in found.runs]
    ['ok', 'ok', 'ok', 'ok']
    """

    results: Results
    design: Design
    folder: Path | None = None

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Reads the comparison in a folder.

        Parameters
        ----------
        folder
            Folder of results.json and design.yaml, as `compare` writes them.

        Returns
        -------
        Comparison
            The comparison.

        Raises
        ------
        RequestError
            For a folder of another kind or without a comparison, and for damaged files.

        Examples
        --------
        >>> gf.Comparison.load("comparison").best  # doctest: +SKIP
        """
        place = Path(folder)
        if not (place / RESULTS).is_file():
            raise _other_kind(place)
        tree = read_tree(place / FILE) if (place / FILE).is_file() else {}
        if isinstance(tree, dict) and (verb := tree.get("verb", VERB)) != VERB:
            message = f"{place} holds results of {shown(verb)}, not of compare; open {place / 'report.html'}"
            raise RequestError(message, code="conflict", field="folder", value=str(place))
        results = read_results(place)
        assert results is not None  # the file exists
        return cls(results, Design.from_file(place / FILE), place)

    @property
    def page(self) -> Path | None:
        """Path of the report; None if nothing was written."""
        return None if self.folder is None else self.folder / "report.html"

    @property
    def verdicts(self) -> list[Verdict]:
        """Verdicts on pairs of arms, with simultaneous intervals."""
        return self.results.verdicts

    @property
    def runs(self) -> list[RunResult]:
        """Runs, sorted by seed and then in the order of the arms."""
        return self.results.runs

    @property
    def best(self) -> str | None:
        """Name of the model whose verdict against every other model is that it is better; None without such a model."""
        return self.results.best

    @property
    def tuning(self) -> Tuning | None:
        """Record of how the learning rates were chosen; None without tuning."""
        return self.results.tuning

    @property
    def power(self) -> Power | None:
        """Estimate of the seeds and hours that show a difference of the requested size; None without a request."""
        return self.results.power

    def html(self) -> str:
        return render(self.results)

    def lines(self) -> Iterator[str | RenderableType]:
        """Yields tables, verdicts and notes, the place of the report, and the command that diagnoses a diverged run."""
        yield from comparison_lines(self.results)
        if self.page is not None:
            yield unbroken(f"report: {self.page}")
        lost = next((run for run in self.runs if run.status == "diverged"), None)
        if lost is not None and self.folder is not None:
            yield unbroken(f"next: glassformer why {quote(str(place_of(self.folder, lost.name, lost.seed)))}")

    def without_notes(self, known: Collection[str]) -> Self:
        """Returns the comparison without some of its notes.

        Parameters
        ----------
        known
            Notes to leave out.

        Returns
        -------
        Comparison
            A copy.

        Examples
        --------
        >>> found.without_notes(found.results.budget.notes).results.budget.notes
        []
        """
        budget = self.results.budget
        notes = [note for note in budget.notes if note not in known]
        return replace(self, results=self.results.changed(budget=budget.changed(notes=notes)))

    def check(self) -> None:
        """Raises WorkError if a run failed. A run that diverged is a valid result."""
        if failed := [one for one in self.runs if one.status == "failed"]:
            first = failed[0]
            name = first.name if self.results.budget.seeds == 1 else f"{first.name} seed {first.seed}"
            place = "" if self.page is None else f"; the report is at {self.page}"
            raise WorkError(
                f"{len(failed)} of {len(self.runs)} runs failed: {name}: {first.error}{place}", code="failed"
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of results.json."""
        return self.results.to_dict()

    def records(self) -> list[dict[str, Any]]:
        """Returns one row (`row_of`) for each run: name, seed, status, sizes, loss and costs."""
        return [row_of(run) for run in self.results.paced]


def row_of(run: RunResult) -> dict[str, Any]:
    """Returns a run as one flat row: name, seed, status, error, sizes, held-out loss, learning rate, and costs of
    training and of generation; None for missing values."""
    train, validation, generation = run.train, run.validation, run.generation
    return {
        "name": run.name,
        "seed": run.seed,
        "status": run.status,
        "parameters": run.parameters,
        "parameters_without_embeddings": run.parameters_without_embeddings,
        "flops_per_token": run.flops_per_token,
        "loss": None if validation is None else validation.loss,
        "perplexity": None if validation is None else validation.perplexity,
        "bits_per_byte": None if validation is None else validation.bits_per_byte,
        "learning_rate": None if train is None else train.learning_rate,
        "steps": None if train is None else train.steps,
        "tokens": None if train is None else train.tokens,
        "seconds": None if train is None else train.seconds,
        "tokens_per_second": None if train is None else train.tokens_per_second,
        "peak_memory_bytes": None if train is None else train.peak_memory_bytes,
        "seconds_per_generated_token": None if generation is None else generation.seconds_per_token,
        "state_bytes_per_token": None if generation is None else generation.state_bytes_per_token,
        "error": run.error,
    }


def _other_kind(place: Path) -> RequestError:
    """Returns the RequestError for a folder without results.json, which says what the folder is instead."""
    found = (
        "does not exist" if not place.exists()
        else "is a file" if not place.is_dir()
        else "is a run: gf.load reads its model, gf.why its records" if (place / "recipe.yaml").is_file()
        else "is a checkpoint: gf.load reads it" if (place / CONFIG).is_file()
        else f"holds no {RESULTS}"
    )  # fmt: skip
    kind: Code = "missing" if not place.exists() else "conflict"
    return RequestError(
        f"{place} {found}; name a folder that compare has written", code=kind, field="folder", value=str(place)
    )
