"""Chat templates, which turn messages into the text that a model was trained to answer.

A template is a Jinja program that came with a model, so it is untrusted. It runs in a separate process (see
`chat_worker`), sandboxed, with bounds on time, memory and output.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from glassformer.errors import CODES, RequestError, WorkError
from glassformer.text.chat_worker import LARGEST_OUTPUT, LARGEST_REQUEST, MEMORY, read_frame, write_frame
from glassformer.text.documents import utf8
from glassformer.text.subword import FileTokenizer
from glassformer.text.vocabulary import Tokenizer

LARGEST_TEMPLATE = 256 << 10  # bytes
SECONDS = 1.5  # for one chat; two if the process must be killed
SECONDS_TO_START = 30.0  # for the start of a process on a busy machine
KEPT_VARIABLES = ("SYSTEMROOT", "TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # inherited by the process; no secrets

SAFE_JINJA = (3, 1, 6)  # in older versions templates can leave the sandbox
PROCESSOR_TIME = getattr(signal, "SIGXCPU", 0)

Message = Mapping[str, Any]
"""Message such as `{"role": "user", "content": "Hello"}`, with any further fields that a template reads."""


class ChatTemplate:
    """A chat template with the variables that it may use, such as `bos_token`. Its process runs until `close`, or until
    this object is deleted."""

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        size = len(utf8(source, "the chat template"))
        if size > LARGEST_TEMPLATE:
            raise RequestError(
                f"the chat template has {size} bytes; one above {LARGEST_TEMPLATE >> 10} KiB is refused",
                code="range", field="chat_template", value=size,
            )  # fmt: skip
        self.source = source
        self.variables = dict(variables or {})
        self._worker = TemplateWorker()

    @classmethod
    def of(cls, tokenizer: Tokenizer, name: str = "default") -> ChatTemplate | None:
        """Returns the chat template in a tokenizer's settings, with the special tokens as variables; None if the
        settings have no template.

        If there are several, returns the one called `name`. Raises RequestError for an unknown name.
        """
        found = tokenizer.settings.get("chat_template") if isinstance(tokenizer, FileTokenizer) else None
        if not isinstance(tokenizer, FileTokenizer) or found is None:
            return None
        named = {"default": found} if isinstance(found, str) else _by_name(found)
        if name not in named:
            raise RequestError(
                f"this tokenizer has no chat template {name!r}; it has {', '.join(map(repr, named))}",
                code="unknown", field="chat_template", value=name,
            )  # fmt: skip
        return cls(named[name], tokenizer.special_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Returns the text of a chat; with `add_generation_prompt`, it ends where the answer starts.

        Raises RequestError if the template fails, exceeds a bound, or calls `raise_exception`. The first call starts a
        process, which takes a tenth of a second; later calls take about a millisecond.
        """
        if not isinstance(messages, (list, tuple)) or not all(
            isinstance(message, Mapping) and "role" in message for message in messages
        ):
            raise RequestError(
                'messages must be a list of {"role": ..., "content": ...}', code="type", field="messages"
            )
        values = {
            "tools": None,
            "documents": None,
            **self.variables,
            **variables,
            "messages": [{key: value for key, value in message.items() if value is not None} for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            request = json.dumps({"template": self.source, "variables": values}).encode()
        except (TypeError, ValueError, RecursionError) as problem:
            raise RequestError(
                f"messages and variables of a chat must be plain values ({problem})", code="type", field="messages"
            ) from None
        if len(request) > LARGEST_REQUEST:
            raise RequestError(
                f"these messages and their template take {len(request)} bytes; above {LARGEST_REQUEST >> 20} MiB they "
                "are refused",
                code="range", field="messages", value=len(request),
            )  # fmt: skip
        text = self._worker.render(request)
        utf8(text, "the rendered chat")
        return text

    def close(self) -> None:
        """Ends the process that renders; another `render` starts a new one."""
        self._worker.stop()

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def render_chat(
    template: str, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
) -> str:
    """Returns the text of a chat, rendered as by `ChatTemplate(template).render`; keeps the last template's process for
    the next call."""
    return _kept(template).render(messages, add_generation_prompt=add_generation_prompt, **variables)


@lru_cache(maxsize=1)
def _kept(template: str) -> ChatTemplate:
    return ChatTemplate(template)


def _by_name(templates: Any) -> dict[str, str]:
    """Returns {name: template} of a list `[{"name": "default", "template": "..."}, ...]`, which some settings have.
    Raises RequestError for another value."""
    if isinstance(templates, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
        for entry in templates
    ):
        return {entry["name"]: entry["template"] for entry in templates}
    raise RequestError(
        f"chat_template is of the type {type(templates).__name__}; it must be a string, or a list of "
        '{"name": ..., "template": ...}',
        code="type", field="chat_template",
    )  # fmt: skip


class TemplateWorker:
    """Process that renders templates, started when needed, and replaced after it took too long or failed."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, TemplateWorker] | None = None

    def render(self, request: bytes) -> str:
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self._process = self._start()
                answer, late = _exchange(self._process, request, self.seconds)
                broken = answer is None or late
            except BaseException:  # a late answer must not be read as that of the next request
                self.stop()
                raise
            if broken:
                late = late or self._process.returncode == -PROCESSOR_TIME
                self.stop()
        if answer is None and late:
            raise RequestError(
                f"the chat template does not end within {self.seconds:g} s",
                code="unsupported", field="chat_template",
            )  # fmt: skip
        if answer is None:
            raise RequestError(
                f"the chat template needs more than {MEMORY >> 20} MiB of memory, or broke its process",
                code="memory", field="chat_template",
            )  # fmt: skip
        said = answer[1:].decode("utf-8", "surrogatepass")
        if answer[:1] != b"T":
            code, _, sentence = said.partition(" ")
            raise RequestError(
                sentence, code=next((one for one in CODES if one == code), "failed"), field="chat_template"
            )
        return said

    def stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _start(self) -> subprocess.Popen[bytes]:
        self.stop()
        script = Path(__file__).with_name("chat_worker.py")
        limit = str(max(1, round(self.seconds)))
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script), limit, *_jinja()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ} | {"LC_ALL": "C"},
                start_new_session=True,  # Ctrl-C at the terminal must not reach it
            )
        except OSError as problem:
            raise WorkError(
                f"the process for chat templates cannot be started ({problem})", code="process"
            ) from problem
        self._end = weakref.finalize(self, _end, process)
        ready, _ = _exchange(process, None, SECONDS_TO_START)
        if ready != b"R":
            raise WorkError(
                f"the process for chat templates ended at its start (with status {process.returncode})", code="process"
            )
        return process


def _jinja() -> list[str]:
    """Returns the folders that contain Jinja and MarkupSafe. Raises RequestError without a safe version of Jinja."""
    try:
        version = importlib.metadata.version("jinja2")
        specs = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    except importlib.metadata.PackageNotFoundError:
        version, specs = "", []
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < SAFE_JINJA:
        raise RequestError(
            f"a chat template needs jinja2 {'.'.join(map(str, SAFE_JINJA))} or newer, and {version or 'none'} is "
            "installed; pip install -U jinja2",
            code="missing", field="jinja2", value=version,
        )  # fmt: skip
    return sorted({str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin})


def _exchange(process: subprocess.Popen[bytes], request: bytes | None, seconds: float) -> tuple[bytes | None, bool]:
    """Sends a request, if not None, to the process; returns (the next answer, None if the process failed; True if the
    process was killed because `seconds` had passed)."""
    assert process.stdin is not None and process.stdout is not None
    late = threading.Event()

    def stop() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(seconds, stop)
    timer.start()
    try:
        if request is not None:
            write_frame(process.stdin, request)
        answer = read_frame(process.stdout, LARGEST_OUTPUT + 1)
    except OSError:  # the process has ended
        answer = None
    finally:
        timer.cancel()
    if answer is None:
        process.kill()
        process.wait()
    return answer, late.is_set()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # unread data is lost with the process
                continue
