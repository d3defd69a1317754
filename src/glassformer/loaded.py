"""`Loaded`: a model from a run folder or a published checkpoint, ready to run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack, cast, overload

from jaxtyping import Float
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.errors import RequestError
from glassformer.figures import Markup, tag
from glassformer.generation.session import Completion, Prompt, Session, Source, TextPiece
from glassformer.generation.spans import Span
from glassformer.generation.spans import answer as answer_question
from glassformer.generation.texts import TextRun
from glassformer.generation.vectors import Classified, Classifier, Embedder, Pooling
from glassformer.model import Model
from glassformer.options import DecodingOptions, GenerationKeywords
from glassformer.text import Tokenizer
from glassformer.text.chat_template import Message
from glassformer.text.messages import as_messages

Prompts = list[str] | list[list[int]] | list[list[Message]]
"""Several prompts or sources, decoded in one batch."""
_MAKING = threading.Lock()
"""Lock for making the session of a loaded model, so that concurrent calls get the same one"""


@dataclass(repr=False)
class Loaded:
    """A model ready to run, with its tokenizer and its settings of generation.

    Examples
    --------
    >>> import glassformer as gf
    >>> from glassformer.text import ByteTokenizer
    >>> config = gf.preset("llama@1m+vocab_size=257+context=64")
    >>> llm = gf.Loaded(config.build(seed=0), config, ByteTokenizer())
    >>> llm.generate("Once upon a time", max_new_tokens=5).finish_reason
    'length'
    >>> [len(one.tokens) for one in llm.generate(["Once", "Twice"], max_new_tokens=3)]
    [3, 3]
    """

    model: Model
    """Built module"""
    config: ModelConfig
    """Config of the model"""
    tokenizer: Tokenizer | None
    """Tokenizer; None for a checkpoint without one"""
    fresh: tuple[str, ...] = ()
    """Parameters that are missing from the checkpoint and newly initialised"""
    regrouped: tuple[str, ...] = ()
    """Parameters with KV heads made from another number of heads"""
    ends: tuple[int, ...] = ()
    """Ids of the end tokens that the checkpoint names"""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Generation settings with the names of a generation_config.json"""
    pooling: Pooling | None = None
    """Pooling of a sentence-transformers folder"""
    unpacked: str = ""
    """Formats and size of the file's quantised weights, if they were unpacked"""

    def __post_init__(self) -> None:
        """Sets the model's end tokens: the checkpoint's and the tokenizer's."""
        own = None if self.tokenizer is None else self.tokenizer.eos_id
        if ends := dict.fromkeys([*self.ends, *([] if own is None else [own])]):
            self.model.ends = tuple(ends)

    @property
    def adapted(self) -> list[str]:
        """Differences from the checkpoint, one clause each."""
        told = []
        if self.regrouped:
            told.append(f"{len(self.regrouped):,} parameters have keys and values made of other numbers of heads")
        if self.fresh:
            told.append(f"{len(self.fresh):,} parameters are newly initialised")
        return told

    @property
    def session(self) -> Session:
        """Session used by `generate`, `stream` and `chat`, so that calls from several threads share a batch.

        It keeps no states of prompts, since weights may change between calls; `gf.Session(loaded)` does."""
        with _MAKING:
            found = cast("Session | None", vars(self).get("_session"))
            if found is None or found.model is not self.model:
                found = vars(self)["_session"] = Session(self, kept=0)
            return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_session"}

    @overload
    def generate(
        self,
        prompt: Prompt = "",
        *,
        source: Source | None = None,
        beams: int | None = None,
        speculate: bool = False,
        draft: Loaded | None = None,
        state: str | Path | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: Prompt | Prompts = "",
        *,
        source: Source | Prompts | None = None,
        n: int,
        beams: int | None = None,
        speculate: bool = False,
        draft: Loaded | None = None,
        state: str | Path | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> list[Completion]: ...

    @overload
    def generate(
        self, prompt: Prompts, *, source: Prompts | None = None, **options: Unpack[GenerationKeywords]
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Any = "",
        *,
        source: Any = None,
        n: int | None = None,
        beams: int | None = None,
        speculate: bool = False,
        draft: Loaded | None = None,
        state: str | Path | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> Completion | list[Completion]:
        """Returns the text that continues a prompt.

        Parameters
        ----------
        prompt
            A text, or a list of texts, which are decoded in one batch. A list of token ids is one prompt.
        source
            Input of the encoder of an encoder-decoder; a list for a list of prompts, or without prompts.
        n
            Number of texts for each prompt; if given, a list is returned.
        beams
            Beam search with this many beams, for the `n` most likely texts of one prompt.
        speculate
            Speculative decoding with drafts copied from earlier text: the same distribution in fewer passes.
        draft
            Speculative decoding with a smaller draft model of the same vocabulary.
        state
            Prompt cache: file with the decode state of one prompt, read if it holds the prompt's start, otherwise
            written.
        **options
            max_new_tokens, stop, stop_at_eos, seed, logprobs; temperature, top_k, top_p, min_p, typical_p,
            repetition_penalty, frequency_penalty, presence_penalty, logit_bias, logits_processor (`GenerationOptions`).
            The defaults are those of the model's generation_config.json, with greedy decoding unless it sets do_sample.

        Returns
        -------
        Completion or list of Completion
            A list for a list of prompts or with `n`: the texts of the first prompt come first.

        Raises
        ------
        RequestError
            For a request that cannot be served, before anything is computed.

        Examples
        --------
        >>> llm.generate("Once", max_new_tokens=3).finish_reason
        'length'
        """
        several = is_several(prompt) or is_several(source)
        if several and not is_several(prompt):
            prompt = [cast("Prompt", prompt)] * len(source)
        prompts = cast("list[Prompt]", list(prompt) if several else [prompt])
        sources = None if source is None else list(source) if several else [source]
        if beams is None and not speculate and draft is None and state is None:
            found = self.session.complete(prompts, sources=sources, n=1 if n is None else n, **options)
        else:
            ways = {"beams": beams is not None, "speculate": speculate, "draft": draft is not None}
            if is_several(source):
                way = next((name for name, asked in ways.items() if asked), "state")
                raise RequestError(
                    f"{way} takes one source, and {len(sources or [])} were given; generate from each in turn",
                    code="conflict", field="source", value=len(sources or []), expected="one source",
                )  # fmt: skip
            defaults = {} if beams is not None else self.generation
            how = DecodingOptions.of(
                defaults, n=1 if n is None else n, source=source, beams=beams, speculate=speculate, state=state,
                draft=None if draft is None else "draft", **options,
            )  # fmt: skip
            run = TextRun(self, prompts, how)
            run.start(draft)
            for _ in run:
                continue
            found = list(run.result().completions)
        return found[0] if n is None and not several else found

    def stream(
        self, prompt: Prompt = "", *, source: Source | None = None, **options: Unpack[GenerationKeywords]
    ) -> Iterator[TextPiece]:
        """Returns an iterator over the pieces of one text as they are generated.

        Parameters
        ----------
        prompt
            A text, or token ids.
        source
            Input of the encoder of an encoder-decoder.
        **options
            Options of `generate`.

        Returns
        -------
        iterator of TextPiece
            A token's id, text and log-probability; prints as the text. Closing or deleting the iterator ends the
            request, as leaving a `for` loop over this call does.

        Raises
        ------
        RequestError
            For a request that cannot be served, before anything is computed.

        Examples
        --------
        >>> for piece in llm.stream("Once", max_new_tokens=3):
        ...     text = piece.text
        """
        return self.session.stream(prompt, source=source, **options)

    def chat(self, messages: str | Sequence[Message], **options: Unpack[GenerationKeywords]) -> Completion:
        """Returns the model's answer to the messages of a chat.

        Parameters
        ----------
        messages
            Mappings such as {"role": "user", "content": "Hello"}, which the model's chat template turns into a text; a
            plain text is one message of the user.
        **options
            Options of `generate`.

        Returns
        -------
        Completion
            The answer; append {"role": "assistant", "content": answer.text} to continue the chat.

        Raises
        ------
        RequestError
            For a model without a chat template, and for messages that its template refuses.

        Examples
        --------
        >>> llm = gf.load("smollm2")  # doctest: +SKIP
        >>> print(llm.chat([{"role": "user", "content": "Hello"}]))  # doctest: +SKIP
        """
        return self.session.submit(as_messages(messages), **options).result()

    def embed(self, texts: Sequence[str]) -> Float[Tensor, "n d"]:
        """Returns a vector for each text, pooled and normalised as the model's folder specifies.

        Without such settings it is the mean over tokens, scaled to length 1.

        Parameters
        ----------
        texts
            At least one text of at least one token; texts are cut to the length in the model's folder, at most the
            model's context.

        Returns
        -------
        Tensor
            Shape (n, d), fp32, in the order of the texts.

        Raises
        ------
        RequestError
            For an empty text, and for a model without a tokenizer or with an encoder and a decoder.

        Examples
        --------
        >>> llm.embed(["Once", "Twice upon a time"]).shape
        torch.Size([2, 128])
        """
        return Embedder(self)(texts)

    def classify(self, texts: Sequence[str]) -> list[Classified]:
        """Returns the class of each text, by a model with a classification head.

        Parameters
        ----------
        texts
            At least one text of at least one token; longer ones than the model's context are cut.

        Returns
        -------
        list of Classified
            The label with its probability, and the probabilities of all labels, in the order of the texts.

        Raises
        ------
        RequestError
            For an empty text, and for a model without a classification head.

        Examples
        --------
        >>> loaded = gf.load("reviews_run")  # doctest: +SKIP
        >>> loaded.classify(["What a lovely film"])[0].label  # doctest: +SKIP
        'pos'
        """
        return Classifier(self).classified(texts)

    def answer(self, question: str, context: str) -> Span:
        """Returns the part of a text that answers a question, by a model with a span head.

        Parameters
        ----------
        question
            The question.
        context
            Text that holds the answer; with the question at most the model's context.

        Returns
        -------
        Span
            The text of the answer and its probability.

        Raises
        ------
        RequestError
            For an empty or too long text, and for a model without a span head.

        Examples
        --------
        >>> loaded = gf.load("questions_run")  # doctest: +SKIP
        >>> loaded.answer("Where does Anna live?", "Anna lives in Rome.").text  # doctest: +SKIP
        'Rome'
        """
        return answer_question(self, question, context)

    def __repr__(self) -> str:
        read = "; ".join([self._reader, *self.adapted])
        return f"Loaded({self.config.num_params():,} parameters, {self.config.n_layers} layers; {read})"

    @property
    def _reader(self) -> str:
        if self.tokenizer is None:
            return "no tokenizer"
        return f"{type(self.tokenizer).__name__} of {self.tokenizer.vocab_size:,} tokens"

    def _repr_html_(self) -> str:
        """Returns, for a notebook, the parts with their parameters, and the tokenizer."""
        return tag("div", Markup(self.config._repr_html_()), tag("p", "; ".join([self._reader, *self.adapted])))


def is_several(prompt: Any) -> bool:
    """Returns True for a list of prompts: texts, lists of ids or chats. A list of ids or of messages is one prompt."""
    return isinstance(prompt, (list, tuple)) and len(prompt) > 0 and isinstance(prompt[0], (str, list, tuple))
