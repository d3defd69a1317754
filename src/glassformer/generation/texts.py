"""Texts of one call, generated in a session with exactly the room that they need.

TextRun         continues prompts: in a batch, from a prompt cache, with draft tokens, or by beam search
GeneratedTexts  the completions, with times and speed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from glassformer.errors import RequestError, WorkError, so_far
from glassformer.figures.terminal import Printed, size
from glassformer.generation.engine import MOST_READ
from glassformer.generation.rules import not_applied
from glassformer.generation.sampling import Sampling
from glassformer.generation.session import SLOTS, Completion, Prompt, Ready, Reply, Session, check_ready
from glassformer.generation.speculate import Draft, PromptLookup, Proposer, check_same_tokens
from glassformer.options import DecodingOptions
from glassformer.units import plural


@dataclass(frozen=True, kw_only=True)
class GeneratedTexts(Printed):
    """Completions of some prompts, with the speed of generation."""

    prompts: Sequence[Any]
    """Prompt of each completion."""
    completions: Sequence[Completion]
    ends: frozenset[int]
    """Ids of tokens that end a text; they are not counted."""
    spelled: Callable[[int], str] = field(repr=False)
    """Function: token id -> its text."""
    prompt_tokens: int
    """Number of tokens of all prompts and sources."""
    seconds: float
    """Time from the start to the last token."""
    first: float | None
    """Seconds until the first new token; None without one."""
    state_bytes: int
    """Bytes of the decode state."""
    before: float = 0.0
    """Seconds spent on starting the program and loading the model, not included in `seconds`."""
    guesses: Mapping[str, int] = field(default_factory=dict)
    """Counts of speculative decoding: draft tokens proposed, those accepted, and passes of the model."""

    @property
    def counts(self) -> list[int]:
        """Number of new tokens of each text, without its end token."""
        return [len(one.tokens) - bool(self.ends.intersection(one.tokens[-1:])) for one in self.completions]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second after the first token; for a beam search or a single token, over the whole time."""
        new = sum(self.counts)
        searched = any(one.score is not None for one in self.completions)
        since, counted = (self.first or self.seconds, new - 1) if new > 1 and not searched else (0.0, new)
        return counted / max(self.seconds - since, 1e-9)

    def lines(self) -> Iterator[str]:
        """Yields each prompt followed by its text; with several texts, a heading first."""
        for i, (prompt, one) in enumerate(zip(self.prompts, self.completions, strict=True)):
            yield heading(i, len(self.completions), prompt) + prompt + one.text

    @property
    def summary(self) -> str:
        """Tokens, times and sizes in one line."""
        new, given = sum(self.counts), self.prompt_tokens
        read = "given"
        if self.first is not None:
            loaded = f" ({self.before:.1f} s of them to load)" if self.before else ""
            read = f"read, the first word after {self.before + self.first:.2f} s{loaded}"
        rate = f", {self.tokens_per_second:.1f} tokens/s" if new else ""
        parts = [f"{plural(given, 'token')} {read}", f"{new:,} written{rate}"]
        parts.append(f"state {size(self.state_bytes)}")
        if proposed := self.guesses.get("proposed"):
            parts.append(f"{self.guesses['accepted'] / proposed:.0%} of {proposed:,} guesses accepted")
        return "; ".join(parts)

    def check(self) -> None:
        """Raises WorkError if the model's logits were not numbers."""
        if error := next((one.error for one in self.completions if one.error), None):
            raise WorkError(error, code="diverged")

    def to_dict(self) -> dict[str, Any]:
        """Returns the object that `--json` prints; it has the same fields for one text and for several."""
        return {
            "texts": [self.facts(i) for i in range(len(self.completions))],
            "tokens_per_second": self.tokens_per_second,
            "seconds_to_first_token": self.first,
            "seconds_before": self.before,
            "state_bytes": self.state_bytes,
            **({"guesses": dict(self.guesses)} if self.guesses else {}),
        }

    def facts(self, i: int) -> dict[str, Any]:
        """Returns text `i` as plain values: prompt, text, token count, finish reason, log-probabilities if any."""
        prompt, one, count = self.prompts[i], self.completions[i], self.counts[i]
        facts: dict[str, Any] = {"prompt": prompt, "text": one.text, "tokens": count, "finish": one.finish_reason}
        facts |= {name: value for name in ("error", "score") if (value := getattr(one, name)) is not None}
        if one.logprobs is not None:
            tops = one.top_logprobs or [{} for _ in one.logprobs]
            facts["logprobs"] = [
                {**self._token(token, logprob), "top": [self._token(*other) for other in top.items()]}
                for token, logprob, top in zip(one.tokens, one.logprobs, tops, strict=False)
            ]
        return facts

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"id": token, "token": self.spelled(token), "logprob": logprob}


def heading(i: int, count: int, prompt: str) -> str:
    """Returns the line above text `i` of `count`; empty for a single text."""
    return f"--- {i + 1} of {count}: {prompt[:60]!r}\n" if count > 1 else ""


