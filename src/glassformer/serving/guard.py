"""Access to the server: host, origin, token, and limits on size and time, checked before a route gets a request."""

from __future__ import annotations

import asyncio
import hmac
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from glassformer.errors import RequestError, printable
from glassformer.serving.wire import dumps, error_body

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LARGEST_BODY = 8 << 20
"""Largest number of bytes of a body."""
LARGEST_HEADERS = 16 << 10
"""Largest number of bytes of all headers of a request."""
SECONDS_TO_READ = 15.0
"""Seconds within which the headers, and after them the body, must arrive."""
HEALTH = "/health"
"""Route that needs no token, for programs that watch a server; it says only that the server runs."""
REQUESTS = 128
"""Default number of requests that are answered at once; a server accepts twice this number of connections."""


@dataclass(frozen=True)
class Access:
    """Rules of access to a server."""

    hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "::1")
    """Values of the header Host that are accepted, against DNS rebinding."""
    origins: tuple[str, ...] = ()
    """Origins of pages of other servers that may send requests, such as http://localhost:3000."""
    token: str | None = None
    """Secret that every request must carry; None requires no token."""
    requests: int = REQUESTS
    """Largest number of requests that are answered at once."""
    open: frozenset[tuple[str, str]] = frozenset({("GET", HEALTH), ("HEAD", HEALTH)})
    """Method and path of the routes that need no token."""
    cookie: str | None = None
    """Name of the cookie in which a page of this server keeps the token; None for a server without pages."""

    def __post_init__(self) -> None:
        for origin in self.origins:
            parts = urlsplit(origin)
            if (
                parts.scheme not in ("http", "https")
                or not parts.hostname
                or origin != f"{parts.scheme}://{parts.netloc}"
            ):
                raise RequestError(
                    code="syntax",
                    field="allow_origin",
                    value=origin,
                    expected="an origin such as http://localhost:3000",
                )
        if self.token is not None and not (
            16 <= len(self.token) <= 512 and self.token.isascii() and self.token.isprintable()
        ):
            raise RequestError("the token must have 16 to 512 printable ASCII characters", code="range", field="token")


