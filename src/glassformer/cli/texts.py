"""Output of `glassformer generate`: reads the prompts, and prints the texts as they are generated."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from glassformer.cli.options import GenerateOptions, no_prompt
from glassformer.cli.running import INTERRUPTED, building, loading, put, ready, say, with_precision
from glassformer.cli.show import show, show_line
from glassformer.cli.start import STARTED
from glassformer.errors import RequestError, shown
from glassformer.generation.texts import GeneratedTexts, TextRun, heading
from glassformer.names.places import kind_of
from glassformer.naming.chatting import loaded_as, state_dtype
from glassformer.options import LONGEST_PROMPT
from glassformer.text.documents import utf8


def write(expression: str, asked: GenerateOptions, as_json: bool) -> None:
    """Generates texts by the options of `generate`, and prints them as they grow. Raises SystemExit after Ctrl-C.

    Raises RequestError for options that contradict or a prompt that cannot be read, WorkError if generation fails."""
    asked, interrupted, failed = ready(asked), False, None
    if asked.prompts is not None and (asked.prompt or asked.prompt_file):
        raise RequestError(
            "--prompts names all prompts; leave the others out", code="conflict", field="prompts", value=asked.prompts
        )
    asked.check(len(asked.prompt or ()) + (asked.prompt_file is not None), asked.compile)
    if asked.logprobs is not None and not as_json and asked.prompts is None:
        raise RequestError(
            "--logprobs are printed with --json; give both", code="conflict", field="logprobs", value=asked.logprobs
        )
    records = None if asked.prompts is None else read_records(asked.prompts)
    prompts = read_prompts(asked) if records is None else [record["prompt"] for record in records]
    for_draft, asked = asked, with_precision(expression, asked)
    try:
        with loading(as_json):
            loaded, dtype = loaded_as(expression, asked), state_dtype(asked)
        run = TextRun(loaded, prompts, asked, dtype=dtype, compiled=asked.compile, on_build=building)
    except KeyboardInterrupt:  # before there was anything to show
        say("stopped")
        raise SystemExit(INTERRUPTED) from None
    if run.not_applied:
        say(f"the model's folder has {', '.join(run.not_applied)}, which is not applied here")
    view = _View(run, as_json or records is not None)
    lines = None if records is None else _Lines(run, records)
    try:
        if not run.start(None if asked.draft is None else loaded_as(asked.draft, for_draft)):
            say(f"{asked.state} does not hold the start of this prompt; it is written again")
        if lines is None:
            view.follow()
        else:
            lines.follow()
    except KeyboardInterrupt:
        interrupted = True
    except BrokenPipeError:
        raise
    except Exception as problem:
        if not any(one.tokens for one in run.so_far().completions):
            raise
        failed = problem  # the texts so far are shown first
    found = replace(run.result(), before=run.began - STARTED)
    view.finish(found)
    if lines is not None:
        lines.finish(found)
        say(found.summary)
    elif not as_json:
        say(found.summary)
    if failed is not None:
        vars(failed)["so_far"] = found if as_json and lines is None else None  # others are shown by now
        raise failed
    if lines is None and as_json:
        show(found, as_json)
    elif lines is None:
        found.check()
    if interrupted:
        raise SystemExit(INTERRUPTED)


class _View:
    """Printer of texts: a single one as it grows, several each once it is complete."""

    def __init__(self, run: TextRun, quiet: bool):
        self.run, self.quiet = run, quiet
        self.shown: dict[int, str] = {}
        """Index of a text -> its characters printed so far."""
        self.complete: set[int] = set()

    def follow(self) -> None:
        alone = len(self.run.replies) == 1
        if alone:
            self.show(0, "")
        for i, text, complete in self.run:
            if alone or complete:
                self.show(i, text, complete)

    def finish(self, found: GeneratedTexts) -> None:
        """Prints the rest of each text, except cancelled ones without a token; of a single text always."""
        for i, one in enumerate(found.completions):
            if one.tokens or one.finish_reason != "cancelled" or len(found.completions) == 1:
                self.show(i, one.text, complete=True)

    def show(self, i: int, text: str, complete: bool = False) -> None:
        """Prints the characters that text `i` has grown by: before the first, its heading and prompt; after the last
        (`complete`), a newline."""
        if self.quiet or i in self.complete:
            return
        prompts = self.run.prompts
        start = "" if i in self.shown else heading(i, len(prompts), prompts[i]) + prompts[i]
        put(start + text[len(self.shown.get(i, "")) :] + "\n" * complete)
        self.shown[i] = text
        if complete:
            self.complete.add(i)


class _Lines:
    """Printer of one line of JSON per text, in prompt order, each once it and all before it are complete."""

    def __init__(self, run: TextRun, records: list[dict[str, Any]]):
        self.run, self.printed = run, 0
        self.records = [record for record in records for _ in range(len(run.prompts) // len(records))]

    def follow(self) -> None:
        complete: set[int] = set()
        for i, _, done in self.run:
            complete |= {i} if done else set()
            while self.printed in complete:
                self._print(self.run.so_far())

    def finish(self, found: GeneratedTexts) -> None:
        """Prints the lines of the texts not printed yet, complete or not."""
        while self.printed < len(found.completions):
            self._print(found)

    def _print(self, found: GeneratedTexts) -> None:
        show_line({**self.records[self.printed], **found.facts(self.printed)})
        self.printed += 1


def read_records(path: str) -> list[dict[str, Any]]:
    """Returns the objects of a file of JSON lines, each with the field `prompt`; a line may be only the text in quotes.

    Raises RequestError for another line, and for a file without prompts."""
    text = sys.stdin.read() if path == "-" else read_file(path, "prompts", None)
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"line {number} of {shown(path)}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise RequestError(f"{where} is not JSON", code="syntax", field=f"prompts:{number}") from None
        record = {"prompt": record} if isinstance(record, str) else record
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str) or not record["prompt"]:
            message = f'{where} has no prompt; write {{"prompt": "TEXT"}} or "TEXT"'
            raise RequestError(message, code="missing", field=f"prompts:{number}.prompt")
        check_prompt(record["prompt"])
        records.append(record)
    if not records:
        raise RequestError(f"{shown(path)} holds no prompts", code="missing", field="prompts", value=path)
    return records


def check_prompt(text: str) -> None:
    """Raises RequestError for a prompt of more than `LONGEST_PROMPT` characters, or that is not valid Unicode."""
    if len(text) > LONGEST_PROMPT:
        raise RequestError(f"the prompt has more than {LONGEST_PROMPT:,} characters", code="range", field="prompt")
    utf8(text, "the prompt")


def read_prompts(asked: GenerateOptions) -> list[str]:
    """Returns the prompts of --prompt and --prompt-file, by default standard input; [""] if only --source, the text for
    the encoder, is given.

    Raises RequestError for a prompt that is empty, too long, or not text."""
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
            raise no_prompt()
        check_prompt(text)
        prompts.append(text)
    return prompts


def read_file(path: str, field: str = "prompt_file", most: int | None = LONGEST_PROMPT + 1) -> str:
    """Returns the text of a file, at most its first `most` characters (if None, all).

    Raises RequestError, for the option `field`, if it cannot be read or is not UTF-8."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read(most)
    except UnicodeDecodeError as problem:
        kind = kind_of(problem.object) or f"not UTF-8 text: it holds the byte {problem.object[problem.start]:#04x}"
        raise RequestError(
            f"{shown(path)} is {kind}",
            code="damaged", field=field, value=path,
        ) from None  # fmt: skip
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", "") or problem
        raise RequestError(
            f"--{field.replace('_', '-')}: {shown(repr(path))} cannot be read ({reason})",
            code="disk", field=field, value=path,
        ) from None  # fmt: skip
