"""The studio behind its guard, called in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="pip install 'glassformer[serve]'")
testclient = pytest.importorskip("starlette.testclient", reason="pip install httpx")

import glassformer as gf  # noqa: E402
from glassformer.loaded import Loaded  # noqa: E402
from glassformer.serving.computing import Served  # noqa: E402
from glassformer.serving.guard import Access  # noqa: E402
from glassformer.studio.app import Pages, make_studio, open_routes  # noqa: E402
from glassformer.text import CharTokenizer  # noqa: E402
from tests.serving.conftest import LETTERS, TINY  # noqa: E402

HOST = "http://127.0.0.1"
TOKEN = "0123456789abcdef"
COOKIE = "glassformer_8600"


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    access = replace(Access(token=TOKEN), open=open_routes(), cookie=COOKIE)
    return Pages(access, "llama@10m+gqa:2", tmp_path_factory.mktemp("comparisons"))


@pytest.fixture(scope="session")
def letters() -> Loaded:
    """Continues texts by characters."""
    config = gf.preset(f"llama@1m+{TINY}+vocab_size={len(LETTERS)}")
    return Loaded(config.build(seed=1).eval(), config, CharTokenizer(LETTERS))


@pytest.fixture(scope="session")
def tiny(pages: Pages, letters: Loaded) -> Served:
    """The model that the studio has, under the name "tiny"."""
    models = pages.models()
    models.names = ["tiny", "encoder"]
    found = Served("tiny", letters, 2, 64)
    models.api.add(found)
    return found


@pytest.fixture(scope="session")
def studio(pages: Pages, tiny: Served) -> Iterator[Any]:
    """A client that has no token."""
    app = make_studio(pages, lambda line: None)
    with testclient.TestClient(app, base_url=HOST, raise_server_exceptions=False) as found:
        yield found


@pytest.fixture
def page(studio: Any) -> Any:
    """Asks as a page does that has its cookie: `page("/api/compose", {...})`, or without a body."""

    def ask(path: str, body: dict[str, Any] | None = None, **headers: str) -> Any:
        given = {"cookie": f"{COOKIE}={TOKEN}", **headers}
        if body is None:
            return studio.get(path, headers=given)
        return studio.post(path, json=body, headers={"x-glassformer": "1", **given})

    return ask
