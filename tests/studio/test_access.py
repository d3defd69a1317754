"""Rules of access, each on every route."""

from __future__ import annotations

import re
from typing import Any

import pytest

from glassformer.studio.app import LOGIN, Pages
from glassformer.studio.files import page_files
from tests.studio.conftest import COOKIE, TOKEN

BODIES: dict[str, dict[str, Any]] = {
    LOGIN: {"token": TOKEN},
    "/api/difference": {"first": "gpt2@1m", "second": "llama@1m"},
    "/api/compose": {"expression": "llama@1m"},
    "/api/exports": {"expression": "llama@1m"},
    "/api/choices": {"expression": "llama@1m", "axis": "norm"},
    "/api/change": {"expression": "llama@1m", "change": "mqa"},
    "/api/cost": {"expression": "llama@1m"},
    "/api/model": {"model": "tiny"},
    "/api/next": {"model": "tiny", "text": "a"},
    "/api/look": {"model": "tiny", "text": "the cat"},
    "/api/learn": {"chapter": "three"},
    "/api/states": {"model": "tiny", "text": "the cat"},
    "/api/patch": {"model": "tiny", "text": "the cat", "other": "the dog"},
}
REFUSED = {
    "/api/runs/plan": {"models": ["gpt2@0.1m"], "data": "python-docs"},
    "/api/runs/start": {"models": ["gpt2@0.1m"], "data": "python-docs"},
    "/api/runs/over": {"names": ["nothing"]},
    "/api/runs/why": {"name": "nothing", "run": "nothing"},
    "/api/runs/dynamics": {"name": "nothing"},
    "/api/texts": {"upload": "0" * 16, "name": "a.txt", "size": 1 << 31, "content": ""},
    "/api/runs/stop": {"name": "nothing"},
    "/api/runs/resume": {"name": "nothing"},
}
"""Bodies that are read and refused, so that no process is started."""
SERVED = {
    "/v1/completions": {"model": "tiny", "prompt": "a", "max_tokens": 1},
    "/tokenize": {"model": "tiny", "prompt": "a"},
}
"""Two routes of `glassformer serve`; tests/serving has the others."""
BODIES |= SERVED | REFUSED
OPEN = ["/", "/page/main.js", "/health"]
ROUTES = [*OPEN, "/api/start", "/api/models", "/v1/models", "/api/runs", *BODIES, "/nothing"]
every_route = pytest.mark.parametrize("route", ROUTES)


def ask(client: Any, route: str, **headers: str) -> Any:
    if route in BODIES:
        return client.post(route, json=BODIES[route], headers=headers)
    return client.get(route, headers=headers)


def test_list_of_routes_is_complete(pages: Pages) -> None:
    paths = {route.path.replace("{name}", "main.js") for route in pages.routes()}
    assert paths == {*ROUTES} - {"/nothing", "/v1/models", *SERVED} | {
        "/api/pages/main.js", "/api/runs/main.js/events", "/api/runs/main.js/report"
    }  # fmt: skip


@pytest.mark.parametrize("route", [route for route in ROUTES if route not in (*OPEN, LOGIN)])
@pytest.mark.parametrize("headers", [{}, {"cookie": f"{COOKIE}=wrong"}, {"cookie": f"other={TOKEN}"}])
def test_token_is_required(studio: Any, route: str, headers: dict[str, str]) -> None:
    assert ask(studio, route, **headers).status_code == 401


@pytest.mark.parametrize("route", [route for route in BODIES if route != LOGIN])
def test_cookie_changes_nothing_without_the_header_of_the_page(studio: Any, route: str) -> None:
    assert ask(studio, route, cookie=f"{COOKIE}={TOKEN}").status_code == 401
    found = ask(studio, route, cookie=f"{COOKIE}={TOKEN}", **{"x-glassformer": "1"})
    assert found.status_code == (400 if route in REFUSED else 200)


@every_route
@pytest.mark.parametrize("headers", [{"origin": "http://evil.example"}, {"origin": "null"},
                                     {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}])  # fmt: skip
