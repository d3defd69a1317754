"""What `generate` and `chat` can be asked for. Torch is not imported here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

Flag = Annotated[bool, Parameter(negative="")]
Texts = Annotated[list[str] | None, Parameter(negative="", allow_leading_hyphen=True)]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How a model is run, and its tokens are drawn."""

    temperature: float = 0.8
    """0 takes the most likely token."""
    top_k: int | None = None
    """Draw among the k likeliest tokens; 40 where neither this nor another of the next three is given."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together have this probability."""
    min_p: float | None = None
    """Draw among tokens at least this times as likely as the likeliest."""
    typical_p: float | None = None
    """Draw among the tokens of most typical surprise that together have this probability."""
    repetition_penalty: float = 1.0
    """Above 1, what stands in the prompt or the answer becomes less likely."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time it is in the answer."""
    presence_penalty: float = 0.0
    """Taken from a token's logit once it is in the answer."""
    logit_bias: Annotated[list[str] | None, Parameter(negative="")] = None
    """ID=VALUE: added to the logit of this token; may be given several times."""
    seed: int | None = None
    """Of the draws: the same text again."""
    quantize: Literal["bf16", "int8", "int4", "keep"] | None = None
    """Pack the matrices in 8 or 4 bits; keep leaves those of a .gguf file as they are packed there. Weights in bf16 are
    laid out for the processor's products in it, which changes no number, unless a step is compiled."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the weights and the state; by default as the checkpoint has it, with bf16, int8 and int4 bfloat16."""
    state_dtype: Literal["float32", "bfloat16", "int8"] | None = None
    """Of the state alone, which may be narrower than the weights; int8 keeps a scale for each vector."""
    device: str = "auto"
    """auto, cpu, cuda, mps: where the model runs; auto takes the graphics card that is there."""
    threads: int | None = None
    """Threads of the processor; by default as many as it has cores, and fewer while others take them."""
    compile: Flag = False
    """Take each step in machine code, which is built once for a model, in about a minute, and kept."""


@dataclass(frozen=True, kw_only=True)
class Chatting(Drawing):
    """A conversation."""

    temperature: float = 0.7
    """0 takes the most likely token."""
    system: str | None = None
    """What the model is told before the conversation."""
    max_new_tokens: int = 512
    """Of one answer, at most."""


@dataclass(frozen=True, kw_only=True)
class Asking(Drawing):
    """An answer from an index."""

    temperature: float = 0.0
    """0 takes the most likely token."""
    max_new_tokens: int = 200
    """Of the answer, at most."""


@dataclass(frozen=True, kw_only=True)
class Prompting:
    """What is written."""

    prompt: Texts = None
    """The text to go on from; - reads standard input, as does no prompt at all. Several are written on side by side."""
    source: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """The text that a model with an encoder reads; --prompt is then what its own text begins with, or left out."""
    prompt_file: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    """A file that has the prompt; - is standard input."""
    max_new_tokens: int | None = None
    """By default 200, or as many as the model has positions for."""
    stop: Texts = None
    """End before this text; may be given several times."""
    ignore_eos: Flag = False
    """Go on after the token that ends a text."""
    n: int = 1
    """Texts for each prompt."""
    beams: int | None = None
    """Search for the likeliest text, keeping so many open, in place of drawing."""
    speculate: Flag = False
    """Guess several tokens ahead from what the text has said before: the same distribution, in fewer passes."""
    draft: str | None = None
    """A smaller model of the same vocabulary that guesses ahead."""
    state: str | None = None
    """A file that keeps what the model has of the prompt: read where it has the beginning of this prompt, else
    written."""
    logprobs: int | None = None
    """With --json: the log-probability of each token, and the so many likeliest in its place."""


@dataclass(frozen=True, kw_only=True)
class Writing(Drawing, Prompting):
    """Fields of the last base come first."""
