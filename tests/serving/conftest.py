"""Tiny random models behind the application, called in this process, and one server on a free port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import glassformer as gf
from glassformer.loaded import Loaded
from glassformer.text import CharTokenizer
from tests.cli.conftest import saved, with_template

pytest.importorskip("starlette", reason="pip install 'glassformer[serve]'")
pytest.importorskip("uvicorn", reason="pip install 'glassformer[serve]'")
testclient = pytest.importorskip("starlette.testclient", reason="pip install httpx")

from glassformer.serving.app import make_app  # noqa: E402
from glassformer.serving.computing import Computer, Served  # noqa: E402
from glassformer.serving.guard import Access  # noqa: E402
from glassformer.serving.ports import access_of, listening  # noqa: E402
from glassformer.serving.server import run  # noqa: E402

torch.set_num_threads(1)
LETTERS = "abcdefghijklmnopqrstuvwxyz .,\n"
TINY = "layers=2+d_model=32+heads=4+context=256+init=gpt2+init.std=0.2"
HOST = "http://127.0.0.1"
TOKEN = "0123456789abcdef"


@pytest.fixture(scope="session")
def letters() -> Loaded:
    """Continues texts by characters, and has no chat template."""
    config = gf.preset(f"llama@1m+{TINY}+vocab_size={len(LETTERS)}")
    return Loaded(config.build(seed=1).eval(), config, CharTokenizer(LETTERS))


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Answers messages, by bytes."""
    folder = tmp_path_factory.mktemp("talker")
    return gf.load(with_template(saved(folder / "plain", "llama+context=1024"), folder / "talker"))


FOLLOWING = {">": "H", "H": "i", "i": ".", '"': "o", "o": "k", "k": '"'}
ELSE = {'"': "}"}
"""Second choice of the next character, for places at which a schema excludes the first."""


@pytest.fixture(scope="session")
def brief(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Answers "Hi." to any messages, and has "ok" in each string of an answer in JSON: each token depends only on the
    one before."""
    folder = tmp_path_factory.mktemp("brief")
    loaded = gf.load(with_template(saved(folder / "plain", "llama+context=1024"), folder / "brief"))
    model = loaded.model
    (end,) = model.ends
    follows, second = ({ord(a): ord(b) for a, b in one.items()} for one in (FOLLOWING, ELSE))
    follows[ord(".")] = second[ord(">")] = end
    with torch.no_grad():
        for weight in model.layers.parameters():
            if weight.dim() == 2:  # the residual stream is then the embedding
                weight.zero_()
        tokens = torch.nn.functional.normalize(model.embedding.weight, dim=1)
        model.embedding.weight.copy_(tokens)
        model.head.weight.zero_()
        for factor, pairs in ((1.0, follows), (0.5, second)):
            for token, following in pairs.items():
                model.head.weight[following] += factor * tokens[token]
    return loaded


@pytest.fixture(scope="session")
def encoder() -> Loaded:
    """Turns texts into vectors and generates none."""
    config = gf.preset(f"bert@1m+layers=1+d_model=32+heads=4+context=64+vocab_size={len(LETTERS)}")
    return Loaded(config.build(seed=1).eval(), config, CharTokenizer(LETTERS))


def served(letters: Loaded, talker: Loaded, encoder: Loaded, **options: Any) -> list[Served]:
    models = {"letters": letters, "talker": talker, "encoder": encoder}
    return [Served(name, loaded, **options) for name, loaded in models.items()]


class Logged(list[str]):
    """Lines that a guard logs."""

    __call__ = list.append


@pytest.fixture(scope="session")
def log() -> Logged:
    return Logged()


@pytest.fixture(scope="session")
def computer(letters: Loaded, talker: Loaded, encoder: Loaded) -> Iterator[Computer]:
    found = Computer(served(letters, talker, encoder))
    yield found
    found.stop()


@pytest.fixture(scope="session")
def client(computer: Computer, log: Logged) -> Iterator[Any]:
    """A client of the application without a token."""
    app = make_app(computer, Access(), log)
    with testclient.TestClient(app, base_url=HOST, raise_server_exceptions=False) as found:
        yield found


@pytest.fixture(scope="session")
def locked(computer: Computer, log: Logged) -> Any:
    """A client of the application with a token, which it does not send by itself."""
    return testclient.TestClient(
        make_app(computer, Access(token=TOKEN, origins=("http://page.example",)), log), base_url=HOST,
        raise_server_exceptions=False,
    )  # fmt: skip


@contextmanager
def listening_to(models: Sequence[Served]) -> Iterator[str]:
    """Gives the address of a server on a free port."""
    ready, stopping = threading.Event(), threading.Event()

    async def serve(sock: Any) -> None:
        task = asyncio.create_task(run(models, access_of("127.0.0.1", None, ()), sock, 1.0, ready.set))
        while not stopping.is_set() and not task.done():
            await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with listening("127.0.0.1", 0) as sock:
        thread = threading.Thread(target=lambda: asyncio.run(serve(sock)), daemon=True)
        thread.start()
        assert ready.wait(60)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        stopping.set()
        thread.join(20)


@pytest.fixture(scope="session")
def live(letters: Loaded, talker: Loaded, encoder: Loaded) -> Iterator[str]:
    """Address of a server on a free port."""
    with listening_to(served(letters, talker, encoder)) as address:
        yield address
