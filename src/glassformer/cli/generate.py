"""Text in the terminal, as it comes."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from glassformer import machine
from glassformer.cli.options import Drawing, Writing
from glassformer.cli.show import size
from glassformer.convert.weights import fold
from glassformer.errors import RequestError, WorkError, no_memory
from glassformer.generation import CompiledStep, Sampling, prefill, stream
from glassformer.generation.beams import beams
from glassformer.generation.engine import LONGEST_PROMPT, Engine, GenerationRequest
from glassformer.generation.kept import check_keeps, kept_tokens, load_state, save_state
from glassformer.generation.rules import Rules, not_applied
from glassformer.generation.speculate import AHEAD, Draft, PromptLookup, Proposer, Speculation, speculate
from glassformer.generation.steps import check_source, check_tokens, new_state
from glassformer.generation.text import Detokenizer, Stops
from glassformer.introspection import rows_of
from glassformer.loaded import Loaded
from glassformer.model import Model
from glassformer.naming.loading import load
from glassformer.parts.precision import onednn_in_bf16
from glassformer.parts.quantized import QUANTIZED, quantize
from glassformer.parts.state import ModelState
from glassformer.text import Tokenizer
from glassformer.text.documents import utf8
from glassformer.text.pairs import START, source_ids

NEW_TOKENS = 200
TOP_K = 40
SLOTS = 8
"""Texts written side by side; more wait."""
CHARACTERS = 64
"""Of a token, in the mean, that no text has: so many for each token of the context show that a prompt is too long."""
STATE_DTYPES = {**machine.DTYPES, "int8": torch.int8}
COMPILED_ROOM = 512
"""A compiled step is made for so many tokens, or twice, four times, ... as many, so that few are made."""
LIMITS = {"n": (1, 1000), "beams": (1, 256), "logprobs": (0, 100), "max_new_tokens": (1, 1_000_000)}
INTERRUPTED = 130
"""The exit status of what Ctrl-C ended, as in a shell."""


# What both verbs do before a model is loaded, and to load it


def ready(asked: Drawing) -> Sampling:
    """Sets the process up as asked; RequestError for numbers that cannot be."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what cannot show a character shows another
    chosen = machine.settings(device_of(asked), threads=asked.threads, compile=asked.compile)
    machine.apply(chosen)
    if chosen.device != "cpu":
        say(f"on {chosen.device}")
    if asked.seed is None:
        torch.seed()
    for name, (low, high) in LIMITS.items():
        value = getattr(asked, name, None)
        if value is not None and not low <= value <= high:
            raise RequestError(
                f"{name}={value} must be from {low:,} to {high:,}", code="range", field=name, value=value
            )
    rules = {name: getattr(asked, name) for name in Sampling.model_fields if hasattr(asked, name)}
    if all(rules[name] is None for name in ("top_k", "top_p", "min_p", "typical_p")):
        rules["top_k"] = TOP_K
    rules["logit_bias"] = biases(asked.logit_bias or ())
    return Sampling(**rules)


def biases(given: Iterable[str]) -> dict[int, float]:
    found = {}
    for text in given:
        token, _, value = text.partition("=")
        try:
            found[int(token)] = float(value)
        except ValueError:
            raise RequestError(
                f"logit_bias={text!r}: write ID=VALUE, such as 42=-100", code="syntax", field="logit_bias", value=text
            ) from None
    return found


def state_dtype(asked: Drawing) -> torch.dtype | None:
    """None: that of the weights."""
    return None if asked.state_dtype is None else STATE_DTYPES[asked.state_dtype]


def check_memory(loaded: Loaded, rows: int, max_len: int, dtype: torch.dtype | None, instead: str) -> None:
    """RequestError where so large a state does not fit, before it is made."""
    device = loaded.model.device
    wanted, free = loaded.model.init_state(rows, max_len, dtype, device="meta").nbytes, machine.free_memory(device)
    if free is not None and wanted > free:
        where = "this machine" if device.type == "cpu" else str(device)
        raise RequestError(
            f"the state of {max_len:,} tokens in {rows} row{'s' * (rows > 1)} takes {size(wanted)}, and {where} "
            f"has {size(free)} of memory free; {instead}",
            code="memory", field="context", value=max_len,
        )  # fmt: skip


def device_of(asked: Drawing) -> str:
    """The device asked for; `auto` stays on the CPU with what only that can do."""
    chosen = machine.device_named(asked.device)
    only_here = asked.quantize == "bf16" or (asked.compile and not machine.can_compile(chosen))
    return "cpu" if asked.device == "auto" and only_here else chosen