def is_loopback(host: str) -> bool:
    """Returns True for an address that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class Refused(Exception):
    """Refusal of a request, with the status and body that the guard answers."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", **headers: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Guard:
    """ASGI application around another: refuses requests that break the rules of access, and logs every answer."""

    def __init__(
        self,
        app: App,
        access: Access,
        log: Callable[[str], None] | None = None,
        count: Callable[[str, int], None] | None = None,
    ) -> None:
        self.app, self.access, self.count = app, access, count
        self.log = _print if log is None else log
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, or passes it to the application."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # WebSockets
            await send({"type": "websocket.close", "code": 1008})
            return
        begun, status = time.perf_counter(), 0
        cors: list[tuple[bytes, bytes]] = []

        async def answered(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", []), *FIXED, *cors]}
            await send(message)

        self.running += 1
        try:
            cors += self._check(scope)
            if scope["method"] == "OPTIONS":
                await _answer(answered, 204, b"", {})
            else:
                await self.app(scope, _Bounded(scope, receive), answered)
        except Refused as problem:
            if not status:
                body = dumps(error_body(str(problem), problem.kind, code=None)).encode()
                await _answer(answered, problem.status, body, problem.headers)
        except Exception as problem:
            self.log(printable(f"glassformer: {type(problem).__name__} in {scope['path'][:200]}: {str(problem)[:200]}"))
            if not status:
                body = dumps(error_body("the server failed on this request", "server_error")).encode()
                await _answer(answered, 500, body, {})
        finally:
            self.running -= 1
            if self.count is not None:
                self.count(scope["path"], status or 499)
            took = 1000 * (time.perf_counter() - begun)
            self.log(printable(f"{scope['method'][:16]} {scope['path'][:200]} {status or 499} {took:.0f} ms"))

    def _check(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Checks a request; returns the CORS headers of its answer. Raises Refused."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > LARGEST_HEADERS or len(scope["path"]) > 4096:
            raise Refused(431, f"headers may have {LARGEST_HEADERS} bytes")
        if self.running > self.access.requests:
            raise Refused(503, f"{self.access.requests} requests are answered already", "server_error", retry_after="1")
        host = _one(headers, b"host")
        if host is None or not self._is_ours(host):
            raise Refused(421, "this server does not answer for the Host that the request names")
        origin, site = _one(headers, b"origin"), _one(headers, b"sec-fetch-site")
        allowed = origin is not None and origin in self.access.origins
        if origin is not None and not allowed and origin != f"{scope.get('scheme', 'http')}://{host}":
            raise Refused(403, "pages of other servers may not ask; start the server with --allow-origin for one")
        if site in ("cross-site", "same-site") and not allowed:
            raise Refused(403, "pages of other servers may not ask; start the server with --allow-origin for one")
        cors = []
        if allowed and origin is not None:
            cors = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]
            if scope["method"] == "OPTIONS":
                named = b"authorization, content-type, x-api-key, anthropic-version"
                return [
                    *cors,
                    (b"access-control-allow-methods", b"GET, POST"),
                    (b"access-control-allow-headers", named),
                ]
        open_to_all = (scope["method"], scope["path"]) in self.access.open
        if self.access.token is not None and not open_to_all and not self._has_token(scope["method"], headers):
            raise Refused(
                401, "this server needs its token: Authorization: Bearer TOKEN", "authentication_error",
                www_authenticate="Bearer",
            )  # fmt: skip
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise Refused(405, "use GET or POST", allow="GET, POST")
        if scope["method"] == "POST":
            kind = (_one(headers, b"content-type") or "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise Refused(415, "the body must be JSON: Content-Type: application/json")
            length = _one(headers, b"content-length")
            if length is not None and (not length.isascii() or not length.isdecimal() or len(length) > 12):
                raise Refused(400, "Content-Length must be a number")
            if length is not None and int(length) > LARGEST_BODY:
                raise Refused(413, f"a body may have {LARGEST_BODY >> 20} MiB")
        return cors

    def _is_ours(self, host: str) -> bool:
        name, colon, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
        if not colon:
            name = host
        if colon and not (port.isascii() and port.isdecimal() and len(port) <= 5):
            return False
        if name.startswith("[") and name.endswith("]"):
            name = name[1:-1]
        return name.lower() in self.access.hosts

    def _has_token(self, method: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        headers = list(headers)
        given = _one(headers, b"authorization") or ""
        scheme, _, secret = given.partition(" ")
        secret = secret.strip() if scheme.lower() == "bearer" else _one(headers, b"x-api-key") or ""
        if not secret and self.access.cookie and (method in ("GET", "HEAD") or _one(headers, PAGE_HEADER)):
            secret = _cookie(_one(headers, b"cookie") or "", self.access.cookie)
        return hmac.compare_digest(secret.encode("latin-1", "replace"), (self.access.token or "").encode())


PAGE_HEADER = b"x-glassformer"
"""Header that a page of this server sends with every request that changes something; a form of another page cannot."""


def _cookie(header: str, name: str) -> str:
    """Returns the value of a cookie; an empty text without it."""
    pairs = (pair.strip().partition("=") for pair in header.split(";"))
    return next((value for key, _, value in pairs if key == name), "")


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


FIXED = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
"""Headers of every answer."""


def _one(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    """Returns the value of a header, None if it is missing. Raises Refused for a header that is given twice."""
    found = [value for one, value in headers if one == name]
    if len(found) > 1:
        raise Refused(400, f"the header {name.decode()} was given {len(found)} times")
    return found[0].decode("latin-1") if found else None


async def _answer(send: Send, status: int, body: bytes, headers: MutableMapping[str, str]) -> None:
    given = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    if status == 204:
        del given["content-type"]
    raw = [(name.encode(), value.encode("latin-1")) for name, value in given.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


class _Bounded:
    """ASGI `receive` that raises Refused for a body that is too long or too slow."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive, self._size, self._whole = receive, 0, False
        self._until: float | None = None

    async def __call__(self) -> MutableMapping[str, Any]:
        if self._whole:
            return await self._receive()
        now = time.monotonic()
        self._until = self._until or now + SECONDS_TO_READ
        try:
            async with asyncio.timeout(max(0.0, self._until - now)):
                message = await self._receive()
        except TimeoutError:
            raise Refused(408, "the body did not arrive in time", connection="close") from None
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            if self._size > LARGEST_BODY:
                raise Refused(413, f"a body may have {LARGEST_BODY >> 20} MiB", connection="close")
            self._whole = not message.get("more_body", False)
        return message