def test_page_of_another_server_is_refused(studio: Any, route: str, headers: dict[str, str]) -> None:
    given = {"cookie": f"{COOKIE}={TOKEN}", "x-glassformer": "1", **headers}
    response = ask(studio, route, **given)
    assert response.status_code == 403 and "access-control-allow-origin" not in response.headers


@every_route
@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example"])
def test_foreign_host_is_refused(studio: Any, route: str, host: str) -> None:
    assert ask(studio, route, host=host).status_code == 421


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"expression": 1}',
                                  b'{"expression": "' + b"a" * 10_000 + b'"}'])  # fmt: skip
def test_invalid_body_is_refused(studio: Any, route: str, body: bytes) -> None:
    headers = {"cookie": f"{COOKIE}={TOKEN}", "x-glassformer": "1", "content-type": "application/json"}
    response = studio.post(route, content=body, headers=headers)
    assert response.status_code == 400 and len(response.text) < 1000 and "Traceback" not in response.text


@pytest.mark.parametrize("name", ["../app.py", "..%2fapp.py", "%2e%2e/app.py", "/etc/passwd", "nothing.js", "main.js/"])
def test_no_other_file_is_sent(page: Any, name: str) -> None:
    assert page(f"/page/{name}").status_code == 404


@pytest.mark.parametrize("expression", ["/etc/passwd", "../x.yaml", "hf:a/b", "x.gguf", "llama+x=/etc/passwd",
                                        "llama/../../etc", "."])  # fmt: skip
@pytest.mark.parametrize("route", ["/api/compose", "/api/choices", "/api/cost", "/api/exports", "/api/change"])
def test_no_request_names_a_file(page: Any, route: str, expression: str) -> None:
    response = page(route, {**BODIES[route], "expression": expression})
    assert response.status_code == 400 and response.json()["error"]["param"] == "expression"


@pytest.mark.parametrize("route", ["/api/model", "/api/next", "/api/look"])
@pytest.mark.parametrize("model", ["/etc/passwd", "../run", "hf:a/b", "smollm2/../x", "llama@1m"])
def test_only_models_of_the_studio_are_loaded(page: Any, route: str, model: str) -> None:
    response = page(route, {**BODIES[route], "model": model})
    assert response.status_code == 400 and response.json()["error"]["param"] == "model"


@pytest.mark.parametrize("name", ["../x", "..", "%2e%2e", "a/b", "x" * 200, "nothing"])
def test_only_comparisons_of_the_folder_are_read(page: Any, name: str) -> None:
    for what in ("events", "report"):
        assert page(f"/api/runs/{name}/{what}").status_code in (400, 404)
    for what in ("stop", "resume"):
        assert page(f"/api/runs/{what}", {"name": name}).status_code == 400


def test_login_sets_a_cookie_that_scripts_and_other_sites_cannot_use(studio: Any) -> None:
    response = studio.post(LOGIN, json={"token": TOKEN})
    assert response.status_code == 200
    assert response.headers["set-cookie"] == f"{COOKIE}={TOKEN}; Path=/; HttpOnly; SameSite=Strict"
    studio.cookies.clear()
    assert studio.post(LOGIN, json={"token": "é" * 9}).status_code == 401


@every_route
def test_answers_are_not_kept_by_the_browser(page: Any, studio: Any, route: str) -> None:
    response = page(route, BODIES.get(route))
    assert response.status_code == (404 if route == "/nothing" else 400 if route in REFUSED else 200)
    assert response.headers["cache-control"] == "no-store" and response.headers["x-content-type-options"] == "nosniff"
    studio.cookies.clear()


def test_page_allows_no_other_address_and_no_inline_script(studio: Any) -> None:
    policy = studio.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    for name, content in page_files().items():
        text = content.decode()
        if name.endswith((".js", ".css", ".html")):
            assert not re.search(r"https?://(?!www\.w3\.org)", text), name
        assert not re.search(r"\bon\w+=\"|<script>|<style|\sstyle=\"|eval\(", text), name


def test_size_of_the_scripts_is_bounded() -> None:
    assert sum(len(content) for name, content in page_files().items() if name.endswith(".js")) < 200_000
