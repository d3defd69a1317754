"""Options of text generation, declared once for Python and the command line. Imports no torch.

SamplingOptions     choice of the next token
GenerationOptions   these, and the length, the end and the number of texts
DecodingOptions     these, and the decoding method: beam search, draft tokens, a prompt cache
ModelOptions        loading and running of a model

The classes of keywords have the same names and types, so that editors complete keyword arguments.
"""

# Annotations must be types, not text: the command line resolves them in the modules of subclasses.
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypedDict

from glassformer.errors import RequestError, check_seed, check_whole

LONGEST_PROMPT = 10_000_000
"""Largest number of characters of a prompt; longer ones are refused before they are tokenised"""


@dataclass(frozen=True)
class Bounds:
    """Smallest and largest value of a number; `above` excludes the smallest."""

    least: float
    most: float = math.inf
    above: bool = False

    def hold(self, value: float) -> bool:
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def check(self, value: object, field: str) -> None:
        """Raises RequestError for a number outside the bounds."""
        if isinstance(value, int | float) and not self.hold(value):
            raise RequestError(
                f"{field}={value}: input must be {self}", code="range", field=field, value=value, expected=str(self)
            )

    def __str__(self) -> str:
        if self.most == math.inf:
            return f"at least {self.least:g}"
        return f"{'above' if self.above else 'from'} {self.least:g} and at most {self.most:,.10g}"


