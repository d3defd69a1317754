"""Addresses to listen on, rules of access, and a server that shuts down in order. Torch is not imported here."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from glassformer.errors import RequestError, WorkError
from glassformer.serving.guard import LARGEST_HEADERS, Access, is_loopback
from glassformer.units import plural


def access_of(host: str, token: str | None, origins: Sequence[str]) -> Access:
    """Returns the rules of access for an address. Raises RequestError if other machines reach it without a token."""
    if not is_loopback(host) and token is None:
        raise RequestError(
            f"--host {host} opens the server to a network, so every request needs a secret; give --token, for example "
            f"--token {secrets.token_urlsafe(16)}",
            code="missing", field="token", expected="a secret of at least 16 characters",
        )  # fmt: skip
    own = {host.lower(), "127.0.0.1", "localhost", "::1"}
    if host in ("0.0.0.0", "::"):
        own |= {socket.gethostname().lower(), *_addresses()}
    return Access(hosts=tuple(sorted(own)), origins=tuple(origins), token=token)


def _addresses() -> set[str]:
    with contextlib.suppress(OSError):
        return {str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(socket.gethostname(), None)}
    return set()


def need_libraries() -> None:
    """Raises RequestError unless starlette and uvicorn are installed."""
    try:
        import starlette
        import uvicorn

        assert starlette and uvicorn
    except ImportError as problem:
        raise RequestError(
            f"serving needs {problem.name}; pip install 'glassformer[serve]'", code="missing", field=problem.name or ""
        ) from None


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Yields a socket that is bound to the address, and closes it. Raises RequestError if it cannot be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as problem:
        raise RequestError(
            f"--host {host}: {problem.strerror or problem}", code="unknown", field="host", value=host
        ) from None
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as problem:
            raise RequestError(
                f"--port {port} of {host} cannot be opened ({problem.strerror or problem}); give another, or 0 for a "
                "free one",
                code="exists", field="port", value=port,
            ) from None  # fmt: skip
        yield sock


async def run_app(app: Any, requests: int, sock: socket.socket, grace: float, on_start: Callable[[], object]) -> None:
    """Serves an ASGI application, at most `requests` requests at once, until SIGINT or SIGTERM; running answers then
    have `grace` seconds. Raises WorkError."""
    import uvicorn

    from glassformer.serving.connections import PatientProtocol

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_start()

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            loop, caught = asyncio.get_running_loop(), list[signal.Signals]()
            with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):  # in another thread, or on Windows
                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.add_signal_handler(number, self.handle_exit, number, None)
                    caught.append(number)
            try:
                yield
            finally:
                for number in caught:
                    loop.remove_signal_handler(number)

    config = uvicorn.Config(
        app, http=PatientProtocol, ws="none", lifespan="on", log_config=None, log_level="critical", access_log=False,
        server_header=False, date_header=True, proxy_headers=False, limit_concurrency=2 * requests,
        backlog=2 * requests, timeout_keep_alive=5, timeout_graceful_shutdown=max(1, round(grace)),
        h11_max_incomplete_event_size=LARGEST_HEADERS,
    )  # fmt: skip
    server = Server(config)
    await server.serve([sock])
    if not server.started:
        raise WorkError("the server did not start", code="failed")
    print(f"stopped; {plural(len(server.server_state.tasks), 'answer')} cut off", file=sys.stderr, flush=True)
