"""Types of results.json and of the result.json of each run; `files` reads and writes them.

Fields that are not named here are kept when a file is read and written again. If a change of the fields would mislead
older readers, VERSION changes, and files of another version are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, RootModel, Strict, model_validator

from glassformer.errors import RequestError
from glassformer.files import SCHEMAS, Count, Measures, Written
from glassformer.thresholds import FROM_CONTEXT

VERSION = SCHEMAS["results"]
"""Value of `schema` in results.json and in result.json."""

Status = Literal["ok", "diverged", "failed", "stopped"]
"""Status of a run; `stopped`: a single run that can be resumed, on its page."""
Finding = Literal["a better", "b better", "equivalent", "no difference shown", "no verdict"]
"""Finding of a verdict; `no verdict`: fewer than two seeds of both arms finished, and divergence does not decide."""


def _of_both(counts: list[int]) -> list[int]:
    if len(counts) not in (0, 2):
        raise ValueError("two counts, one for each arm, or none")
    return counts


LARGEST = 1e300
"""Largest magnitude of a number in a file, because pages add numbers up, and scale them."""
Number = Annotated[int | float, Field(ge=-LARGEST, le=LARGEST)]
"""Number that is written again unchanged: 1 does not become 1.0."""
Amount = Annotated[int | float, Field(ge=0, le=LARGEST)]
Real = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Point = Annotated[list[Number | None], Field(min_length=2, max_length=2)]
"""Point (x, y) of a curve; None for a number that was not finite."""
Counts = Annotated[list[Count], AfterValidator(_of_both)]
Key = Annotated[tuple[str, int], Strict(False)]
"""Name and seed of a run; a list in JSON."""


class Entry(Written):
    """Part of results.json. Fields that were absent in a file stay absent when it is written again."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    @classmethod
    def of(cls, tree: object) -> Self:
        """Returns the entry of plain values. Raises pydantic.ValidationError."""
        return cls.model_validate(tree)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that were given, as plain values."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def changed(self, **fields: Any) -> Self:
        """Returns a copy with other values of some fields."""
        return self.model_copy(update=fields)


class Described(RootModel[dict[str, Any]]):
    """Description with any keys, as a mapping: pages show every key, code reads few."""

    model_config = ConfigDict(frozen=True)

    def _text(self, key: str) -> str | None:
        value = self.root.get(key)
        return value if isinstance(value, str) else None


class Data(Described):
    """Text of a comparison: `TextData.describe()`."""

    @property
    def name(self) -> str | None:
        return self._text("name")

    @property
    def fingerprint(self) -> str | None:
        return self._text("fingerprint")

    @property
    def tokenizer_fingerprint(self) -> str | None:
        return self._text("tokenizer_fingerprint")


COMPANY = "cores_of_others"


class MachineRecord(Described):
    """Machine and settings of computation: `machine.Settings.describe()`."""

    @property
    def processor(self) -> str | None:
        return self._text("processor")

    @property
    def device(self) -> str | None:
        return self._text("device")

    @property
    def dtype(self) -> str | None:
        return self._text("dtype")

    @property
    def shared(self) -> bool:
        """True if other runs computed on the same device at that time."""
        return self.root.get("shared") is True

    @property
    def company(self) -> float:
        """Cores that other programs used while the run was trained and measured; 0 if that was not counted."""
        cores = self.root.get(COMPANY)
        return float(cores) if isinstance(cores, int | float) and cores > 0 else 0.0

    def like(self, other: MachineRecord, besides: Collection[str] = ()) -> bool:
        """Returns True if speeds measured on both compare; keys that one of them lacks are ignored."""
        keys = (
            {"processor", "accelerator", "device", "dtype", "threads", "torch"} & self.root.keys() & other.root.keys()
        )
        return all(self.root[key] == other.root[key] for key in keys - set(besides))


class Validation(Measures):
    """Loss of the trained model on `tokens` held-out tokens: the figure that tables and verdicts compare."""

    model_config = ConfigDict(extra="allow")

    frequency_loss: Amount | None = None
    """Entropy of the frequencies of the same tokens, in nats: the least loss of a model that uses no context."""

    @property
    def barely_learned(self) -> bool:
        """True if context lowers the loss by less than `FROM_CONTEXT` of the loss without context."""
        return self.frequency_loss is not None and self.loss > (1 - FROM_CONTEXT) * self.frequency_loss


