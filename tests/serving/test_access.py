"""Rules of access, each on every route, and requests made to harm."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from glassformer.cli import main
from glassformer.loaded import Loaded
from glassformer.parts.quantized import quantize
from glassformer.serving import guard, server
from glassformer.serving.app import Api, fingerprint, make_app
from glassformer.serving.computing import Computer, Served
from glassformer.serving.guard import Access
from glassformer.serving.metrics import TYPE
from glassformer.serving.server import fitting, serve
from tests.cli.conftest import saved
from tests.refused import refused
from tests.serving.conftest import HOST, TOKEN, Logged

httpx = pytest.importorskip("httpx", reason="pip install httpx")

BODIES = {
    "/v1/chat/completions": {"model": "talker", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/completions": {"model": "letters", "prompt": "a", "max_tokens": 1},
    "/v1/embeddings": {"model": "encoder", "input": "a"},
    "/v1/messages": {"model": "talker", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "talker", "messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"model": "talker", "input": "a", "max_output_tokens": 1},
    "/apply-template": {"model": "talker", "messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"model": "letters", "prompt": "a"},
    "/detokenize": {"model": "letters", "tokens": [1]},
}
ROUTES = ["/health", "/metrics", "/openapi.json", "/v1/models", "/v1/models/talker", *BODIES, "/nothing"]
every_route = pytest.mark.parametrize("route", ROUTES)


def ask(client: Any, route: str, **headers: str) -> Any:
    if route in BODIES:
        return client.post(route, json=BODIES[route], headers=headers)
    return client.get(route, headers=headers)


def expected(route: str) -> int:
    return 404 if route == "/nothing" else 200


def test_list_of_routes_is_complete(computer: Computer) -> None:
    paths = {route.path.replace("{name:path}", "talker") for route in Api(computer).routes()}
    assert paths == {*ROUTES} - {"/nothing"}


@every_route
def test_route_answers_in_json(client: Any, route: str) -> None:
    response = ask(client, route)
    kind = TYPE if route == "/metrics" else "application/json"
    assert response.status_code == expected(route) and response.headers["content-type"] == kind
    assert response.headers["cache-control"] == "no-store"
    assert not [name for name in response.headers if name.startswith("access-control")]
    assert expected(route) == 200 or is_error(response.json(), route)


def is_error(body: Any, route: str) -> bool:
    fields = {"message", "type"} if route.startswith("/v1/messages") else {"message", "type", "param", "code"}
    return set(body["error"]) == fields


@every_route
@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "localhost:80a", "evil@127.0.0.1", "[::1", ""],
)
def test_foreign_host_is_refused(client: Any, route: str, host: str) -> None:
    assert ask(client, route, host=host).status_code == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]"])
def test_own_host_is_answered(client: Any, host: str) -> None:
    assert ask(client, "/health", host=host).status_code == 200


@every_route
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1"},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_page_of_another_server_is_refused(client: Any, route: str, headers: dict[str, str]) -> None:
    response = ask(client, route, **headers)
    assert response.status_code == 403 and "access-control-allow-origin" not in response.headers


def test_own_page_is_answered(client: Any) -> None:
    assert ask(client, "/health", origin=HOST, **{"sec-fetch-site": "same-origin"}).status_code == 200


def test_health_needs_no_token_and_reveals_nothing(locked: Any) -> None:
    for secret in ("", "Bearer wrong"):
        response = ask(locked, "/health", authorization=secret)
        assert response.status_code == 200 and response.json() == {"status": "ok"}
    assert locked.post("/health", json={}).status_code == 401
    assert ask(locked, "/health", host="evil.example").status_code == 421


@pytest.mark.parametrize("route", [route for route in ROUTES if route != "/health"])
@pytest.mark.parametrize(
    "secret", [None, "Bearer wrong", f"Bearer {TOKEN}a", f"Basic {TOKEN}", "Bearer", TOKEN, "Bearer é"]
)
def test_token_is_required(locked: Any, route: str, secret: str | None) -> None:
    headers = {} if secret is None else {"authorization": secret.encode("latin-1")}
    response = ask(locked, route, **headers)  # type: ignore[arg-type]
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"


@every_route
@pytest.mark.parametrize("header", [("authorization", f"Bearer {TOKEN}"), ("x-api-key", TOKEN)])
def test_token_opens(locked: Any, client: Any, route: str, header: tuple[str, str]) -> None:
    assert ask(locked, route, **dict([header])).status_code == expected(route)


@every_route
def test_allowed_page_has_cors(locked: Any, client: Any, route: str) -> None:
    page = "http://page.example"
    response = ask(locked, route, origin=page, authorization=f"Bearer {TOKEN}", **{"sec-fetch-site": "cross-site"})
    assert response.status_code == expected(route) and response.headers["access-control-allow-origin"] == page
    before = locked.options(route, headers={"origin": page, "access-control-request-method": "POST"})
    assert before.status_code == 204 and "authorization" in before.headers["access-control-allow-headers"]
    assert ask(locked, route, origin=page).status_code == (200 if route == "/health" else 401)
    assert locked.options(route, headers={"origin": "http://evil.example"}).status_code == 403


@every_route
def test_limits_of_headers_and_methods(client: Any, route: str) -> None:
    assert ask(client, route, **{"x-long": "a" * (17 << 10)}).status_code == 431
    assert client.request("DELETE", route).status_code == 405
    assert client.request("OPTIONS", route).status_code in (204, 405)


@pytest.mark.parametrize("route", BODIES)
def test_limits_of_bodies(client: Any, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LARGEST_BODY", 4096)
    large = json.dumps({**BODIES[route], "more": "a" * 5000}).encode()
    headers = {"content-type": "application/json"}
    assert client.post(route, content=large, headers=headers).status_code == 413
    pieces = (large[i : i + 1000] for i in range(0, len(large), 1000))
    assert client.post(route, content=pieces, headers=headers).status_code == 413
    assert client.post(route, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    assert client.get(route).status_code == 405
    assert ask(client, route).status_code == 200


def test_half_of_a_body_is_waited_for_within_a_bound(live: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each route gets half a body and nothing more, all at once. A route that reads it answers 408, each connection is
    closed, and another user is served before."""
    monkeypatch.setattr(guard, "SECONDS_TO_READ", 2.0)
    address = ("127.0.0.1", int(live.rpartition(":")[2]))
    slow = {}
    try:
        for route in ROUTES:
            raw = json.dumps(BODIES.get(route, {})).encode()
            head = f"{'POST' if route in BODIES else 'GET'} {route} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
            slow[route] = socket.create_connection(address)
            slow[route].sendall(head.encode() + raw[: len(raw) // 2])
        assert httpx.post(f"{live}/v1/completions", json=BODIES["/v1/completions"], timeout=60).status_code == 200
        for route, sock in slow.items():
            sock.settimeout(30)
            answer = b"".join(iter(lambda sock=sock: sock.recv(4096), b""))  # type: ignore[misc]
            status = 408 if route in BODIES else expected(route)
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()), (route, answer)
    finally:
        for sock in slow.values():
            sock.close()


def test_body_that_drips_has_the_same_bound(live: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that arrive in time one by one, all together too late."""
    monkeypatch.setattr(guard, "SECONDS_TO_READ", 0.5)
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(live.rpartition(":")[2]))) as sock:
        sock.settimeout(0.1)
        sock.sendall(head)
        until, answer = time.monotonic() + 20, b""
        while not answer:
            assert time.monotonic() < until
            sock.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                answer = sock.recv(4096)
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_number_of_requests_is_bounded(computer: Computer, log: Logged) -> None:
    from starlette.testclient import TestClient

    full = make_app(computer, Access(requests=4), log)
    full.running = 4
    response = TestClient(full, base_url=HOST).get("/health")
    assert response.status_code == 503 and response.headers["retry-after"]


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"model":' * 10_000, b'{"model": 1e999}',
     b'{"model": "talker", "model": NaN}', b'{"model": "\\ud800"}', b'{"n": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_invalid_body_is_refused(client: Any, route: str, body: bytes) -> None:
    response = client.post(route, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and len(response.text) < 1000 and "Traceback" not in response.text
    assert is_error(response.json(), route)


VALUES: list[Any] = [
    None, True, -1, 0, 1 << 40, 1 << 70, -(1 << 70), 1e308, -0.0, "", "a" * 3000, "\u0000", "\ud800", "../../x",
    "hf:a/b", [], [[]], [None], ["a"] * 3000, [1 << 50], {}, {"a": {"b": []}}, {"type": "json_schema"},
    [{"role": "x"}],
]  # fmt: skip
FIELDS = [
    "model", "messages", "prompt", "max_tokens", "n", "temperature", "top_p", "top_k", "stop", "seed", "logprobs",
    "logit_bias", "echo", "input", "dimensions", "tokens", "stream", "stream_options", "tools", "path", "user",
    "response_format", "best_of", "min_p", "metadata", "tool_choice", "grammar", "regex", "system", "text", "include",
    "instructions", "stop_sequences", "max_output_tokens",
]  # fmt: skip


def test_hostile_bodies_are_refused_and_the_server_continues(client: Any) -> None:
    """1,000 bodies with one or two wrong fields: 2xx or 4xx, never 5xx, and no trace."""
    draw = random.Random(0)
    for _ in range(1000):
        route = draw.choice(list(BODIES))
        body = {**BODIES[route], **{draw.choice(FIELDS): draw.choice(VALUES) for _ in range(draw.choice((1, 2)))}}
        for length in ("max_tokens", "max_output_tokens"):  # without one, a text up to the end of the context
            if length in body and body[length] is None:
                body[length] = 2
        raw = json.dumps(body).encode()
        response = client.post(route, content=raw, headers={"content-type": "application/json"})
        assert response.status_code < 500, (route, body, response.text)
        assert len(response.text) < 2000 and "Traceback" not in response.text
    for route in BODIES:
        assert ask(client, route).status_code == 200


def test_log_escapes_control_characters(client: Any, log: Logged) -> None:
    log.clear()
    client.get("/a%1b[31mred%0aGET /forged 200")
    assert len(log) == 1 and log[0].isprintable() and "\\x1b" in log[0] and "404" in log[0]


def test_internal_failure_reveals_nothing(client: Any, log: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise RuntimeError("secret\x1b")

    monkeypatch.setattr(Api, "_about", broken)
    response = client.get("/v1/models")
    assert response.status_code == 500 and "secret" not in response.text
    assert response.json()["error"]["type"] == "server_error"
    assert any("RuntimeError" in line and line.isprintable() for line in log)


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        ({"host": "0.0.0.0"}, "missing", "token"),
        ({"host": "192.168.1.2"}, "missing", "token"),
        ({"host": "example.com"}, "missing", "token"),
        ({"token": "short"}, "range", "token"),
        ({"allow_origin": ["*"]}, "syntax", "allow_origin"),
        ({"allow_origin": ["http://a/b"]}, "syntax", "allow_origin"),
        ({"port": 70000}, "range", "port"),
        ({"slots": 0}, "range", "slots"),
        ({"grace": -1}, "range", "grace"),
        ({"ctx": 1}, "range", "ctx"),
    ],
)
def test_wrong_start_is_refused(letters: Any, options: dict[str, Any], code: Any, field: str) -> None:
    with refused(code=code, field=field):
        serve(letters, dry=True, **options)


def test_state_must_fit_into_memory(letters: Any) -> None:
    with refused(code="memory", field="context"):
        serve(letters, dry=True, ctx=1 << 40)


@pytest.mark.parametrize(("free", "kind"), [(None, None), (8, None), (4, "bf16"), (2, "int8"), (1, "int4")])
def test_quantisation_fits_into_free_memory(letters: Any, free: int | None, kind: str | None) -> None:
    """Free bytes of 1, 2, 4 and 8 for each weight, and almost no decode state."""
    bytes_free = None if free is None else free * letters.config.num_params()
    state = letters.config.state_bytes(2, torch.float32)
    assert fitting(letters.config, 2, 1, bytes_free and bytes_free + round(state / 0.8)) == kind


def test_dry_start_lists_models_to_serve(letters: Any, encoder: Any) -> None:
    found = serve([letters, encoder], dry=True, slots=2, port=8123)
    assert [one.name for one in found.models] == ["model-1", "model-2"]
    assert found.models[0].state_bytes > 0 and found.models[1].slots == 0
    assert "http://127.0.0.1:8123/v1" in found.example and str(found) and found.to_dict()["address"]


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
def test_start_tells_precision_and_bytes_of_the_weights(letters: Any, kind: str | None) -> None:
    """Bytes of the tensors that the model would save, those of its tied head once."""
    model = deepcopy(letters.model)
    if kind:
        quantize(model, kind)
    mine = Loaded(model.eval(), letters.config, letters.tokenizer)
    (found,) = serve(mine, dry=True, slots=1).models
    held = {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}
    assert (found.precision, found.choice, found.weight_bytes) == (kind or "float32", "", sum(held.values()))
    assert fingerprint(Served("a", mine)) == fingerprint(Served("a", mine))
    assert (fingerprint(Served("a", mine)) == fingerprint(Served("a", letters))) == (kind is None)


def test_start_of_the_command_tells_why_a_precision_was_chosen(
    letters: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its text below the model, and in JSON."""
    name = saved(tmp_path / "model", "llama")
    asked: list[Any] = []

    def decided(_: str, options: Any, *rest: Any) -> tuple[Any, str]:
        asked.append(options.quantize)
        return options, "weights in fewer bits"

    monkeypatch.setattr(server, "decided", decided)
    monkeypatch.setattr(server, "loaded_as", lambda *_: letters)
    for options in ([], ["--json"], ["--quantize", "none"], ["--quantize", "int8"]):
        assert main(["serve", name, "--dry", *options]) == 0
    assert asked == ["auto", "auto", None, "int8"]
    text = capsys.readouterr().out.splitlines()
    assert text[2] == "    weights in fewer bits"
    (document,) = (json.loads(line) for line in text if line.startswith("{"))
    assert document["models"][0]["choice"] == "weights in fewer bits"
    assert document["models"][0]["precision"] == "float32"