def fetch(expression: str, asked: Drawing) -> Loaded:
    dtype = asked.dtype or ("bfloat16" if asked.quantize in QUANTIZED else None)
    device = device_of(asked)
    try:
        loaded = load(expression, dtype=dtype and machine.DTYPES[dtype], device=device, quantize=asked.quantize)
    except RuntimeError as error:
        if device == "cpu" or not no_memory(error):
            raise
        raise WorkError(
            f"{expression} does not fit into the memory of {device}; use --device cpu", code="memory"
        ) from None
    half = asked.quantize is None and loaded.model.dtype == torch.bfloat16
    if half and not asked.compile and onednn_in_bf16(loaded.model.device.type):  # the same numbers, read sooner
        loaded.model = fold(loaded.model)
        quantize(loaded.model, "bf16")
    return loaded


def compiled_step(loaded: Loaded, max_len: int, dtype: torch.dtype | None, batch: int = 1) -> CompiledStep:
    """Says when it has to be built."""
    step = CompiledStep(loaded.model, batch, max_len, dtype)
    if not step.ready:
        say("building the compiled step: about a minute, once; it is kept")
    return step.load()


def say(text: str) -> None:
    print(text, file=sys.stderr)


def show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class DecodedText:
    """The text of tokens as they come: whole characters, nothing of a stop string, nothing after an end."""

    def __init__(self, tokenizer: Any, ends: Iterable[int], stops: Stops | None = None):
        self._detokenizer, self._ends, self._stops = Detokenizer(tokenizer), frozenset(ends), stops
        self.tokens: list[int] = []
        self.text = ""
        self.finish: str | None = None
        """stop, once the text has ended."""

    def take(self, token: int) -> str:
        """What can be shown now."""
        if token in self._ends:
            self.finish = "stop"
            return ""
        self.tokens.append(token)
        return self._shown(self._detokenizer.feed(token))

    def close(self) -> str:
        """What was held back; no more tokens come."""
        return self._shown(self._detokenizer.flush(), last=True)

    def _shown(self, piece: str, last: bool = False) -> str:
        if self._stops is not None:
            piece, stopped = self._stops.feed(piece)
            if stopped:
                self.finish = "stop"
            elif last:
                piece += self._stops.flush()
        self.text += piece
        return piece


def source_of(model: Model, tokenizer: Tokenizer, given: str | None, text: str) -> list[list[int]] | None:
    """The ids of the one source; None for a model without an encoder, which reads what stands after the option
    `text`. RequestError for a source that is missing, that nobody reads, or that the encoder cannot read."""
    encoder = model.config.encoder
    if encoder is None and given is None:
        return None
    if encoder is None:
        raise RequestError(
            f"this model has no encoder, so it takes no --source; give the text in {text}",
            code="conflict", field="source", value=given, expected=text,
        )  # fmt: skip
    if given is None:
        raise RequestError(
            "this model reads a source beside its own text: give --source TEXT",
            code="missing", field="source", expected="--source TEXT",
        )  # fmt: skip
    source = [source_ids(tokenizer, given, encoder.context or model.config.context)]
    check_source(model, 1, None, source, None)
    return source


# glassformer generate


def write(expression: str, asked: Writing, as_json: bool) -> None:
    rule = ready(asked)
    check(asked, rule, as_json)
    prompts = read_prompts(asked)
    try:
        run = Writer(fetch(expression, asked), asked, rule, prompts, as_json)
        if asked.beams:
            run.search()
        elif run.batched:
            run.together()
        else:
            run.alone()
    except KeyboardInterrupt:  # before there was anything to show
        say("stopped")
        raise SystemExit(INTERRUPTED) from None
    run.finish()