class TextRun:
    """Generation of texts for some prompts, with a decode state of exactly the size that they need.

    Parameters
    ----------
    loaded
        A model with its tokenizer.
    prompts
        Texts, lists of token ids, or chats.
    options
        How each is continued; `options.n` texts of each prompt.
    dtype
        Dtype of the decode state; None for that of the weights.
    compiled
        Compile the decode step.
    on_build
        Called before a step is compiled that is not cached yet.

    Raises
    ------
    RequestError
        For what this model cannot do, before anything is computed.
    """

    def __init__(
        self,
        loaded: Ready,
        prompts: Sequence[Prompt],
        options: DecodingOptions,
        *,
        dtype: torch.dtype | None = None,
        compiled: bool = False,
        on_build: Callable[[], object] | None = None,
    ):
        if loaded.tokenizer is None:
            raise RequestError("this model has no tokenizer; it cannot read text", code="missing", field="tokenizer")
        options.check(len(prompts), compiled)
        self.loaded, self.options, self.tokenizer, beams = loaded, options, loaded.tokenizer, options.beams
        Sampling.of(options).check(loaded.model.vocab_size)
        self.prompts: list[Any] = list(prompts) if beams else [prompt for prompt in prompts for _ in range(options.n)]
        """Prompt of each text."""
        count = len(self.prompts)
        slots = min(SLOTS, count)
        slots = 1 << (slots - 1).bit_length() if compiled else slots  # so that few sizes of steps are compiled
        self.session = session = Session(
            loaded, slots=slots, dtype=dtype, compiled=compiled, answers=slots == 1, on_build=on_build,
            kept=MOST_READ if count > 1 else int(options.state is not None),
        )  # fmt: skip
        read = [session.read(prompt, options.source) for prompt in prompts]
        self.ids, self.source = [ids for ids, _ in read], read[0][1]
        longest = max(map(len, self.ids))
        room = longest + session.new_tokens(longest, options.max_new_tokens)
        memory = len(self.source or ())
        self.state_bytes = session.reserve(session.room(room) if compiled else room, rows=beams, source=memory)
        self.prompt_tokens = sum(map(len, self.ids)) + memory * len(read)
        self.replies: list[Reply] = []
        self._found: list[Completion] = []
        self.began = time.perf_counter()
        self._first: float | None = None

    @property
    def not_applied(self) -> list[str]:
        """Settings of the model's folder that have no effect; with draft tokens, also forced and banned tokens."""
        drafts = self.options.speculate or self.options.draft is not None
        return not_applied(self.loaded.generation, self.options.beams, drafts)

    def start(self, draft: Ready | None = None) -> bool:
        """Submits the prompts, or carries a beam search out. `draft` is the model that `options.draft` names.

        Returns False if the file of the prompt cache held another prompt and was replaced, else True."""
        options = self.options
        proposer: Proposer | None = PromptLookup() if options.speculate else None
        if draft is not None:
            check_ready(draft, "draft")
            if draft.tokenizer is not None:
                check_same_tokens(self.tokenizer, draft.tokenizer, f"draft={options.draft}")
            proposer = Draft(draft.model)
        self.began = time.perf_counter()
        if options.beams is not None:
            self._search(options.beams)
            return True
        same = options.state is None or self.session.keep(self.ids[0], options.state)
        self.replies = [
            self.session.submit(ids, options, source=self.source, sample=sample, proposer=proposer)
            for ids in self.ids
            for sample in range(options.n)
        ]
        return same

    def _search(self, width: int) -> None:
        try:
            self._found = self.session.search(self.ids[0], width, self.options, source=self.source)
            self._first = time.perf_counter()
        except WorkError as problem:
            self._found = so_far(problem) or [Completion("", [], "failed", error=str(problem))]
        except (Exception, KeyboardInterrupt) as problem:
            self._found = so_far(problem) or []
            raise
        finally:
            self.prompts = self.prompts * len(self._found)

    def __iter__(self) -> Iterator[tuple[int, str, bool]]:
        """Yields (index, text so far, True if it is complete) as the texts grow, until all are complete."""
        places = {id(reply): i for i, reply in enumerate(self.replies)}
        for reply, _ in self.session:
            self._first = self._first or reply.first_token_time
            yield places[id(reply)], reply.text, reply.finish_reason is not None
        for reply in self.replies:
            reply.result()  # raises the exception of a caller's function

    def result(self) -> GeneratedTexts:
        """Ends the texts that are not complete, and returns all texts."""
        for reply in self.replies:
            reply.cancel()
        return self.so_far()

    def so_far(self) -> GeneratedTexts:
        """Returns the texts so far, complete or not."""
        ended, found = time.perf_counter(), [*self._found, *(reply.so_far() for reply in self.replies)]
        if not found and self.options.beams is None and len(self.prompts) == 1:  # interrupted before it was submitted
            found = [Completion("", [], "cancelled")]
        run = self.replies[0].speculation if self.replies else None
        return GeneratedTexts(
            prompts=self.prompts[: len(found)], completions=found, spelled=lambda i: self.tokenizer.decode([i]),
            ends=frozenset(self.loaded.model.ends if self.options.stop_at_eos else ()), seconds=ended - self.began,
            first=self._first and self._first - self.began, prompt_tokens=self.prompt_tokens,
            guesses={} if run is None else {name: getattr(run, name) for name in ("proposed", "accepted", "passes")},
            state_bytes=self.state_bytes,
        )  # fmt: skip
