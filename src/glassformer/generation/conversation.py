"""Messages of a chat, and a session that keeps the decode state after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from glassformer.errors import RequestError
from glassformer.figures.terminal import Printed
from glassformer.generation.sampling import Sampling
from glassformer.generation.session import Ready, Session
from glassformer.options import GenerationOptions

STATE_TOKENS = 4096
"""Largest context, in tokens, whose state is allocated at once; a longer one grows, and rereads the conversation."""


class Conversation(Printed):
    """A chat that continues: each turn reads only what is new.

    Parameters
    ----------
    loaded
        A model with a chat template.
    options
        How each answer is generated.
    system
        System message; None for none.
    context
        Largest number of tokens of the conversation; by default the model's context.
    dtype
        Dtype of the decode state; None for that of the weights.
    compiled
        Compile the decode step.
    on_build
        Called before a step is compiled that is not cached yet.

    Raises
    ------
    RequestError
        For a model without a chat template, and a state that does not fit into memory.
    """

    def __init__(
        self,
        loaded: Ready,
        options: GenerationOptions,
        *,
        system: str | None = None,
        context: int | None = None,
        dtype: torch.dtype | None = None,
        compiled: bool = False,
        on_build: Callable[[], object] | None = None,
    ):
        self.loaded, self.options, self.system = loaded, options, system
        if context is not None and not 0 < context <= loaded.config.context:
            raise RequestError(
                f"context={context}: this model reads 1 to {loaded.config.context:,} tokens; add +context=TOKENS to "
                "its name to go further",
                code="range", field="context", value=context,
            )  # fmt: skip
        self.context = context or loaded.config.context
        self.session = Session(
            loaded, slots=1, dtype=dtype, compiled=compiled, kept=1, answers=True, on_build=on_build
        )  # fmt: skip
        _ = self.session.template  # raises RequestError if it is missing
        Sampling.of(options).check(loaded.model.vocab_size)
        if compiled or context is not None or self.context <= STATE_TOKENS:
            self.session.reserve(self.context)
        self.restart()

    def restart(self) -> None:
        """Forgets all messages except the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.new = 0
        """Number of tokens of the last answer."""
        self.finish: str | None = None
        """Finish reason of the last answer, as in `Completion`; None before the first."""

    def lines(self) -> Iterator[str]:
        """Yields each message as a line, "role: text"."""
        return (f"{one['role']}: {one['content']}" for one in self.messages)

    def to_dict(self) -> dict[str, Any]:
        """Returns the object that `--json` prints: messages, and finish reason of the last answer."""
        return {"messages": self.messages, "finish": self.finish}

    def answer(self, text: str) -> Iterator[str]:
        """Yields the answer to a user message in pieces of whole characters. Both join the conversation; of an
        interrupted answer, the part so far. Raises RequestError if the context has no room for an answer."""
        asked = {"role": "user", "content": text}
        ids, _ = self.session.read([*self.messages, asked])
        if (room := self.context - len(ids)) <= 1:
            raise RequestError(
                f"this conversation has {len(ids)} tokens of at most {self.context:,}; /new starts another",
                code="range", field="prompt", value=len(ids),
            )  # fmt: skip
        most = min(self.options.max_new_tokens or room, room)
        reply = self.session.submit(ids, replace(self.options, max_new_tokens=most))
        self.messages.append(asked)  # only now: a message that the template refuses would break every later turn
        try:
            yield from (piece.text for piece in reply if piece.text)
        finally:
            found = reply.so_far()
            reply.cancel()
            self.finish = found.finish_reason
            self.new = len(found.tokens) - (found.tokens[-1:] != [] and found.tokens[-1] in self.loaded.model.ends)
            self.messages.append({"role": "assistant", "content": found.text})
