"""Result of a training run, and its reader."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from glassformer.config import ModelConfig, read_tree
from glassformer.errors import RequestError, WorkError
from glassformer.figures.terminal import Tabular, clock, decimals, unbroken
from glassformer.loaded import Loaded
from glassformer.machine import Settings
from glassformer.model import Model
from glassformer.names.places import no_config
from glassformer.parts.core.base import part_classes
from glassformer.parts.core.outside import import_options
from glassformer.text import Tokenizer, load_tokenizer
from glassformer.text.chat_template import ChatTemplate
from glassformer.text.pairs import START, as_trained
from glassformer.training import checkpoint
from glassformer.training.evaluate import Scored
from glassformer.training.recipe import Recipe
from glassformer.training.repeats import MOST_PASSES
from glassformer.units import plural

EXPECTED = (
    (1.7, "fluent sentences"), (2.4, "real words, in sentences that make little sense"),
    (3.0, "words, about half of them real"), (math.inf, "letters in a likely order, and hardly a word"),
)  # fmt: skip
"""Bits per byte of English, at most -> text that such a model generates. nanoGPT's characters of Shakespeare: 2.7 (loss
1.88) and 2.1 (loss 1.47), samples in its README."""
USUAL_RATIO = 20
"""Tokens per parameter of a compute-optimal run (Hoffmann et al. 2022, 2203.15556)."""
UNNOTICED = 20
"""Seconds of work other than training, at most, that the end of a run does not mention."""
PROMPT_WORDS = 4
"""Words of the prompt in the commands that follow a run."""


class Interrupted(WorkError):
    """Error of a run that was stopped from outside; it is saved and can be resumed."""

    exit_status = 130


@dataclass
class Run(Tabular):
    """A training run that has finished or diverged; `print` shows its budget and held-out loss.

    Attributes
    ----------
    model : Model
        The trained model.
    config : ModelConfig
        Its config, with the vocabulary and the context of the text.
    tokenizer : Tokenizer
        Tokenizer of the text.
    recipe : Recipe
        Recipe of the run.
    steps : int
        Optimizer steps that were taken.
    tokens : int
        Tokens that were read.
    seconds : float
        Time of training.
    validation : dict or None
        Held-out measures of the trained model; None if the run diverged, or was not evaluated.
    how : Settings
        Device, dtype and compilation.
    folder : Path or None
        The run folder; None if nothing was written.
    error : str or None
        The reason why the run diverged.

    Examples
    --------
    >>> run = gf.train("llama@0.1m", "tiny.txt", tokens="2k", context=32, batch_size=4)
    >>> run.status, run.steps
    ('ok', 16)
    """

    model: Model
    config: ModelConfig
    tokenizer: Tokenizer
    recipe: Recipe
    status: str
    """Outcome: ok or diverged."""
    steps: int
    tokens: int
    seconds: float
    validation: dict[str, Any] | None
    metrics: list[dict[str, Any]] = field(repr=False)
    """Rows of metrics.jsonl."""
    how: Settings
    folder: Path | None = None
    error: str | None = None
    learning_rate: float = 0.0
    """Peak learning rate."""
    read: dict[str, int] = field(default_factory=dict)
    """Numbers of `tokens` read, and for pairs of the `sources` and `targets`, each with its end token."""
    answers: Any = field(default=None, repr=False)
    """`runs.results.Answers` to held-out sources; None for a run on text, or without a folder."""
    sample: Any = field(default=None, repr=False)
    """`runs.results.Sample` that the trained model wrote; None if it cannot generate, or without a folder."""
    spent: dict[str, float] = field(default_factory=dict, repr=False)
    """Kind of work -> its seconds in this process: loading, training, evaluating, sampling, saving."""
    passes: float | None = None
    """Number of times that the training text was read; None if the data is drawn without end."""
    scored: Scored | None = field(default=None, repr=False)
    """Sums of the evaluation of the trained model; None if another process evaluated it."""
    pretrained: bool = False
    """True if the run started from weights that were trained before."""

    def __post_init__(self) -> None:
        """Sets the token at which the model ends a text, as loading the run's folder does."""
        self.model.ends = () if self.tokenizer.eos_id is None else (self.tokenizer.eos_id,)

    @property
    def generation(self) -> dict[str, Any]:
        """Generation settings, as `Loaded` has them and `gf.save` takes them."""
        return written_from(self.config, self.tokenizer)

    @property
    def loaded(self) -> Loaded:
        """The trained model ready to generate, as `gf.load` reads it from the run's folder."""
        tokenizer = reading(self.config, self.tokenizer)
        return Loaded(self.model.eval(), self.config, tokenizer, generation=self.generation)

    @property
    def before(self) -> dict[str, Any] | None:
        """Held-out measures before the first step; None if the run was not evaluated then."""
        return next((row["validation"] for row in self.metrics[:1] if row["step"] == 0 and "validation" in row), None)

    @property
    def tokens_per_second(self) -> float:
        """Median tokens per second of the steps, so that a pause of the machine does not count."""
        rates = sorted(row["tokens_per_second"] for row in self.metrics if "tokens_per_second" in row)
        return rates[len(rates) // 2] if rates else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns status, budget and held-out measures as plain values."""
        return {
            "status": self.status, "error": self.error, "steps": self.steps, **self.read, "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second, "validation": self.validation,
            **({} if self.before is None else {"before": self.before}), "spent": self.spent,
            "run": None if self.folder is None else str(self.folder),
            **({} if self.answers is None else {"answers": self.answers.model_dump()}),
            **({} if self.sample is None else {"sample": self.sample.model_dump()}),
        }  # fmt: skip

    def lines(self) -> Iterator[Any]:
        """Yields the budget with the held-out loss, or the reason of the divergence, and the run folder."""
        if self.status == "ok" and self.validation is not None:
            nats = f", perplexity {self.validation['perplexity']:.2f}" if self.recipe.objective.in_nats else ""
            before = "" if self.before is None else f" (before training {self.before['loss']:.4f})"
            bits = self.validation["bits_per_byte"]
            sides = ", ".join(f"{self.read[side]:,} of {side}" for side in ("sources", "targets") if side in self.read)
            yield (
                f"{self.tokens:,} tokens{f' ({sides})' if sides else ''} in {clock(self.seconds)}, "
                f"{self.tokens_per_second:,.0f} tokens/s; held-out loss {self.validation['loss']:.4f}{before}{nats}"
                + ("" if bits is None else f", {decimals(bits)} bits per byte")
            )
        elif self.status != "ok":
            yield f"diverged after {plural(self.steps, 'step')}: {self.error}"
        if self.answers is not None:
            yield self.answers.words
        yield from self._expected()
        yield from self._spent()
        if self.folder is not None:
            yield unbroken(f"run: {self.folder}")
            if (page := self.folder / "report.html").is_file():
                yield unbroken(f"report: {page}")
            imports = "".join(f" {quote(word)}" for word in import_options(part_classes(self.config)))
            yield from (unbroken(f"next: {command}{imports}") for command in self._next(quote(str(self.folder))))

    def _expected(self) -> Iterator[str]:
        """Yields sentences on the kind of text to expect from the model at this loss, and on the tokens read per
        parameter if they are few."""
        bits = None if self.validation is None else self.validation["bits_per_byte"]
        if bits is None or self.sample is None or not self.recipe.objective.continues:
            return
        words = next(words for most, words in EXPECTED if bits <= most)
        ratio = self.tokens / max(1, self.config.num_params())
        short = (
            f"; it has read {ratio:.2g} tokens per parameter, where 20 are usual: more --tokens or --minutes help"
            if ratio < USUAL_RATIO and not self.pretrained else ""
        )  # fmt: skip
        if self.passes is not None and self.passes > MOST_PASSES:
            short = (
                f"; it has read the text {self.passes:.3g} times, and more than {MOST_PASSES} passes teach little: "
                "more text helps, not more --tokens"
            )
        yield f"at {decimals(bits)} bits per byte expect {words}{short}"

    def _spent(self) -> Iterator[str]:
        """Yields a sentence with the time of each kind of work, if training took less than half of the run."""
        total, training = sum(self.spent.values()), self.spent.get("training", 0.0)
        if total - training > max(training, UNNOTICED):
            spent = sorted(self.spent.items(), key=lambda one: -one[1])
            parts = ", ".join(f"{work} {clock(seconds)}" for work, seconds in spent if seconds >= 0.5)
            yield f"{clock(total)} in all: {parts}"

    def _next(self, folder: str) -> Iterator[str]:
        """Yields commands to type after this run, such as one that generates text."""
        if self.status != "ok":
            yield f"glassformer why {folder}"
            return
        if self.sample is not None:
            asked = [self.sample.prompt, self.sample.text or "a"]
            if self.answers is not None and self.answers.samples:
                asked = self.answers.samples[0][:2]
            prompt, answer = (quote(" ".join(text.split()[:PROMPT_WORDS])) for text in asked)
            encoded = self.config.encoder is not None
            if encoded:
                yield f"glassformer generate {folder} --source {prompt}"
                yield f"glassformer inspect {folder} --text {answer} --source {prompt}"
            else:
                options = ("--prompt ", "--text ") if asked[0].lstrip().startswith("-") else ("", "")
                for verb, option in zip(("generate", "inspect"), options, strict=True):
                    yield f"glassformer {verb} {folder} {option}{prompt}"
        if self.answers is not None and self.answers.labels:
            yield f"glassformer classify {folder} {quote(self.answers.samples[0][0])}"
        if ChatTemplate.of(self.tokenizer) is not None:
            yield f"glassformer chat {folder}"

    def check(self) -> None:
        """Raises WorkError if the run diverged."""
        if self.status != "ok":
            raise WorkError(f"the run diverged: {self.error}", code="diverged")

    def records(self) -> list[dict[str, Any]]:
        """Returns the curve: a row for each step and each evaluation."""
        return self.metrics


def load_run(path: str | Path) -> Loaded:
    """Loads the latest checkpoint of a run folder. Raises RequestError if the run has no checkpoint or a damaged
    one."""
    folder = Path(path)
    if not folder.is_dir():
        raise RequestError(f"the run folder {folder} is missing", code="missing", field="run", value=str(folder))
    if not (folder / "config.yaml").is_file():
        raise no_config(folder)
    config = ModelConfig.from_file(folder / "config.yaml")
    found = checkpoint.latest(folder)
    if found is None:
        raise RequestError(f"{folder} has no checkpoint yet", code="missing", field="run.checkpoints")
    model = config.build(seed=None)
    checkpoint.load_model(found, model)
    tokenizer = reading(config, load_tokenizer(folder))
    return Loaded(model.eval(), config, tokenizer, generation=written_from(config, tokenizer))


def training_of(name: str) -> dict[str, Any] | None:
    """Returns the number of steps and the recipe of the model in a run folder; None if `name` does not name one."""
    path = Path(name)
    if not (path / "latest").is_file() or not (path / "recipe.yaml").is_file():
        return None
    found = checkpoint.latest(path)
    steps = checkpoint.read_state(found)["step"] if found else 0
    return {"steps": steps, "recipe": read_tree(path / "recipe.yaml")}


def reading(config: ModelConfig, tokenizer: Tokenizer) -> Tokenizer:
    """Returns the tokenizer with which the model reads texts as in training: it ends sources and embedded texts with
    the end token."""
    return as_trained(tokenizer) if config.encoder is not None or config.head.vector else tokenizer


def written_from(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns generation settings: the start token of a target that is generated from a source, as in training; empty
    without an encoder."""
    return {} if config.encoder is None or tokenizer.eos_id is None else {START: tokenizer.eos_id}