def check(asked: Writing, rule: Sampling, as_json: bool) -> None:
    """RequestError for what does not go together."""
    ways = [f"--{name}" for name in ("beams", "speculate", "draft") if getattr(asked, name) not in (None, False)]
    prompts = len(asked.prompt or ()) + (asked.prompt_file is not None)
    others = {
        "several prompts": prompts > 1, "--n": asked.n > 1 and not asked.beams, "--compile": asked.compile,
        "--state": asked.state is not None, "--logprobs": asked.logprobs is not None,
    }  # fmt: skip
    given = [*(way for way in ways if way != "--beams"), *(name for name, said in others.items() if said)]
    if asked.source is not None and given:
        raise RequestError(
            f"--source does not go with {given[0]}; leave one of them out", code="conflict", field="source"
        )
    if ways and (wrong := [*ways[1:], *(name for name, given in others.items() if given)]):
        raise RequestError(
            f"{ways[0]} does not go with {wrong[0]}; leave one of them out", code="conflict", field=ways[0][2:]
        )
    if asked.beams and rule != Sampling(temperature=rule.temperature, top_k=TOP_K):
        raise RequestError(
            "--beams searches for the likeliest text; leave the ways to draw tokens and penalties out",
            code="conflict", field="beams", value=asked.beams,
        )  # fmt: skip
    if asked.beams and asked.n > asked.beams:
        raise RequestError(
            f"n={asked.n} is more than beams={asked.beams}: so many texts are not kept",
            code="range", field="n", value=asked.n,
        )  # fmt: skip
    if asked.n > 1 and rule.temperature == 0 and not asked.beams:
        raise RequestError(
            f"n={asked.n} texts at temperature=0 are one and the same; give a higher temperature",
            code="conflict", field="temperature", value=rule.temperature,
        )  # fmt: skip
    if asked.logprobs is not None and not as_json:
        raise RequestError(
            "--logprobs are printed with --json; give both", code="conflict", field="logprobs", value=asked.logprobs
        )
    if asked.state is not None and prompts > 1:
        raise RequestError("--state keeps one prompt; give one", code="conflict", field="state", value=asked.state)
    if asked.state is not None and not Path(asked.state).parent.is_dir():
        raise RequestError(
            f"--state: there is no folder {Path(asked.state).parent}", code="missing", field="state", value=asked.state
        )
    Stops(asked.stop or ())


def read_prompts(asked: Writing) -> list[str]:
    """The texts to go on from. RequestError for one that is empty, far too long, or not there."""
    named = [*(asked.prompt or ()), *([] if asked.prompt_file is None else [None])]
    prompts = []
    if not named and asked.source is not None:
        return [""]
    for text in named or ["-"]:
        if text is None and asked.prompt_file != "-":
            text = read_file(str(asked.prompt_file))
        elif text in (None, "-"):
            text = sys.stdin.read(LONGEST_PROMPT + 1)
        if not text:
            raise RequestError(
                "the prompt is empty; give --prompt TEXT, --prompt-file, or text on standard input",
                code="missing", field="prompt",
            )  # fmt: skip
        if len(text) > LONGEST_PROMPT:
            raise RequestError(
                f"the prompt has more than {LONGEST_PROMPT:,} characters; so many are read at most",
                code="range", field="prompt",
            )  # fmt: skip
        utf8(text, "the prompt")
        prompts.append(text)
    return prompts


def read_file(path: str) -> str:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read(LONGEST_PROMPT + 1)
    except UnicodeDecodeError as problem:
        raise RequestError(
            f"{path} holds the byte {problem.object[problem.start]:#04x}; utf-8 text is right",
            code="damaged", field="prompt_file", value=path,
        ) from None  # fmt: skip
    except (OSError, ValueError) as problem:
        raise RequestError(
            f"--prompt-file: {path!r} cannot be read ({problem})", code="missing", field="prompt_file", value=path
        ) from None