class TrainingResult(Entry):
    """Course of the training of one run."""

    steps: Count
    """Optimizer steps."""
    tokens: Count
    """Training tokens."""
    seconds: Amount
    """Seconds of training; measurements are not counted."""
    tokens_per_second: Amount
    """Median tokens per second of the steps."""
    peak_memory_bytes: int | None
    """Peak memory in bytes; None on devices that do not report it."""
    learning_rate: Amount
    """Peak learning rate."""
    curve: list[Point]
    """Points (tokens, loss in nats per token)."""
    curve_seconds: list[Point]
    """Points (seconds, loss in nats per token)."""
    validation_curve: list[Point]
    """Points (tokens read, loss on the first `validation_tokens` held-out tokens) in training; `validation.loss` is
    that of the trained model on more of them."""
    validation_tokens: Count | None = None
    """Held-out tokens of each point of `validation_curve`; None if it is empty."""
    rate_curve: list[Point] = []
    """Points (tokens, learning rate); empty in files of earlier versions."""


class Sample(Entry):
    """Text that the trained model wrote."""

    prompt: str = ""
    """Prompt."""
    text: str = ""
    """Text after the prompt."""
    temperature: Number | None = None
    """Sampling temperature."""
    top_k: Count | None = None
    """Number of most likely tokens that were sampled from."""


class EarlySample(Entry):
    """Text that the model of a run wrote at an evaluation while it trained."""

    step: Count
    """Optimizer step."""
    tokens: Count
    """Tokens read by then."""
    prompt: str = ""
    """Prompt."""
    text: str = ""
    """Text after the prompt."""


class Generation(Entry):
    """Speed and memory of generation of one sequence with a decode state (KV cache), and a sample."""

    tokens_per_second: Amount
    """New tokens per second."""
    seconds_per_token: Amount
    """Median seconds per token."""
    seconds_per_token_scatter: Amount | None = None
    """Standard deviation of the median seconds per token between eight equal parts of the text."""
    state_bytes_per_token: Amount
    """Growth of the decode state (KV cache) per token, in bytes."""
    sample: Sample
    """Text that was generated."""


class Answers(Entry):
    """Answers to held-out sources: texts that were written, spans, or classes (`runs.answers`)."""

    pairs: Count
    """Number of held-out sources."""
    exact: Amount
    """Share of exactly correct answers."""
    overlap: Amount | None = None
    """Mean F1 of the words of an answer and of the correct one, as in SQuAD."""
    labels: list[str] = []
    """Classes, if an answer is one of them."""
    confusion: list[list[Count]] = []
    """Number of texts by their class (row) and the class that the model gave (column)."""
    placeholders: Amount | None = None
    """Share of answers that keep the placeholders of their source, among sources with any."""
    bleu: Amount | None = None
    """Corpus BLEU, 0 to 100."""
    chrf: Amount | None = None
    """Corpus chrF, 0 to 100."""
    signatures: list[str] = []
    """Sacrebleu's signatures of the scores."""
    samples: list[list[str]] = []
    """Samples [source, target, answer]."""

    @property
    def words(self) -> str:
        """Sentence with the shares and scores of the answers."""
        if self.labels:
            return f"{self.pairs:,} held-out texts classified: {self.exact:.1%} right"
        told = [f"{self.pairs:,} held-out sources answered greedily: {self.exact:.1%} exactly"]
        if self.overlap is not None:
            told = [f"{self.pairs:,} held-out questions: {self.exact:.1%} answered exactly, F1 {self.overlap:.1%}"]
        if self.placeholders is not None:
            told.append(f"placeholders kept in {self.placeholders:.1%} of those that have any")
        if self.bleu is not None and self.chrf is not None:
            told.append(f"BLEU {self.bleu:.1f}, chrF {self.chrf:.1f}")
        return ", ".join(told)


class Reach(Entry):
    """Held-out loss at one context length, or the reason why it is missing."""

    context: Count
    """Context length in tokens."""
    loss: Real | None
    """Loss in nats per token."""
    tokens: Count | None = None
    """Number of measured tokens."""
    reason: str | None = None
    """Reason for a missing loss."""


class ExpertLoad(Entry):
    """Load of the experts of one layer: the share of the layer's assignments of tokens to each expert."""

    layer: Count = 0
    """Index of the layer."""
    load: list[Any] = []
    """Share of each expert."""


