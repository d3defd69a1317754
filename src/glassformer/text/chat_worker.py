"""Process in which a chat template is rendered, because templates are untrusted programs.

It is started by its path, `python -I -S chat_worker.py SECONDS FOLDER...`, and imports nothing but the standard library
and Jinja (found in one of FOLDERs). Then it gives up what a template could misuse: new files, sockets and processes,
further modules, all but MEMORY bytes. A template that escapes Jinja's sandbox finds nothing here.

Both directions carry frames: four bytes of length, then that number of bytes. First comes one frame `R`, as soon as the
process is ready; then, for each request, an answer: `T` and the text, or `E` and a sentence about the error.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from typing import IO, Any

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

LENGTH = struct.Struct(">I")
LARGEST_REQUEST = 4 << 20  # bytes
LARGEST_OUTPUT = 1 << 20  # bytes of a rendered chat
MEMORY = 256 << 20  # bytes of address space
LARGEST_DETAIL = 200  # characters of what a template may say in a sentence of ours

ALLOWED_EVENTS = {"compile", "exec", "code.__new__", "object.__getattr__", "sys._getframe", "builtins.id"}
"""Audit events that templates raise when compiled, run and failing, and json; all others are refused."""


def write_frame(stream: IO[bytes], payload: bytes) -> None:
    stream.write(LENGTH.pack(len(payload)) + payload)
    stream.flush()


def read_frame(stream: IO[bytes], largest: int) -> bytes | None:
    """Returns the payload of the next frame; None at the end of the stream, and for a truncated frame or one of more
    than `largest` bytes."""
    head = stream.read(LENGTH.size)
    length = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else largest + 1
    if length > largest:
        return None
    payload = stream.read(length)
    return payload if len(payload) == length else None


def environment() -> Any:
    """Returns a sandboxed Jinja environment, set up as in `apply_chat_template` of transformers."""
    from jinja2 import BaseLoader, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
    from jinja2.utils import Namespace

    class Alone(BaseLoader):
        def get_source(self, environment: Any, template: str) -> Any:
            raise SecurityError("include, import and extends find nothing, because a chat template has no other files")

    class Generation(Extension):
        """Extension for `{% generation %}`, which marks the model's answers for training; here it is a plain block."""

        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class Dict:
        """Substitute for `dict` that does not give access to the type."""

        def __call__(self, *items: Any, **named: Any) -> dict[Any, Any]:
            return dict(*items, **named)

        def fromkeys(self, *items: Any) -> dict[Any, Any]:
            return dict.fromkeys(*items)

    class PublicNamespace(Namespace):
        """Jinja's `namespace` without names that start with an underscore."""

        def __init__(*items: Any, **named: Any) -> None:
            values = dict(*items[1:], **named)
            for name in values:
                _public(name)
            Namespace.__init__(items[0], values)

        def __setitem__(self, name: str, value: Any) -> None:
            _public(name)
            super().__setitem__(name, value)

    def _public(name: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace takes no name with an underscore before it, as {name!r}")

    def raise_exception(message: Any) -> None:
        raise Refusal(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(
        loader=Alone(), trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": Dict(),
        "namespace": PublicNamespace,
    }
    made.globals.pop("lipsum")
    return made


class Refusal(Exception):
    """Error with the message that a template gives to `raise_exception`."""


class TooLong(Exception):
    """Error for a rendered chat of more than `LARGEST_OUTPUT` bytes."""


def bounded(pieces: Iterator[str]) -> bytes:
    found, size = list[bytes](), 0
    for piece in pieces:
        # Its characters first: the bytes of one that is far too long would take as much memory again.
        found.append(b"" if size + len(piece) > LARGEST_OUTPUT else piece.encode("utf-8", "surrogatepass"))
        size += max(len(piece), len(found[-1]))
        if size > LARGEST_OUTPUT:
            raise TooLong
    return b"".join(found)


def sentence(problem: BaseException) -> str:
    """Returns an error's code, a space, and a sentence about it, of bounded length and on one line whatever the
    template says."""
    from jinja2 import TemplateSyntaxError, UndefinedError
    from jinja2.sandbox import SecurityError

    detail = " ".join(str(problem)[: 8 * LARGEST_DETAIL].split())[:LARGEST_DETAIL] or "without a word"
    table: tuple[tuple[Any, str], ...] = (
        (Refusal, f"conflict the chat template refuses these messages ({detail})"),
        (TooLong, f"range the chat template writes more than {LARGEST_OUTPUT >> 20} MiB; such a chat is refused"),
        (RecursionError, "range the chat template nests or calls itself too deeply"),
        (MemoryError, f"memory the chat template needs more than {MEMORY >> 20} MiB of memory; such a one is refused"),
        ((SecurityError, PermissionError), f"unsupported the chat template does what the sandbox forbids ({detail})"),
        (UndefinedError, f"missing the chat template uses what the messages do not have ({detail})"),
    )
    if isinstance(problem, TemplateSyntaxError):
        return f"syntax the chat template has a syntax error in line {problem.lineno} ({detail})"
    said = next((words for kind, words in table if isinstance(problem, kind)), None)
    return said or f"failed the chat template fails ({type(problem).__name__}: {detail})"


class Renderer:
    """Renderer of requests `{"template": ..., "variables": {...}}`, which keeps the last template compiled."""

    def __init__(self) -> None:
        self.environment = environment()
        self.source: str | None = None
        self.template: Any = None

    def answer(self, request: bytes) -> bytes:
        try:
            asked = json.loads(request)
            if asked["template"] != self.source:
                self.template, self.source = self.environment.from_string(asked["template"]), asked["template"]
            return b"T" + bounded(self.template.generate(asked["variables"]))
        except BaseException as problem:  # from an untrusted program, which may raise anything
            return b"E" + sentence(problem).encode("utf-8", "replace")


def limit(name: str, soft: int, hard: int | None = None) -> None:
    """Sets a limit of the operating system; for `hard` None its upper bound stays. No effect on systems without this
    limit."""
    try:
        number = getattr(resource, f"RLIMIT_{name}")
        resource.setrlimit(number, (soft, resource.getrlimit(number)[1] if hard is None else hard))
    except (AttributeError, ValueError, OSError):
        return


def give_up_rights() -> None:
    """Limits memory, files and processes of this process, and refuses audit events, until it ends."""
    for name, most in (("AS", MEMORY), ("FSIZE", 0), ("NOFILE", 3), ("CORE", 0), ("NPROC", 0)):
        limit(name, most, most)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ALLOWED_EVENTS:
            raise PermissionError(f"a chat template may not cause {event}")

    sys.addaudithook(audit)


# What Jinja imports late it must import before: for some filters, for an error, for a missing name.
REHEARSAL = (
    "{{ [] | tojson }}{{ [] | pprint }}{{ 'a b' | wordwrap(1) }}{{ '<a>' | striptags }}{{ strftime_now('%B') }}",
    "{{ a.b }}",
    "{{ 1 // 0 }}",
    "{% if %}",
)


def serve(seconds: int, source: IO[bytes], sink: IO[bytes]) -> None:
    renderer = Renderer()
    for template in REHEARSAL:
        renderer.answer(json.dumps({"template": template, "variables": {}}).encode())
    give_up_rights()
    write_frame(sink, b"R")
    while (request := read_frame(source, LARGEST_REQUEST)) is not None:
        limit("CPU", math.ceil(time.process_time()) + seconds)  # the parent's clock is first, if it still runs
        write_frame(sink, renderer.answer(request))


if __name__ == "__main__":
    sys.path += sys.argv[2:]
    serve(int(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)
    os._exit(0)