class Writer:
    """What is written, and how long it took."""

    def __init__(self, loaded: Loaded, asked: Writing, rule: Sampling, prompts: list[str], as_json: bool):
        if loaded.tokenizer is None:
            raise RequestError("this model has no tokenizer; it cannot read text", code="missing", field="tokenizer")
        self.loaded, self.asked, self.rule, self.prompts, self.as_json = loaded, asked, rule, prompts, as_json
        self.model, self.tokenizer, self.dtype = loaded.model, loaded.tokenizer, state_dtype(asked)
        rule.check(self.model.vocab_size)
        self.rules = Rules.of(loaded.generation)
        self.source = source_of(self.model, self.tokenizer, asked.source, "--prompt")
        self.ids = [[*self._start(), *self._tokens(prompt)] for prompt in prompts]
        for ids in self.ids:
            check_tokens(self.model, rows_of(self.model, ids))
        self.count = len(prompts) * (1 if asked.beams else asked.n)
        self.ends = set() if asked.ignore_eos else set(self.model.ends)
        self.new, self.max_len = self._room(max(map(len, self.ids)))
        penalized = asked.state is not None and rule.repetition_penalty != 1
        self.batched = not asked.beams and (self.count > 1 or asked.logprobs is not None or penalized)
        unheeded = not_applied(loaded.generation)
        if asked.ignore_eos:
            self.rules = replace(self.rules, forced_eos_token_id=None)
        if self.batched or asked.speculate or asked.draft is not None:  # in which no token is forced or banned
            unheeded += [f"{name}={value}" for name, value in asdict(self.rules).items() if value not in (None, ())]
        if unheeded:
            say(f"the model's folder has {', '.join(unheeded)}, which is not applied here")
        self.slots = min(SLOTS, self.count)
        if asked.compile:
            self.slots = 1 << (self.slots - 1).bit_length()
        rows = (asked.beams or self.slots) + bool(asked.beams or self.batched)  # that of the prompt is one more
        check_memory(loaded, rows, self.max_len, self.dtype, "lower max_new_tokens, n or beams")
        self.texts: list[dict[str, Any]] = []
        self.interrupted = False
        self.state_bytes = 0
        self.guesses: dict[str, int] | None = None
        self.first: float | None = None
        self.failed: WorkError | None = None
        self.began = time.perf_counter()

    def _start(self) -> list[int]:
        """What a text from a source begins with: the folder's token, and in a run that which ends a text."""
        if self.source is None:
            return []
        start = self.loaded.generation.get(START, self.tokenizer.eos_id)
        if start is None:
            raise RequestError(
                "nothing says which token this model's texts begin with; its folder's config.json has a "
                f"{START} where that is known", code="missing", field=START, expected="a token id",
            )  # fmt: skip
        return [start]

    def _new_state(self) -> ModelState:
        room = len(self.source[0]) if self.source else 0
        return new_state(self.model, 1, self.max_len, self.dtype, memory_len=room)

    def _tokens(self, prompt: str) -> list[int]:
        """Of one far too long the beginning is enough to refuse it."""
        enough = CHARACTERS * self.loaded.config.context
        if len(prompt) > enough:
            read = len(self.tokenizer.encode(prompt[:enough]))
            if read > 2 * self.loaded.config.context:  # the cut may have parted a few
                self._refuse(f"over {read // 2:,}")
        return self.tokenizer.encode(prompt).tolist()

    def _refuse(self, tokens: str) -> NoReturn:
        position = self.model.embedding.position
        learned = position is not None and position.limit
        further = "" if learned else "; add +context=TOKENS to the name of the model to go further"
        context = self.loaded.config.context
        raise RequestError(
            f"the prompt has {tokens} tokens, and this model reads {context:,}{further}",
            code="range", field="prompt", value=tokens,
        )  # fmt: skip

    def _room(self, longest: int) -> tuple[int, int]:
        """New tokens of each text; tokens that a state has room for."""
        position, context = self.model.embedding.position, self.loaded.config.context
        limit = position.limit if position is not None else None
        if longest > context or longest == limit:
            self._refuse(f"{longest:,}")
        new = self.asked.max_new_tokens or min(NEW_TOKENS, limit - longest if limit else NEW_TOKENS)
        if limit and longest + new > limit:
            raise RequestError(
                f"max_new_tokens={new} after a prompt of {longest:,} go past this model's learned positions, which end "
                f"at {limit:,}",
                code="range", field="max_new_tokens", value=new,
            )  # fmt: skip
        max_len = longest + new
        if self.asked.compile:
            room = COMPILED_ROOM
            while room < max_len:
                room *= 2
            max_len = room
        return new, min(max_len, limit) if limit else max_len

    def alone(self) -> None:
        """One text, token by token."""
        run, text = None, DecodedText(self.tokenizer, self.ends, self._stops())
        try:
            run = self._speculation() if self.asked.speculate or self.asked.draft is not None else None
            source = self._stream() if run is None else run
            self._show(self.prompts[0])
            try:
                for token in source:
                    self._timed()
                    self._show(text.take(int(token)))
                    if text.finish:
                        break
            except WorkError as problem:
                self.failed, text.finish = problem, "failed"
            finally:
                self._show(text.close() + "\n")
        except KeyboardInterrupt:
            self.interrupted, text.finish = True, "cancelled"
        if run is not None:
            self.state_bytes = run.state.nbytes
            self.guesses = {"proposed": run.proposed, "accepted": run.accepted, "passes": run.passes}
        self._add(self.prompts[0], text.text, len(text.tokens), text.finish or "length", **self._error())

    def _error(self) -> dict[str, str]:
        return {} if self.failed is None else {"error": str(self.failed)}

    def _stream(self) -> Iterator[Any]:
        step = compiled_step(self.loaded, self.max_len, self.dtype) if self.asked.compile else None
        self.began = time.perf_counter()
        state, read = self._begin(self.ids[0])
        self.state_bytes = state.nbytes
        return stream(
            self.model, rows_of(self.model, self.ids[0][read:]), self.new, seed=self.asked.seed, state=state,
            compiled=step, source=self.source, rules=self.rules, eos_id=self.ends, **self.rule.model_dump(),
        )  # fmt: skip

    def _speculation(self) -> Speculation:
        proposer: Proposer = PromptLookup()
        if self.asked.draft is not None:
            draft = fetch(self.asked.draft, self.asked)
            self._check_draft(draft.tokenizer)
            proposer = Draft(draft.model)
        self.began = time.perf_counter()
        state = new_state(self.model, 1, self.max_len, self.dtype, rewind=AHEAD)
        return speculate(
            self.model, rows_of(self.model, self.ids[0]), proposer, self.new, self.rule, self.asked.seed, AHEAD, state
        )  # fmt: skip

    def _check_draft(self, theirs: Any) -> None:
        """RequestError where a token of the draft is another text than the model's: its guesses would mean nothing."""
        mine = self.tokenizer
        if theirs is None or theirs.fingerprint() == mine.fingerprint():
            return
        for i in range(min(mine.vocab_size, theirs.vocab_size)):
            if (a := mine.decode([i])) != (b := theirs.decode([i])):
                raise RequestError(
                    f"--draft {self.asked.draft}: token {i} is {b[:40]!r} there and {a[:40]!r} in the model; give a "
                    "draft of the same vocabulary",
                    code="conflict", field="draft", value=self.asked.draft,
                )  # fmt: skip

    def _begin(self, ids: list[int]) -> tuple[ModelState, int]:
        """The state to go on from, and how many tokens of the prompt it has read: all but the last, where it is kept,
        so that a token is left to read, and the text may go on within it."""
        kept = Path(self.asked.state) if self.asked.state is not None else None
        if kept is not None:
            check_keeps(self.model)
        if kept is not None and kept.exists():
            read = kept_tokens(kept, self.model)
            if len(read) < len(ids) and ids[: len(read)] == read:
                return load_state(kept, self.model, self.max_len, self.dtype)[0], len(read)
            say(f"{kept} has not the beginning of this prompt; it is written anew")
        state = self._new_state()
        if kept is None or len(ids) == 1:
            return state, 0
        with torch.inference_mode():
            prefill(self.model, rows_of(self.model, ids[:-1]), state)
        save_state(kept, state, ids[:-1], self.model)
        return state, len(ids) - 1

    def together(self) -> None:
        """Several texts in a batch, or one of which more is asked than text."""
        slots = self.slots
        if self.asked.compile:
            compiled_step(self.loaded, self.max_len, self.dtype, slots)
        top = 0 if self.asked.logprobs is None else max(self.asked.logprobs, 1)
        engine = Engine(
            self.model, self.tokenizer, self.ends, slots, self.max_len, self.dtype, compiled=self.asked.compile
        )
        requests = [
            engine.submit(
                ids, self.new, self.asked.seed, sample, self.asked.stop or (), top,
                **self.rule.model_dump(),
            )
            for ids in self.ids for sample in range(self.asked.n)
        ]  # fmt: skip
        self.began = time.perf_counter()
        if self.count == 1:
            self._show(self.prompts[0])
        try:
            if self.asked.state is not None:
                state, read = self._begin(self.ids[0])
                engine.remember(self.ids[0][:read], state)
            for changed in engine:
                self._timed()
                for one in changed:
                    if self.count == 1:
                        self._show(one.piece)
                    elif one.finish:
                        self._show_whole(requests.index(one), one.text)
        except KeyboardInterrupt:
            self.interrupted = True
            ended = [one for one in requests if one.finish is None]
            for one in ended:
                one.cancel()
            engine.step()  # shows what was held back in case a stop string followed
            for one in ended:
                if self.count == 1:
                    self._show(one.piece)
                elif one.tokens:
                    self._show_whole(requests.index(one), one.text)
        if self.count == 1:
            self._show("\n")
        self.state_bytes = slots * self._row_bytes()
        for i, one in enumerate(requests):
            self._add(self.prompts[i // self.asked.n], one.text, len(one.tokens) - bool(self.ends & {*one.tokens[-1:]}),
                      str(one.finish), **self._facts(one))  # fmt: skip
        failed = next((one for one in requests if one.error), None)
        self.failed = WorkError(str(failed.error), code="diverged") if failed is not None else None

    def _facts(self, one: GenerationRequest) -> dict[str, Any]:
        """What the engine knows beyond the text."""
        facts: dict[str, Any] = {"error": one.error} if one.error else {}
        if self.asked.logprobs is None:
            return facts
        return facts | {
            "logprobs": [
                {**self._named(token), "logprob": logprob,
                 "top": [{**self._named(i), "logprob": p} for i, p in list(top.items())[: self.asked.logprobs]]}
                for token, logprob, top in zip(one.tokens, one.logprobs, one.top_logprobs, strict=False)
            ]
        }  # fmt: skip

    def _named(self, token: int) -> dict[str, Any]:
        return {"id": token, "token": self.tokenizer.decode([token])}

    def search(self) -> None:
        """The likeliest texts, best first."""
        assert self.asked.beams is not None
        ids, self.began = self.ids[0], time.perf_counter()
        self.state_bytes = self.asked.beams * self._row_bytes()
        try:
            found = beams(
                self.model, rows_of(self.model, ids), self.asked.beams, self.new, self.ends, n=self.asked.n,
                dtype=self.dtype, source=self.source, rules=self.rules,
            )  # fmt: skip
            self._timed()
        except KeyboardInterrupt:  # a search has nothing to show before it is over
            self.interrupted, found = True, []
        except WorkError as problem:
            self.failed, found = problem, []
            self._add(self.prompts[0], "", 0, "failed", **self._error())
        self.count = len(found)
        for i, beam in enumerate(found):
            text = DecodedText(self.tokenizer, self.ends, self._stops())
            for token in beam.tokens:
                text.take(token)
                if text.finish:
                    break
            text.close()
            if self.count == 1:
                self._show(self.prompts[0] + text.text + "\n")
            else:
                self._show_whole(i, text.text)
            self._add(self.prompts[0], text.text, len(text.tokens), text.finish or "length", score=beam.score)

    def _stops(self) -> Stops | None:
        return Stops(self.asked.stop) if self.asked.stop else None

    def _row_bytes(self) -> int:
        return self.model.init_state(1, self.max_len, self.dtype, device="meta").nbytes

    def _timed(self) -> None:
        self.first = self.first or time.perf_counter()

    def _show(self, text: str) -> None:
        if not self.as_json:
            show(text)

    def _show_whole(self, i: int, text: str) -> None:
        prompt = self.prompts[i // self.asked.n]
        self._show(f"--- {i + 1} of {self.count}: {prompt[:60]!r}\n{prompt}{text}\n")

    def _add(self, prompt: str, text: str, tokens: int, finish: str, **more: Any) -> None:
        self.texts.append({"prompt": prompt, "text": text, "tokens": tokens, "finish": finish, **more})

    def finish(self) -> None:
        """The figures; ends the program as Ctrl-C did, or what failed."""
        now, new = time.perf_counter(), sum(one["tokens"] for one in self.texts)
        first = self.first or now
        since, counted = (first, new - 1) if new > 1 and not self.asked.beams else (self.began, new)
        speed = counted / max(now - since, 1e-9)
        if self.as_json:
            alone = self.texts[0] if len(self.texts) == 1 else {}
            figures = {"tokens_per_second": speed, "seconds_to_first_token": self.first and first - self.began}
            guesses = {"guesses": self.guesses} if self.guesses else {}
            print(json.dumps({**alone, "texts": self.texts, **figures, "state_bytes": self.state_bytes, **guesses}))
        else:
            read = f"read, the first after {first - self.began:.2f} s" if self.first else "given"
            rate = f", {speed:.1f} tokens/s" if new else ""
            given = sum(map(len, [*self.ids, *(self.source or ())]))
            parts = [f"{given:,} token{'s' * (given != 1)} {read}",
                     f"{new:,} written{rate}", f"state {size(self.state_bytes)}"]  # fmt: skip
            if self.guesses and self.guesses["proposed"]:
                share = self.guesses["accepted"] / self.guesses["proposed"]
                parts.append(f"{share:.0%} of {self.guesses['proposed']:,} guesses accepted")
            say("; ".join(parts))
        if self.interrupted:
            raise SystemExit(INTERRUPTED)
        if self.failed is not None:
            raise self.failed
