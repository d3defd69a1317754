"""A terminal for pages: one process imports the package once, and each command of a page runs in a fork of it.

Imports take seconds of every command, and a page has several. `python prompt.py SOCKET` is the process that listens;
`CLIENT` is the text of a command `glassformer` that sends it arguments, folder, environment and standard streams.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import socket
import sys
import traceback

CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as end:
    end.connect({socket!r})
    request = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(end, [len(request).to_bytes(8, "big")], [0, 1, 2])
    end.sendall(request)
    sys.exit(int.from_bytes(end.recv(1) or b"\\1", "big"))
"""
BLOCKS = "--blocks"
"""The argument that asks for an interpreter of blocks instead of a command."""


def received(end: socket.socket) -> tuple[list[str], str, dict[str, str], list[int]]:
    """Arguments, folder, environment and the three standard streams of a request."""
    head, streams, *_ = socket.recv_fds(end, 8, 3)
    data = b""
    while len(data) < int.from_bytes(head, "big"):
        data += end.recv(1 << 16)
    return (*json.loads(data), streams)


def interpret() -> None:
    """Runs blocks of Python in one namespace: reads a JSON string a line, answers [output, error] a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of processes that a block starts
    known: dict[str, object] = {"__name__": "__main__"}
    for line in sys.stdin:
        shown, error = io.StringIO(), None
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            try:
                exec(compile(ast.parse(json.loads(line)), "<block>", "exec"), known)
            except BaseException:
                error = traceback.format_exc()
        print(json.dumps([shown.getvalue(), error]), file=answers, flush=True)


def run(arguments: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> None:
    """Becomes the command of a request; never returns."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # those of the server know its own files
        stream = getattr(sys, name).fileno()
        setattr(sys, name, os.fdopen(stream, mode, buffering=1 if name == "stderr" else -1))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if arguments[1:] == [BLOCKS]:
        interpret()
        sys.exit(0)
    from glassformer.__main__ import entry

    sys.argv = arguments
    entry()


def serve(path: str) -> None:
    """Listens at `path`. Of each request, one fork waits and reports the exit status, and a second is the command."""
    import glassformer as gf

    for name in gf.__all__:
        getattr(gf, name)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        while True:
            end, _ = server.accept()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if os.fork() == 0:
                request = received(end)
                command = os.fork()
                if command == 0:
                    server.close()
                    end.close()
                    run(*request)
                status = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
                end.send(bytes([status if status >= 0 else 128 - status]))
                os._exit(0)
            end.close()


if __name__ == "__main__":
    serve(sys.argv[1])
