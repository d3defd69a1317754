"""Speculative decoding: a proposer guesses draft tokens, which the model checks in one pass. The new tokens have
exactly the model's distribution: Leviathan et al. 2023, 2211.17192."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from glassformer.errors import RequestError, WorkError, check_whole
from glassformer.generation.sampling import Sampling, choose, draw, row_generator, warp
from glassformer.generation.steps import check_state, check_tokens, decode, decode_several, new_state, prefill
from glassformer.introspection import at_rest
from glassformer.model import Model
from glassformer.parts.precision import exact, exact_device
from glassformer.parts.state import ModelState
from glassformer.text import Tokenizer

__all__ = ["Draft", "PromptLookup", "Proposal", "Proposer", "Speculation", "speculate"]

FIRST = 4
"""Largest number of draft tokens of the first guess."""
AHEAD = 8
"""Largest number of draft tokens of a guess."""
LONGEST_REST = 16
"""Largest number of passes without a guess after one that failed."""
WORTH_IT = 0.6
"""Least average of accepted draft tokens a pass: with fewer, plain decoding is faster, because a pass over a few tokens
takes 1.6 times one over a single token on a CPU (less on a GPU)."""


class Proposal(NamedTuple):
    """Guess of k draft tokens, with the distributions (k, v) that they were drawn from; None if they were not drawn."""

    tokens: list[int]
    probabilities: Tensor | None = None


NOTHING = Proposal([])


class Proposer(Protocol):
    """Source of draft tokens. Good guesses save passes; no guess changes the distribution of the text."""

    def begin(self, run: Speculation) -> None:
        """Prepares for a new text; called once, before its first guess."""

    def propose(self, text: Sequence[int], most: int) -> Proposal:
        """Returns at most `most` draft tokens to follow `text`, which extends the text of the previous call."""


class PromptLookup:
    """Proposer without a model: the tokens that followed the latest earlier occurrence of the text's last n tokens, for
    the largest n in [min_ngram, max_ngram] with one. Past the end of the text the guess repeats itself. Saxena 2023,
    github.com/apoorvumang/prompt-lookup-decoding."""

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1):
        if not 1 <= min_ngram <= max_ngram:
            raise RequestError(
                f"min_ngram={min_ngram} and max_ngram={max_ngram} must be 1 <= min_ngram <= max_ngram",
                code="range", field="min_ngram", value=min_ngram,
            )  # fmt: skip
        self.sizes = range(max_ngram, min_ngram - 1, -1)

    def begin(self, run: Speculation) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        """N-gram of the text -> index of the token after its latest occurrence."""
        self._indexed = 0

    def propose(self, text: Sequence[int], most: int) -> Proposal:
        for end in range(self._indexed + 1, len(text)):
            self._after.update({tuple(text[end - n : end]): end for n in self.sizes if n <= end})
        self._indexed = len(text) - 1
        places = (self._after.get(tuple(text[-n:])) for n in self.sizes)
        start = next((place for place in places if place is not None), None)
        if start is None:
            return NOTHING
        return Proposal([text[start + i % (len(text) - start)] for i in range(most)])


class Draft:
    """A draft model: a smaller model of the same vocabulary, which proposes tokens by the `Sampling` of the large
    model, or by `sampling` (`Sampling()` is greedy). Raises RequestError if the vocabularies differ in size."""

    def __init__(self, model: Model, sampling: Sampling | None = None):
        self.model, self.sampling = model.eval(), sampling

    def begin(self, run: Speculation) -> None:
        position = self.model.embedding.position
        if self.model.vocab_size != (wanted := run.model.vocab_size):
            raise RequestError(
                f"the draft has a vocabulary of {self.model.vocab_size} and the model one of {wanted}; they differ",
                code="conflict", field="draft", value=self.model.vocab_size,
            )  # fmt: skip
        limit = position.limit if position is not None else None
        max_len = run.max_len if limit is None else min(limit, run.max_len)
        self._state = new_state(self.model, 1, max_len, rewind=run.ahead)
        self._rule = self.sampling or run.sampling
        self._prompt = len(run.text)
        self._generator = row_generator(run.seed, 1, self.model.device)
        self._text, self._guess = 0, list[int]()  # length of the last text, and the guess that followed it

    @torch.inference_mode()
    def propose(self, text: Sequence[int], most: int) -> Proposal:
        """Returns at most `most` draft tokens; fewer if the draft's positions end, or its logits are not numbers."""
        state, guess, drawn_from = self._state, list[int](), list[Tensor]()
        most = min(most, state.max_len - len(text) + 1)
        if most < 1:
            return NOTHING
        stood = agreeing(self._guess, text[self._text :])
        state.truncate(min(state.length, self._text + stood, len(text) - 1))
        unread = list(text[state.length :])
        while len(guess) < most:
            unread_here = torch.tensor([unread], device=self.model.device)
            logits = prefill(self.model, unread_here, state)
            if not logits.max().isfinite():
                break
            past = [torch.tensor([*text, *guess], device=logits.device)] if self._rule.penalizes else []
            logits = warp(logits, self._rule, past, [self._prompt])
            if self._rule.temperature == 0:
                unread = [int(logits.argmax())]
            else:
                unread = [int(draw(logits, [self._generator]))]
                drawn_from.append(logits.softmax(-1))
            guess += unread
        self._text, self._guess = len(text), guess
        return Proposal(guess, torch.cat(drawn_from) if drawn_from else None)


