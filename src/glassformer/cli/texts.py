"""`glassformer generate`: reads prompts, asks a session for texts, shows them as they come."""

from __future__ import annotations

import sys

from glassformer.cli.options import GenerateOptions
from glassformer.cli.running import INTERRUPTED, building, put, ready, say
from glassformer.cli.show import show
from glassformer.errors import RequestError
from glassformer.generation.engine import LONGEST_PROMPT
from glassformer.generation.texts import GeneratedTexts, TextRun, heading
from glassformer.naming.chatting import loaded_as, state_dtype
from glassformer.text.documents import utf8


def write(expression: str, asked: GenerateOptions, as_json: bool) -> None:
    """Generates texts and shows them. Ends the program as Ctrl-C does if it was pressed."""
    asked, interrupted = ready(asked), False
    asked.check(len(asked.prompt or ()) + (asked.prompt_file is not None), asked.compile)
    if asked.logprobs is not None and not as_json:
        raise RequestError(
            "--logprobs are printed with --json; give both", code="conflict", field="logprobs", value=asked.logprobs
        )
    prompts = read_prompts(asked)
    try:
        loaded, dtype = loaded_as(expression, asked), state_dtype(asked)
        run = TextRun(loaded, prompts, asked, dtype=dtype, compiled=asked.compile, on_build=building)
    except KeyboardInterrupt:  # before there was anything to show
        say("stopped")
        raise SystemExit(INTERRUPTED) from None
    if run.not_applied:
        say(f"the model's folder has {', '.join(run.not_applied)}, which is not applied here")
    view = _View(run, as_json)
    try:
        if not run.start(None if asked.draft is None else loaded_as(asked.draft, asked)):
            say(f"{asked.state} does not hold the start of this prompt; it is written again")
        view.follow()
    except KeyboardInterrupt:
        interrupted = True
    found = run.result()
    view.finish(found)
    if not as_json:
        say(found.summary)
        found.check()
    else:
        show(found, as_json)
    if interrupted:
        raise SystemExit(INTERRUPTED)


class _View:
    """Shows texts as they grow, or if there are several, once each is complete."""

    def __init__(self, run: TextRun, quiet: bool):
        self.run, self.quiet = run, quiet
        self.shown: dict[int, str] = {}
        """Text shown so far of each."""
        self.complete: set[int] = set()

    def follow(self) -> None:
        alone = len(self.run.replies) == 1
        if alone:
            self.show(0, "")
        for i, text, complete in self.run:
            if alone or complete:
                self.show(i, text, complete)

    def finish(self, found: GeneratedTexts) -> None:
        """Shows what is left of the texts that have tokens, and of a single one."""
        for i, one in enumerate(found.completions):
            if one.tokens or one.finish_reason != "cancelled" or len(found.completions) == 1:
                self.show(i, one.text, complete=True)

    def show(self, i: int, text: str, complete: bool = False) -> None:
        """Shows the prompt, and what text `i` has grown by."""
        if self.quiet or i in self.complete:
            return
        prompts = self.run.prompts
        start = "" if i in self.shown else heading(i, len(prompts), prompts[i]) + prompts[i]
        put(start + text[len(self.shown.get(i, "")) :] + "\n" * complete)
        self.shown[i] = text
        if complete:
            self.complete.add(i)


def read_prompts(asked: GenerateOptions) -> list[str]:
    """Returns the prompts. Raises RequestError for one that is empty, far too long, or not a text."""
    named = [*(asked.prompt or ()), *([] if asked.prompt_file is None else [None])]
    if not named and asked.source is not None:
        return [""]
    prompts = []
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
            raise RequestError(f"the prompt has more than {LONGEST_PROMPT:,} characters", code="range", field="prompt")
        utf8(text, "the prompt")
        prompts.append(text)
    return prompts


def read_file(path: str) -> str:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read(LONGEST_PROMPT + 1)
    except UnicodeDecodeError as problem:
        raise RequestError(
            f"{path} holds the byte {problem.object[problem.start]:#04x}; it must be UTF-8",
            code="damaged", field="prompt_file", value=path,
        ) from None  # fmt: skip
    except (OSError, ValueError) as problem:
        raise RequestError(
            f"--prompt-file: {path!r} cannot be read ({problem})", code="missing", field="prompt_file", value=path
        ) from None