Temperature = Annotated[float, Bounds(0, 1e6)]
OwnTemperature = Annotated[float | None, Bounds(0, 1e6)]
Rank = Annotated[int | None, Bounds(1)]
Probability = Annotated[float | None, Bounds(0, 1, above=True)]
Penalty = Annotated[float, Bounds(-100, 100)]
LogitsProcessor = Callable[[Any, Any], Any]
"""Function (logits (v,) fp32, tokens (n,)) -> logits (v,), where tokens are the prompt and the answer so far"""
PUBLISHED = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
"""Fields of a generation_config.json for sampling"""
MOST_STOPS = 10_000
LONGEST_STOPS = 1_000_000
"""Largest number of characters of all stop strings together"""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Choice of the next token; by default the most likely one."""

    temperature: Temperature = 0.0
    """Sampling temperature; 0 takes the most likely token."""
    top_k: Rank = None
    """Top-k sampling: the K most likely tokens."""
    top_p: Probability = None
    """Nucleus sampling: smallest token set with total probability P."""
    min_p: Probability = None
    """Min-p sampling: tokens at least P times as likely as the most likely one."""
    typical_p: Probability = None
    """Locally typical sampling: tokens with surprisal nearest to the entropy, with total probability P."""
    repetition_penalty: Annotated[float, Bounds(1e-3, 1e3)] = 1.0
    """Penalty on tokens of the prompt and the answer; above 1 they become less likely."""
    frequency_penalty: Penalty = 0.0
    """Amount subtracted from a token's logit for each of its occurrences in the answer."""
    presence_penalty: Penalty = 0.0
    """Amount subtracted from the logits of tokens that occur in the answer."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Amounts added to the logits of tokens, by token id."""
    logits_processor: LogitsProcessor | None = field(default=None, repr=False)
    """Function of one row's logits and its tokens so far, applied before the temperature; it returns logits."""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(SamplingOptions):
    """Options of generating text from a prompt.

    >>> GenerationOptions.of({"do_sample": True, "temperature": 0.6}, top_p=0.9).temperature
    0.6
    """

    max_new_tokens: int | None = None
    """Largest number of new tokens; by default 200, or fewer if learned positions end earlier."""
    stop: tuple[str, ...] = ()
    """Stop strings: the text ends before the first of them."""
    stop_at_eos: bool = True
    """End the text at the model's end tokens."""
    seed: int | None = None
    """Random seed; the same seed gives the same text."""
    n: int = 1
    """Number of texts for each prompt."""
    logprobs: int | None = None
    """Report each new token's log-probability, and those of the N most likely tokens."""

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("n", 1), ("logprobs", 0)):
            if (value := getattr(self, name)) is not None or name == "n":
                check_whole(name, value, least)
        if self.seed is not None:
            check_seed(self.seed)
        object.__setattr__(self, "stop", tuple(check_stops(self.stop)))

    def check_draws(self) -> None:
        """Raises RequestError if the texts of a prompt would all be equal."""
        if self.n > 1 and self.temperature == 0:
            raise RequestError(
                f"n={self.n} texts at temperature=0 are one and the same; give a higher temperature",
                code="conflict", field="temperature", value=0,
            )  # fmt: skip

    @classmethod
    def of(cls, generation: Mapping[str, Any], **options: Any) -> Self:
        """Returns the given options, with defaults from a generation_config.json: `do_sample` selects its temperature
        (1 by default) or greedy decoding, and its top_k, top_p, min_p, typical_p and repetition_penalty apply. Raises
        RequestError for an unknown option."""
        own = {name: generation[name] for name in PUBLISHED if generation.get(name)}  # `transformers` writes None as 0
        own["temperature"] = own.get("temperature", 1.0) if generation.get("do_sample") else 0.0
        return cls(**own).replace(**options)

    def replace(self, **options: Any) -> Self:
        """Returns the options with some replaced. Raises RequestError for an unknown option."""
        known = [one.name for one in fields(self)]
        if wrong := next((name for name in options if name not in known), None):
            raise RequestError(
                f"unknown option {wrong}; known are {', '.join(known)}", code="unknown", field=wrong,
                value=options[wrong],
            )  # fmt: skip
        return replace(self, **options)


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(GenerationOptions):
    """Options of generating texts, and of the decoding method."""

    source: str | Sequence[int] | None = None
    """Input of the encoder of an encoder-decoder; the prompt is then an optional start of the decoder's text."""
    beams: int | None = None
    """Beam search with this many beams instead of sampling."""
    speculate: bool = False
    """Speculative decoding with drafts copied from earlier text: the same distribution in fewer passes."""
    draft: str | None = None
    """Speculative decoding with a smaller draft model of the same vocabulary."""
    state: str | Path | None = None
    """Prompt cache: file with the decode state of a prompt. Loaded if it holds the start of this prompt, else
    written."""

    def check(self, prompts: int, compiled: bool = False) -> None:
        """Raises RequestError for options that exclude each other, or that do not suit this number of prompts."""
        given = {
            "source": self.source is not None, "beams": self.beams is not None, "speculate": self.speculate,
            "draft": self.draft is not None, "several prompts": prompts > 1, "n": self.n > 1 and not self.beams,
            "compile": compiled, "state": self.state is not None, "logprobs": self.logprobs is not None,
        }  # fmt: skip
        ways = [name for name, wanted in given.items() if wanted]
        for way in ("source", "beams", "speculate", "draft"):
            rest = [name for name in ways if name not in (way, "source" if way == "beams" else "beams")]
            if way in ways and rest:
                raise RequestError(
                    f"{way} does not go with {rest[0]}; leave one of them out", code="conflict", field=way
                )
        if self.beams is None:
            self.check_draws()
        else:
            self._check_search(self.beams)
        if self.state is not None and not isinstance(self.state, str | Path):
            raise RequestError(code="type", field="state", value=self.state, expected="the path of a file")
        if self.state is not None and prompts > 1:
            raise RequestError("state keeps one prompt; give one", code="conflict", field="state", value=self.state)
        if self.state is not None and not (folder := Path(self.state).parent).is_dir():
            raise RequestError(f"state: {folder} does not exist", code="missing", field="state", value=self.state)

    def _check_search(self, beams: int) -> None:
        check_whole("beams", beams)
        if self.n > beams:
            raise RequestError(
                f"n={self.n} is more than beams={beams}, the number of texts that are kept",
                code="range", field="n", value=self.n,
            )  # fmt: skip
        plain = SamplingOptions()
        if any(getattr(self, one.name) != getattr(plain, one.name) for one in fields(plain)):
            raise RequestError(
                "beams search for the most likely text; leave sampling options and penalties out",
                code="conflict", field="beams", value=beams,
            )  # fmt: skip


AUTO = "auto"
"""Quantisation that is chosen for this machine."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of loading and running a model."""

    quantize: Literal["auto", "bf16", "int8", "int4", "keep"] | None = "auto"
    """Quantisation of the weights: int8 or int4; keep uses those of a .gguf file as they are stored, which takes the
    least memory and on a CPU several times as long; bf16 prepacks bfloat16 weights for CPUs that multiply them, with
    the same results as --dtype bfloat16; auto takes the one that was measured fastest on this machine for models of
    attention with 100M parameters and more on a CPU, int4 only if the file has 4 bits, and none with --dtype or
    --compile; none takes them as they are stored."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of weights and decode state (KV cache); by default the checkpoint's, or bfloat16 with quantised weights."""
    state_dtype: Literal["float32", "bfloat16", "int8"] | None = None
    """Dtype of the decode state only; int8 keeps a scale for each vector."""
    device: str = "auto"
    """Device: auto, cpu, cuda or mps."""
    threads: int | None = None
    """CPU threads; by default one per core, fewer while other processes use them."""
    compile: bool = False
    """Compile the decode step (one to three minutes once for each model and precision, then cached)."""