class Dynamics(Entry):
    """Statistics that were recorded while the run trained (`--watch`); without fields if none were."""

    steps: list[Number] = []
    """Last step of each window of steps."""
    depth: Count = 0
    """Number of layers."""
    layers: dict[str, list[list[Any]]] = {}
    """Values by statistic, window of steps, and layer or group of adjacent layers."""
    curves: dict[str, list[list[Any]]] = {}
    """Points [step, value] by statistic of the whole model."""
    experts: list[ExpertLoad] = []
    """Load of experts by layer, a mean over the last part of the run."""
    events: list[dict[str, Any]] = []
    """Spikes and other events, with their steps."""
    events_left_out: Count = 0
    """Number of events beyond those that are kept."""


class PartSource(Entry):
    """File of a module with parts from outside the package, and its hash when it was imported."""

    file: str
    """Path of the file."""
    sha256: str
    """SHA-256 of the file."""


class RunResult(Entry):
    """Result of one run: the model, the recipe, and everything measured."""

    name: str
    """Name of the arm."""
    seed: int = 0
    """Random seed."""
    parameters: Count | None = None
    """Number of parameters."""
    parameters_without_embeddings: Count | None = None
    """Number of parameters without embeddings."""
    flops_per_token: Amount | None = None
    """FLOPs of training per token: three times the forward pass."""
    config: dict[str, Any] = {}
    """The model, as in config.json."""
    recipe: dict[str, Any] = {}
    """The recipe, as in recipe.yaml."""
    train: TrainingResult | None = None
    """Measures of the training."""
    validation: Validation | None = None
    """Held-out loss of the trained model; None unless training ended."""
    generation: Generation | None = None
    """Speed and a sample of generation; None if the model does not generate."""
    written: list[EarlySample] = []
    """Texts that a single run generated in training."""
    answers: Answers | None = None
    """Answers to held-out sources; None if the run was trained neither on pairs nor on labels."""
    extrapolation: list[Reach] = []
    """Held-out loss at longer contexts than that of training."""
    dynamics: Dynamics = Dynamics()
    """Statistics that were recorded while the run trained."""
    machine: MachineRecord = MachineRecord({})
    """Processor, device, dtype, threads and version of torch."""
    loss_alone: bool = False
    """True if only the loss of the trained model was measured, as for a trial of tuning."""
    pretrained: str | None = None
    """Fingerprint of the weights that training started from; None if they were drawn."""
    sources: dict[str, PartSource] = {}
    """Modules of parts from outside the package."""
    status: Status = "ok"
    """End of the run."""
    error: str | None = None
    """Sentence about a run that failed or diverged."""

    @model_validator(mode="after")
    def _measured_at_its_end(self) -> Self:
        """Refuses held-out measures of a model whose training did not end, because means over runs would include
        them."""
        if self.status != "ok" and self.validation is not None:
            raise ValueError(f"a run that {self.status} has no validation")
        return self

    @property
    def key(self) -> Key:
        return self.name, self.seed

    @property
    def generates(self) -> bool:
        """True if the model continues a text; a bidirectional one does not, nor one that was not trained to."""
        from glassformer.config import ModelConfig  # imports torch, which a report does without
        from glassformer.training import Recipe

        try:
            return Recipe.of(**self.recipe).objective.writes(ModelConfig.from_dict(self.config))
        except RequestError:
            return True

    @property
    def complete(self) -> bool:
        """True if a run that was trained, to its end or until it diverged, has every measurement."""
        ended = self.status == "ok"
        return (
            self.status != "failed"
            and self.model_fields_set >= LEFT
            and None not in (self.parameters, self.flops_per_token, self.train)
            and not (ended and self.validation is None)
            and not (ended and self.generation is None and not self.loss_alone and self.generates)
        )


def unlike(runs: Sequence[RunResult]) -> str | None:
    """Returns a clause with the reason why speeds of these runs do not compare; None if they do."""
    told = [run for run in runs if run.status != "failed"]
    if any(run.machine.shared for run in told):
        return "runs shared a device"
    asked = {key for run in told for key in ("device", "dtype", "threads") if run.recipe.get(key, "auto") not in AUTO}
    same = all(run.machine.like(told[0].machine, besides=asked) for run in told)
    return None if same else "runs were trained on unlike machines"


AUTO = ("auto", None)
"""Values in a recipe that leave a choice to the machine. Explicit values may differ between arms: they are compared."""
LEFT = frozenset(RunResult.model_fields) - {"loss_alone", "pretrained", "answers", "written", "sources"}
"""Fields that every trained run has."""


