"""Model class for `lm-eval`, the field's common harness, for any model that `gf.load` reads.

    python -m glassformer.laboratory.lm_eval --model glassformer --model_args path=RUN --tasks hellaswag --batch_size 8

takes every option of the command `lm_eval`, and adds the model `glassformer`; `--model hf` also reads folders of
Glassformer's own format. `path` is a run, a folder, a .gguf file or hf:owner/name; `dtype`, `max_length` and
`prefix_token_id` are optional.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from glassformer.conversion.folder import DTYPES
from glassformer.errors import RequestError, WorkError
from glassformer.generation.session import GenerationOptions, Reply, Session
from glassformer.generation.steps import check_tokens
from glassformer.naming.loading import load
from glassformer.text import FileTokenizer
from glassformer.text.chat_template import ChatTemplate

try:  # first, because the harness loads its own models only while no model is registered
    import lm_eval.models  # type: ignore[import-not-found]  # noqa: F401
    from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found]
    from lm_eval.api.registry import register_model  # type: ignore[import-not-found]
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # type: ignore[import-not-found]
except ImportError as missing:
    refusal = RequestError(f"{missing.name} is not installed; pip install lm-eval", code="missing", field="lm_eval")
    if __name__ == "__main__":
        print(f"glassformer: {refusal}", file=sys.stderr)
        sys.exit(refusal.exit_status)
    raise refusal from None

Request = tuple[Any, list[int], list[int]]
"""Texts of a request (None for a window), ids of the context, ids of the continuation."""


@register_model("glassformer")
class GlassformerLM(TemplateLM):
    """Model for `lm_eval` whose log-likelihoods, in nats, equal those of its model `hf` with the same weights."""

    def __init__(
        self,
        path: str,
        batch_size: int | str = 1,
        device: str | None = None,
        dtype: str | None = None,
        max_length: int | None = None,
        prefix_token_id: int | None = None,
        max_batch_size: int | None = None,
    ):
        """Loads the model of `path`. `max_length` defaults to the model's context. `prefix_token_id` precedes a text
        without a context; by default it is the tokenizer's start-of-text token, or its end-of-text token."""
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise RequestError(
                f"batch_size={batch_size} must be a positive whole number",
                code="range", field="batch_size", value=batch_size,
            )  # fmt: skip
        if dtype is not None and dtype not in DTYPES:
            raise RequestError(
                f"dtype={dtype}: known are {', '.join(DTYPES)}", code="unknown", field="dtype", value=dtype
            )
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            device = None  # default of `lm_eval`, without --device
        found = load(path, dtype=DTYPES[dtype] if dtype else None, device=device)
        if found.tokenizer is None:
            raise RequestError(
                f"path={path} holds no tokenizer, and tasks are text", code="missing", field="tokenizer", value=path
            )
        self.loaded, self.model, self.text = found, found.model, found.tokenizer
        self.batch_size, self.max_length = int(batch_size), int(max_length or found.config.context)
        self._device = self.model.device
        check_tokens(self.model, torch.zeros(1, 1, dtype=torch.long))  # refuses a model that is not causal
        special = (prefix_token_id, getattr(self.text, "bos_id", None), self.text.eos_id)
        self.prefix = next((int(token) for token in special if token is not None), None)
        self.template = ChatTemplate.of(self.text)

    # Text

    @property
    def eot_token_id(self) -> int:
        return self.prefix_token_id if self.text.eos_id is None else self.text.eos_id

    @property
    def prefix_token_id(self) -> int:
        if self.prefix is None:
            raise RequestError(
                "this tokenizer has no token for the start or end of a text; give prefix_token_id=ID in model_args",
                code="missing", field="prefix_token_id",
            )  # fmt: skip
        return self.prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if not isinstance(self.text, FileTokenizer):  # tokenizers of characters and bytes have no special tokens
            return self.text.encode(string).tolist()
        begun = string.startswith(self.text.special_tokens.get("bos_token") or "\0")
        add = not begun if add_special_tokens is None else add_special_tokens
        return self.text.encode(string, parse_specials=True, add_specials=add).tolist()

    @property
    def tokenizer_name(self) -> str:
        return self.text.fingerprint()

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.template.source if self.template and chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if self.template is None:
            raise RequestError(
                "this model has no chat template; leave out --apply_chat_template",
                code="missing", field="tokenizer.chat_template",
            )  # fmt: skip
        if not add_generation_prompt:
            raise RequestError(
                "an answer with a given start cannot be continued here; leave out gen_prefix",
                code="unsupported", field="gen_prefix",
            )  # fmt: skip
        return self.template.render(chat_history)

    # Requests of the harness

    def _loglikelihood_tokens(self, requests: Sequence[Request], **kwargs: Any) -> list[tuple[float, bool]]:
        """Returns, for each request, the log-probability of its continuation in nats, and True if every token of it was
        the most likely one."""
        answers: dict[int, tuple[float, bool]] = {}
        longest_first = sorted(range(len(requests)), key=lambda i: -len(requests[i][1] + requests[i][2]))
        for begin in range(0, len(requests), self.batch_size):
            chosen = longest_first[begin : begin + self.batch_size]
            rows = [(requests[i][1] + requests[i][2])[-(self.max_length + 1) :] for i in chosen]
            targets = [requests[i][2] for i in chosen]
            for i, answer in zip(chosen, self._score(rows, targets), strict=True):
                answers[i] = answer
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
        return [answers[i] for i in range(len(requests))]

    @torch.no_grad()
    def _score(self, rows: list[list[int]], targets: list[list[int]]) -> Iterator[tuple[float, bool]]:
        """Yields, for each row, the log-probability of its target (the last tokens), and True if all of these are the
        most likely ones. To save memory, logits are computed one row at a time, and only for the target."""
        width = max(len(row) for row in rows) - 1
        tokens = torch.tensor([row[:-1] + [0] * (width + 1 - len(row)) for row in rows], device=self.device)
        x = self.model.hidden_states(tokens)
        for i, (row, target) in enumerate(zip(rows, targets, strict=True)):
            asked = x[i : i + 1, len(row) - 1 - len(target) : len(row) - 1]
            logits: Tensor = self.model.unembed(asked)[0].float()
            right = torch.tensor(target, device=self.device)
            likely = logits.log_softmax(-1).gather(1, right[:, None])
            yield float(likely.sum()), bool((logits.argmax(-1) == right).all())

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        totals = []
        for (string,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(string), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            parts: list[Request] = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(likely for likely, _ in self._loglikelihood_tokens(parts)))
            self.cache_hook.add_partial("loglikelihood_rolling", (string,), totals[-1])
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        asked, answers = [request.args for request in requests], []
        with Session(self.loaded, slots=self.batch_size, context=self.max_length) as session:
            for given, reply in zip(asked, [self._submit(session, *one) for one in asked], strict=True):
                found = reply.result()
                if found.error:
                    raise WorkError(found.error, code="diverged")
                answers.append(found.text)
                self.cache_hook.add_partial("generate_until", given, found.text)
        return answers

    def _submit(self, session: Session, context: str, options: dict[str, Any]) -> Reply:
        """Submits a request to generate the text after `context`, up to the first of the strings options["until"]."""
        until = options.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        most = int(options.get("max_gen_toks", options.get("max_new_tokens", 256)))
        if most >= self.max_length:
            raise RequestError(
                f"max_gen_toks={most} leaves no room for a question in a context of {self.max_length}; give "
                f"--gen_kwargs max_gen_toks=N, or max_length in model_args",
                code="range", field="max_gen_toks", value=most,
            )  # fmt: skip
        prompt = self.tok_encode(context)[most - self.max_length :]
        heat = float(options.get("temperature", 0.0)) if options.get("do_sample", True) else 0.0
        top_k = options.get("top_k")
        asked = GenerationOptions(max_new_tokens=most, stop=tuple(stops), temperature=heat, top_k=top_k)
        return session.submit(prompt, asked)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # type: ignore[import-not-found]

    with suppress(ImportError):
        import glassformer.conversion.transformers  # noqa: F401  (for --model hf)
    try:
        cli_evaluate()
    except RequestError as wrong:
        sys.exit(f"error: {wrong}")