class GenerationKeywords(TypedDict, total=False):
    """Fields of `GenerationOptions` without `n`, as keyword arguments."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    logits_processor: LogitsProcessor | None
    max_new_tokens: int | None
    stop: str | tuple[str, ...] | list[str]
    stop_at_eos: bool
    seed: int | None
    logprobs: int | None


class ModelKeywords(GenerationKeywords, total=False):
    """Fields of `GenerationOptions` without `n`, and of `ModelOptions`, as keyword arguments."""

    quantize: Literal["auto", "bf16", "int8", "int4", "keep"] | None
    dtype: Literal["float32", "bfloat16"] | None
    state_dtype: Literal["float32", "bfloat16", "int8"] | None
    device: str
    threads: int | None
    compile: bool


class RecipeKeywords(TypedDict, total=False):
    """Fields of a `Recipe` without its budget, as keyword arguments; None means the default."""

    batch_size: int | None
    micro_batch: int | None
    context: int | None
    seed: int | None
    learning_rate: float | None
    objective: Any
    optimizer: Any
    schedule: Any
    weight_decay: float | None
    clip: float | None
    qk_clip: float | None
    evaluate_every: int | None
    evaluation_tokens: int | None
    checkpoint_seconds: float | None
    async_save: bool | None
    watch: int | None
    on_spike: Literal["go_on", "skip", "roll_back"] | None
    device: Any
    dtype: Any
    threads: int | None
    compile: bool | None


class RunKeywords(RecipeKeywords, total=False):
    """Fields of a `Recipe` as keyword arguments."""

    tokens: int | str | None
    flops: float | str | None
    minutes: float | None
    steps: int | str | None
    epochs: float | None


class DesignKeywords(RecipeKeywords, total=False):
    """Fields of a `Design` and of a `Recipe` that are not parameters of `compare`, as keyword arguments."""

    tokenizer: Any
    allow_unmatched: bool
    pretrained: bool
    loss_alone: bool
    log_to: Sequence[str] | None


class CellKeywords(DesignKeywords, total=False):
    """Keyword arguments of `scale` for the comparison at each size and budget."""

    seeds: int | None
    recipe: Any


class LadderKeywords(DesignKeywords, total=False):
    """Keyword arguments of `ablate` for its comparison."""

    tokens: int | str | None
    minutes: float | None
    flops: float | str | None
    steps: int | str | None
    match: Any
    looks: str | Sequence[int] | None
    power: float | str | None
    tune: bool | None
    within: float | None
    recipe: Any


class TuneKeywords(DesignKeywords, total=False):
    """Keyword arguments of `compare` without `tune`."""

    tokens: int | str | None
    minutes: float | None
    flops: float | str | None
    steps: int | str | None
    match: Any
    seeds: int | None
    looks: str | Sequence[int] | None
    power: float | str | None
    within: float | None
    recipe: Any
    out: str | Path | None
    executor: Any
    callbacks: Sequence[Any]
    progress: bool | Callable[..., Any]
    command: str | None


def check_stops(strings: str | Sequence[str]) -> list[str]:
    """Returns stop strings as a list. Raises RequestError for strings that `Stops` refuses."""
    if not isinstance(strings, Sequence):
        raise RequestError(code="type", field="stop", value=strings, expected="a text or a list of texts")
    strings = [strings] if isinstance(strings, str) else list(strings)
    if len(strings) > MOST_STOPS:
        raise RequestError(
            f"stop has {len(strings)} strings; give at most {MOST_STOPS}",
            code="range", field="stop", value=len(strings),
        )  # fmt: skip
    for i, string in enumerate(strings):
        if not isinstance(string, str):
            raise RequestError(f"stop[{i}]={string!r} must be text", code="type", field=f"stop[{i}]", value=string)
    if "" in strings:
        raise RequestError(
            f"stop[{strings.index('')}]='' is empty; a stop string has at least one character",
            code="range", field=f"stop[{strings.index('')}]", value="",
        )  # fmt: skip
    if (total := sum(map(len, strings))) > LONGEST_STOPS:
        raise RequestError(
            f"stop has {total} characters in its strings; give at most {LONGEST_STOPS}",
            code="range", field="stop", value=total,
        )  # fmt: skip
    return strings