class Verdict(Entry):
    """Verdict on two arms over the seeds that both finished: difference = metric(b) - metric(a), with its interval. The
    intervals of all verdicts of a comparison hold together with the given confidence, over all looks."""

    a: str
    b: str
    metric: Literal["validation.loss"]
    unit: str | None = None
    """Unit of the metric."""
    difference: Real | None
    """Difference of the metric; None if fewer than two seeds of both arms finished."""
    low: Real | None
    high: Real | None
    confidence: Real
    seeds: Count
    verdict: Finding
    decided_by: Literal["loss", "divergence"] | None = None
    p: Real | None = None
    """Two-sided p of the difference, for this pair by itself."""
    p_holm: Real | None = None
    """Two-sided p, adjusted for all verdicts of the comparison."""
    level: Real | None = None
    """Probability that any interval of the comparison misses its difference at this look: 1 - confidence for one
    look."""
    degrees_of_freedom: Amount | None = None
    pooled: bool | None = None
    """True if the variance is estimated from all arms."""
    margin: Real | None = None
    """Margin, in the unit of the metric, up to which differences count as zero."""
    margin_share: Real | None = None
    """Margin as a share of the metric of a."""
    equivalent: bool | None = None
    """True if the difference is shown to be within the margin, also if one arm is better."""
    detectable: Real | None = None
    """Smallest difference that this comparison would have shown with a power of 80 %."""
    ended: Counts = []
    """Numbers of runs of a and of b that were trained, to their end or until they diverged; empty if none diverged."""
    diverged: Counts = []
    """Numbers of runs of a and of b that diverged; empty if none did."""
    p_diverged: Real | None = None
    """Fisher's exact p that both arms diverge equally often."""
    terms: str | None = None
    """Size, budget, text and learning rate for which the verdict holds."""

    def __str__(self) -> str:
        """Returns finding, difference and its interval; `runs.wording` has the sentence of reports."""
        found = f"{self.b} against {self.a}: {self.verdict}"
        if self.difference is None or self.low is None or self.high is None:
            return found
        return f"{found}; {self.difference:+.4f} ({self.low:+.4f} to {self.high:+.4f}) {self.unit or self.metric}"

    @property
    def winner(self) -> str | None:
        return {"a better": self.a, "b better": self.b}.get(self.verdict)

    @property
    def loser(self) -> str | None:
        return {"a better": self.b, "b better": self.a}.get(self.verdict)

    @property
    def slight(self) -> bool:
        """True if the losses decide for one arm by a difference that is shown to be within the margin."""
        return bool(self.equivalent) and self.winner is not None and self.decided_by != "divergence"

    @property
    def unrewarded(self) -> str | None:
        """Model whose loss is shown to be lower without a verdict of better, because more of its runs diverged; else
        None."""
        if self.verdict != "no difference shown" or self.low is None or self.high is None:
            return None
        return self.a if self.low > 0 else self.b if self.high < 0 else None

    @property
    def adjusted_p(self) -> float | None:
        """P value adjusted for all verdicts of the comparison; that of the pair by itself in files without the
        adjustment."""
        return self.p if self.p_holm is None else self.p_holm


class SeedsNeeded(Entry):
    """Number of seeds that a comparison needs to show a difference between two arms, estimated from a pilot."""

    a: str
    b: str
    sd: Amount
    """Standard deviation of the paired difference, from the pilot."""
    sd_low: Amount
    sd_high: Amount
    degrees_of_freedom: Amount
    pooled: bool
    seeds: Count | None
    """Seeds for the estimate `sd`; None if the largest number of seeds is not enough."""
    seeds_low: Count | None
    """Seeds for the lower end `sd_low` of the interval of `sd`; None like `seeds`."""
    seeds_high: Count | None


class Power(Entry):
    """Seeds and hours that show a difference of a given size, planned from a pilot."""

    effect: Amount
    """Difference as a share of the first arm's loss."""
    difference: Amount
    """Difference in nats per token."""
    power: Amount
    confidence: Amount
    pilot: Count
    """Number of seeds of the pilot."""
    pairs: list[SeedsNeeded]
    seeds: Count | None
    """Number of seeds that is enough for every pair; None if the largest number is not enough."""
    hours: Amount | None
    """Training time of all arms with `seeds` seeds, one run after the other, in hours."""


class Trial(Entry):
    """Trial of a learning rate: one run of an arm."""

    power: int
    """Exponent: the rate is 2**power times that of the usual rule."""
    rate: Amount
    seed: Count
    loss: Real | None
    """Held-out loss; None if the run diverged."""