def agreeing(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the number of leading tokens that the two sequences share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def check_same_tokens(mine: Tokenizer, theirs: Tokenizer, name: str) -> None:
    """Raises RequestError if a token of a draft, called `name`, has another text than the model's: guesses would be
    meaningless."""
    if theirs.fingerprint() == mine.fingerprint():
        return
    for i in range(min(mine.vocab_size, theirs.vocab_size)):
        if (a := mine.decode([i])) != (b := theirs.decode([i])):
            raise RequestError(
                f"{name}: token {i} is {b[:40]!r} there and {a[:40]!r} in the model; give a draft of the same "
                "vocabulary",
                code="conflict", field="draft", value=name,
            )  # fmt: skip


class Speculation:
    """Iterator over the new tokens of a text decoded speculatively.

    proposed, accepted  numbers of draft tokens guessed, and accepted
    passes              number of passes of the model, the prefill included
    text                ids of the prompt and of the tokens so far
    max_len             largest length of `text`
    state               decode state, which has read all of `text` except the last token once the loop over the tokens
                        ends or is left
    """

    def __init__(
        self,
        model: Model,
        tokens: Int[Tensor, "1 s"],
        proposer: Proposer,
        max_new_tokens: int,
        sampling: Sampling,
        seed: int | None,
        ahead: int,
        state: ModelState | None,
    ):
        tokens = check_tokens(model, tokens)
        if len(tokens) != 1:
            raise RequestError(
                f"speculation continues one text at a time; tokens have {len(tokens)} rows",
                code="range", field="tokens", value=len(tokens),
            )  # fmt: skip
        for name, value in (("max_new_tokens", max_new_tokens), ("ahead", ahead)):
            check_whole(name, value)
        sampling.check(model.vocab_size)
        self.model, self.proposer, self.sampling, self.seed, self.ahead = model, proposer, sampling, seed, ahead
        self.text: list[int] = tokens[0].tolist()
        self.max_len = len(self.text) + max_new_tokens
        self.state = state or new_state(model, 1, self.max_len, rewind=ahead)
        back = min((n for layer in self.state.layers if layer and (n := layer.rewind) is not None), default=ahead)
        if back < ahead:
            raise RequestError(
                f"the state can go back by {back} tokens; make it with rewind={ahead}, or lower ahead",
                code="range", field="state.rewind", value=back,
            )  # fmt: skip
        if state is not None:
            check_state(model, state, 1, self.max_len - 1)
        self.proposed = self.accepted = self.passes = 0
        self._prompt, self._start = len(self.text), self.state.length
        self._device, self._generator = tokens.device, row_generator(seed, 0, tokens.device)
        self._most, self._gain, self._rest, self._resting = min(FIRST, ahead), 1.0, 0, 0
        proposer.begin(self)

    def __iter__(self) -> Iterator[int]:
        with at_rest(self.model):
            while len(self.text) < self.max_len:
                new = self._pass()
                try:
                    for token in new:
                        self.text.append(token)
                        yield token
                finally:
                    self.state.truncate(self._start + len(self.text) - 1)

    @torch.inference_mode()
    def _pass(self) -> list[int]:
        """Runs one pass; returns the draft tokens that it accepts and the token after them."""
        unread = self.text[self.state.length - self._start :]
        most = min(self._most, self.max_len - len(self.text) - 1, self.state.max_len - self.state.length - 1)
        whole_prompt = self.model.takes_prefix and not self.state.length  # drafts are not part of the prefix
        if len(unread) > 1 or self._resting or whole_prompt:
            most, self._resting = 0, max(self._resting - 1, 0)
        guess, drawn_from = self.proposer.propose(self.text, most) if most > 0 else NOTHING
        tokens = torch.tensor([unread + guess], device=self._device)
        if tokens.numel() == 1:
            logits = decode(self.model, tokens, self.state)
        elif len(unread) == 1:
            logits = decode_several(self.model, tokens, self.state)
        else:
            logits = prefill(self.model, tokens, self.state)
        kept, token = self._check(logits, guess, drawn_from)
        if not logits[: kept + 1].max(-1).values.isfinite().all():
            raise WorkError(f"the model's logits are not numbers after {len(self.text) + kept} tokens", code="diverged")
        self.passes += 1
        self.proposed += len(guess)
        self.accepted += kept
        if guess:
            self._adapt(len(guess), kept)
        return [*guess[:kept], token]

    def _check(self, logits: Float[Tensor, "k+1 v"], guess: list[int], drawn_from: Tensor | None) -> tuple[int, int]:
        """Returns the number of accepted draft tokens, and the token after them."""
        rows, past = len(logits), list[Tensor]()
        if self.sampling.penalizes:
            text = torch.tensor(self.text + guess, device=logits.device)
            past = [text[: len(self.text) + i] for i in range(rows)]
        if self.sampling.temperature == 0:
            chosen = choose(logits, [self.sampling] * rows, past, [self._prompt] * rows).tokens.tolist()
            kept = agreeing(guess, chosen)
            return kept, chosen[kept]
        p = warp(logits, self.sampling, past, [self._prompt] * rows).softmax(-1)
        guessed = torch.tensor(guess, dtype=torch.long, device=p.device)[:, None]
        q = F.one_hot(guessed[:, 0], p.shape[-1]).to(p) if drawn_from is None else drawn_from.to(p)
        u = torch.rand(len(guess), 1, generator=self._generator, device=exact_device(p.device), dtype=torch.float64)
        stands = u * exact(q.gather(1, guessed)) < exact(p[:-1].gather(1, guessed))  # with probability min(1, p / q)
        kept = int(stands.cumprod(0).sum())
        if kept < len(guess) and (rest := (p[kept] - q[kept]).clamp(min=0)).any():  # the rest is empty if only
            return kept, int(draw(rest.log()[None], [self._generator]))  # rounding made p less than q
        return kept, int(draw(p[kept].log()[None], [self._generator]))

    def _adapt(self, proposed: int, accepted: int) -> None:
        self._gain += (accepted - self._gain) / 4
        stood = accepted == proposed
        self._most = min(2 * self._most, self.ahead) if stood else max(self._most // 2, accepted + 1)
        if self._gain >= WORTH_IT:
            self._rest = 0
        elif not stood:
            self._resting = self._rest = min(max(4 * self._rest, 1), LONGEST_REST)


def speculate(
    model: Model,
    tokens: Int[Tensor, "1 s"],
    proposer: Proposer,
    max_new_tokens: int = 100,
    sampling: Sampling = Sampling(),  # noqa: B008  # frozen
    seed: int | None = None,
    ahead: int = AHEAD,
    state: ModelState | None = None,
) -> Speculation:
    """Returns an iterator over the new tokens, which counts draft tokens and passes. With a `state`, `tokens` continue
    the text that it has read; if it has windows or recurrences, it needs `rewind=ahead`.

    At temperature 0 the tokens are those of `stream`, up to the rounding of passes over several tokens. Otherwise a
    draft token x is accepted with probability min(1, p(x) / q(x)), where p is the model's distribution after all
    warpers and q the distribution that x was drawn from; in place of the first rejected one, a token is drawn from
    max(p - q, 0), normalised. Each token then has the distribution p, but a seed gives another text than in `stream`.

    A guess has at most `ahead` tokens: 4 at first, twice the number after a guess that was accepted whole, else half,
    but at least one more than were accepted. If a moving average over about four guesses falls below 0.6 accepted
    tokens, each guess that fails is followed by passes without one: 1, then 4, then 16.

    Raises RequestError for a request that cannot be generated, WorkError if the model's logits are not numbers."""
    return Speculation(model, tokens, proposer, max_new_tokens, sampling, seed, ahead, state)
