"""`glassformer generate`: reads prompts, asks a session for texts, shows them as they come."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from glassformer.cli.options import Writing
from glassformer.cli.running import INTERRUPTED, TOP_K, building, check_memory, fetch, ready, say, show, state_dtype
from glassformer.errors import RequestError, WorkError
from glassformer.figures.terminal import size
from glassformer.generation import Sampling
from glassformer.generation.engine import LONGEST_PROMPT, MOST_READ
from glassformer.generation.rules import Rules, not_applied
from glassformer.generation.session import SLOTS, Completion, GenerationOptions, Reply, Session
from glassformer.generation.speculate import Draft, PromptLookup, Proposer, check_same_tokens
from glassformer.loaded import Loaded
from glassformer.text.documents import utf8


def write(expression: str, asked: Writing, as_json: bool) -> None:
    options = checked(asked, ready(asked), as_json)
    run = GenerateRun(asked, options, read_prompts(asked), as_json)
    try:
        run.start(fetch(expression, asked))
    except KeyboardInterrupt:  # before there was anything to show
        say("stopped")
        raise SystemExit(INTERRUPTED) from None
    run.compute()
    run.finish()


def checked(asked: Writing, rule: Sampling, as_json: bool) -> GenerationOptions:
    """Returns the options of every text. Raises RequestError for options that exclude each other."""
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
    options = GenerationOptions(
        max_new_tokens=asked.max_new_tokens, stop=tuple(asked.stop or ()), stop_at_eos=not asked.ignore_eos,
        seed=asked.seed, n=asked.n, logprobs=asked.logprobs, sampling=rule,
    )  # fmt: skip
    if not asked.beams:
        options.check_draws()
    return options


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


class GenerateRun:
    """Texts of one command, shown as they come, and how long they took."""

    def __init__(self, asked: Writing, options: GenerationOptions, prompts: list[str], as_json: bool):
        self.asked, self.options, self.prompts, self.as_json = asked, options, prompts, as_json
        self.count = len(prompts) * (1 if asked.beams else asked.n)
        self.replies: list[Reply] = []
        self.shown: dict[int, str] = {}
        """Text shown of each reply."""
        self.found: list[Completion] = []
        self.first: float | None = None
        self.failed: WorkError | None = None
        self.interrupted = False

    def start(self, loaded: Loaded) -> None:
        """Reads the prompts, and makes room. Raises RequestError for what this model cannot do."""
        asked, model = self.asked, loaded.model
        if loaded.tokenizer is None:
            raise RequestError("this model has no tokenizer; it cannot read text", code="missing", field="tokenizer")
        self.loaded, self.dtype = loaded, state_dtype(asked)
        self.options.sampling.check(model.vocab_size)
        reader = Session(loaded)
        read = [reader.read(prompt, asked.source) for prompt in self.prompts]
        self.ids, self.source = [ids for ids, _ in read], read[0][1]
        self.given = sum(len(ids) + len(source or ()) for ids, source in read)
        longest = max(map(len, self.ids))
        room = longest + reader.new_tokens(longest, asked.max_new_tokens)
        unheeded = not_applied(loaded.generation)
        if asked.speculate or asked.draft is not None:  # in which no token is forced or banned
            rules = asdict(Rules.of(loaded.generation))
            unheeded += [f"{name}={value}" for name, value in rules.items() if value not in (None, ())]
        if unheeded:
            say(f"the model's folder has {', '.join(unheeded)}, which is not applied here")
        slots = min(SLOTS, self.count)
        if asked.compile:  # few steps are made
            slots, room = 1 << (slots - 1).bit_length(), reader.room(room)
        rows = asked.beams or slots
        check_memory(loaded, rows + (rows > 1), room, self.dtype, "lower max_new_tokens, n or beams")
        held = model.init_state(rows, room, self.dtype, device="meta", memory_len=len(self.source or ()))
        self.state_bytes = held.nbytes
        kept = MOST_READ if self.count > 1 else int(asked.state is not None)
        self.session = Session(
            loaded, slots=slots, context=room, dtype=self.dtype, compiled=asked.compile, kept=kept,
            answers=slots == 1, on_build=building,
        )  # fmt: skip

    def compute(self) -> None:
        """Shows texts until all are complete, or Ctrl-C."""
        self.began = time.perf_counter()
        try:
            self._search() if self.asked.beams else self._continue()
        except KeyboardInterrupt:
            self.interrupted = True
            for reply in self.replies:
                reply.cancel()
        self.found = self.found or [reply.so_far() for reply in self.replies]
        if not self.found and self.count == 1 and self.interrupted and not self.asked.beams:
            self.found = [Completion("", [], "cancelled")]
        for i, one in enumerate(self.found):
            if one.tokens or one.finish_reason != "cancelled" or self.count == 1:
                self._show(i, one.text, whole=True)

    def _search(self) -> None:
        assert self.asked.beams is not None
        try:
            self.found = self.session.search(self.ids[0], self.asked.beams, self.options, source=self.source)
            self.first = time.perf_counter()
        except WorkError as problem:
            self.failed, self.found = problem, [Completion("", [], "failed", error=str(problem))]
        self.count = len(self.found)

    def _continue(self) -> None:
        proposer = self._proposer()
        self.began = time.perf_counter()
        if self.asked.state is not None and not self.session.keep(self.ids[0], self.asked.state):
            say(f"{self.asked.state} has not the beginning of this prompt; it is written anew")
        self.replies = [
            self.session.submit(ids, self.options, source=self.source, sample=sample, proposer=proposer)
            for ids in self.ids for sample in range(self.asked.n)
        ]  # fmt: skip
        if self.count == 1:
            self._show(0, "")
        for reply, _ in self.session:
            self.first = self.first or reply.first_token_time
            if self.count == 1 or reply.finish_reason is not None:
                self._show(self.replies.index(reply), reply.so_far().text, reply.finish_reason is not None)

    def _proposer(self) -> Proposer | None:
        if self.asked.draft is None:
            return PromptLookup() if self.asked.speculate else None
        draft = fetch(self.asked.draft, self.asked)
        if draft.tokenizer is not None and self.loaded.tokenizer is not None:
            check_same_tokens(self.loaded.tokenizer, draft.tokenizer, f"--draft {self.asked.draft}")
        return Draft(draft.model)

    def _show(self, i: int, text: str, whole: bool = False) -> None:
        """Shows the prompt and what `text` i has grown by; of several, the whole of one that is complete."""
        before = self.shown.get(i, "")
        if self.as_json or before.endswith("\0"):
            return
        prompt = self.prompts[i // self.asked.n if not self.asked.beams else 0]
        if self.count > 1 and i not in self.shown:
            show(f"--- {i + 1} of {self.count}: {prompt[:60]!r}\n")
        show(("" if i in self.shown else prompt) + text[len(before) :] + "\n" * whole)
        self.shown[i] = text + "\0" * whole

    def finish(self) -> None:
        """Prints the figures; ends the program as Ctrl-C did, or what failed."""
        texts = [self._facts(i, one) for i, one in enumerate(self.found)]
        now, new = time.perf_counter(), sum(one["tokens"] for one in texts)
        first = self.first or now
        since, counted = (first, new - 1) if new > 1 and not self.asked.beams else (self.began, new)
        speed = counted / max(now - since, 1e-9)
        run = self.replies[0].speculation if self.replies else None
        guesses = {} if run is None else {name: getattr(run, name) for name in ("proposed", "accepted", "passes")}
        if self.as_json:
            alone = texts[0] if len(texts) == 1 else {}
            seconds = self.first and first - self.began
            figures = {"tokens_per_second": speed, "seconds_to_first_token": seconds, "state_bytes": self.state_bytes}
            print(json.dumps({**alone, "texts": texts, **figures, **({"guesses": guesses} if guesses else {})}))
        else:
            read = f"read, the first after {first - self.began:.2f} s" if self.first else "given"
            rate = f", {speed:.1f} tokens/s" if new else ""
            parts = [f"{self.given:,} token{'s' * (self.given != 1)} {read}",
                     f"{new:,} written{rate}", f"state {size(self.state_bytes)}"]  # fmt: skip
            if guesses and guesses["proposed"]:
                share = guesses["accepted"] / guesses["proposed"]
                parts.append(f"{share:.0%} of {guesses['proposed']:,} guesses accepted")
            say("; ".join(parts))
        if self.interrupted:
            raise SystemExit(INTERRUPTED)
        error = next((one.error for one in self.found if one.error), None)
        if error is not None:
            raise self.failed or WorkError(error, code="diverged")

    def _facts(self, i: int, one: Completion) -> dict[str, Any]:
        """Fields of a text in --json."""
        prompt = self.prompts[0 if self.asked.beams else i // self.asked.n]
        ended = self.options.stop_at_eos and one.tokens[-1:] and one.tokens[-1] in self.loaded.model.ends
        facts = {"prompt": prompt, "text": one.text, "tokens": len(one.tokens) - bool(ended)}
        facts |= {"finish": one.finish_reason}
        facts |= {name: value for name in ("error", "score") if (value := getattr(one, name)) is not None}
        if one.logprobs is not None:
            tops: list[Mapping[int, float]] = list(one.top_logprobs or [{} for _ in one.logprobs])
            facts["logprobs"] = [
                {**self._named(token), "logprob": logprob,
                 "top": [{**self._named(j), "logprob": p} for j, p in top.items()]}
                for token, logprob, top in zip(one.tokens, one.logprobs, tops, strict=False)
            ]  # fmt: skip
        return facts

    def _named(self, token: int) -> dict[str, Any]:
        assert self.loaded.tokenizer is not None
        return {"id": token, "token": self.loaded.tokenizer.decode([token])}