class TunedArm(Entry):
    """Arm whose learning rate was chosen among trials."""

    name: str
    """Name in the request."""
    usual: Amount
    """Learning rate of the rule by size and optimizer."""
    trials: list[Trial]
    chosen: Amount
    between: bool
    """True if the chosen rate is the minimum of a parabola, between rates that were tried."""
    settled: bool
    """True if rates with higher losses were tried on both sides of the best rate."""
    sensitivity: Amount
    """Sensitivity E[min(l, l0) - l*] over the grid, in nats: the cost of an untuned rate."""
    tuned_as: str = ""
    """Name of the arm in the runs at its chosen rate."""
    loss_chosen: Real | None = None
    """Mean loss at the chosen rate over the fresh seeds."""
    loss_usual: Real | None = None


class Tuning(Entry):
    """Learning rates chosen for each arm on separate seeds, and the verdicts on fresh seeds at these rates and at the
    usual ones."""

    arms: list[TunedArm]
    budget: str
    """Budget of each run, in words."""
    seeds: list[Count]
    """Seeds on which the rates were chosen."""
    fresh: list[Count]
    """Seeds on which the verdicts are measured."""
    extended: Count
    """Number of rates of every arm's grid beyond the first three."""
    runs: dict[str, Count]
    """Numbers of runs by purpose: choosing, tuned, usual."""
    minutes: dict[str, Amount]
    """Minutes of training by purpose."""
    tuned: list[Verdict] = []
    """Verdicts at the chosen rates; arms are named as in the request."""
    usual: list[Verdict] = []


class Budget(Entry):
    """Budget of every run of a comparison, and the amounts spent."""

    match: str | None = None
    tokens: Number | None = None
    minutes: Number | None = None
    flops: Number | None = None
    seeds: Count | None = None
    batch_size: Count | None = None
    context: Count | None = None
    spent: dict[str, Number] = {}
    """Amount of the matched quantity, by model."""
    learning_rates: dict[str, Number | None] = {}
    notes: list[str] = []


class Results(Entry):
    """Comparison with the results so far: results.json."""

    version: int = Field(alias="schema")
    title: str | None = None
    created: str = ""
    status: str = ""
    """Status: `complete`, or the number of finished runs."""
    command: str = ""
    """Command that repeats the comparison."""
    again: dict[str, str] = {}
    """Commands for results that this comparison lacks, by their addition: `seeds`, `watch`, `tune`."""
    data: Data
    budget: Budget
    machine: MachineRecord = MachineRecord({})
    asked: list[Key] = []
    runs: list[RunResult]
    speeds: dict[str, Amount] = {}
    """Training tokens per second of each model, measured with all cores and in turn after runs that shared a device;
    {} for other runs."""
    verdicts: list[Verdict] = []
    tuning: Tuning | None = None
    """Tuning, if the rates of the arms were chosen by trials; else None."""
    looks: list[Count] = []
    """Numbers of seeds at which verdicts were seen."""
    planned_looks: list[Count] = []
    """Numbers of seeds at which verdicts were planned, as announced before the first was seen."""
    power: Power | None = None
    """Power analysis, if it was requested; else None."""

    @property
    def names(self) -> list[str]:
        """Names of the models with runs, in order."""
        return list(dict.fromkeys(run.name for run in self.runs))

    @property
    def paced(self) -> list[RunResult]:
        """Runs with speeds that compare: those of `speeds` instead of those of runs that shared a device."""

        def alone(run: RunResult) -> RunResult:
            if run.train is None or run.name not in self.speeds:
                return run
            train = run.train.changed(tokens_per_second=self.speeds[run.name])
            return run.changed(train=train, machine=MachineRecord({**run.machine.root, "shared": False}))

        return [alone(run) for run in self.runs]

    def verdict(self, one: str, other: str) -> Verdict | None:
        """Returns the verdict on two models, given in either order; None without one."""
        return next((verdict for verdict in self.verdicts if {verdict.a, verdict.b} == {one, other}), None)

    @property
    def best(self) -> str | None:
        """Name of the model with a verdict of better, and not of equivalent, against every other model; None without
        one."""

        def beats(one: str, other: str) -> bool:
            verdict = self.verdict(one, other)
            return verdict is not None and verdict.winner == one and not verdict.slight

        rivals = {one: [other for other in self.names if other != one] for one in self.names}
        return next((one for one, others in rivals.items() if others and all(beats(one, it) for it in others)), None)
