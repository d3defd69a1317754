"""`gf.serve`: loads models, opens a port, and shuts down in order."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from glassformer import machine
from glassformer.config import ModelConfig
from glassformer.conversion.weights import held_bytes
from glassformer.errors import RequestError, check_whole
from glassformer.figures.terminal import Printed, size
from glassformer.loaded import Loaded
from glassformer.naming.chatting import loaded_as
from glassformer.naming.fastest import decided
from glassformer.options import AUTO, ModelOptions
from glassformer.serving.computing import LARGEST_CONTEXT, Computer, Served
from glassformer.serving.guard import Access
from glassformer.serving.ports import access_of, listening, need_libraries, run_app
from glassformer.typed import typed

MOST_MODELS = 32
PORT = 8000
SHARE = 0.8
"""Fraction of the free memory that weights and decode states may take."""
BYTES = {None: 4.0, "bf16": 2.0, "int8": 1.1}
"""Bytes of a weight by quantisation, the most exact first; int4 is used if none of these fits."""


@dataclass(frozen=True)
class ServedModel:
    """A model that a server offers."""

    name: str
    """Name in requests."""
    parameters: int
    """Number of parameters."""
    precision: str
    """Precision of the matrices: float32, bfloat16, int8, int4, or the format of a .gguf file whose weights stay
    packed."""
    choice: str
    """Sentence about a precision that `auto` chose; empty for weights as they are stored or as they were asked for."""
    weight_bytes: int
    """Bytes of the weights as they are held."""
    context: int
    """Tokens of a prompt and its answer together."""
    slots: int
    """Texts that are computed at once; 0 for a model that generates none."""
    state_bytes: int
    """Bytes of the decode states of all slots."""


@dataclass(frozen=True)
class Serving(Printed):
    """Models that a server offers, and its address; it prints as the command line shows it.

    Examples
    --------
    >>> from glassformer.text import ByteTokenizer
    >>> config = gf.preset("llama@1m+vocab_size=257+context=64")
    >>> llm = gf.Loaded(config.build(seed=0), config, ByteTokenizer())
    >>> found = gf.serve(llm, dry=True, slots=2)
    >>> found.models[0].context
    64
    """

    raw = True
    address: str
    """Base address of the API."""
    models: tuple[ServedModel, ...]
    """Models by the names that requests give them."""
    example: str
    """Command that asks the server."""

    def lines(self) -> Iterator[str]:
        """Yields the text from top to bottom.

        Yields
        ------
        str
            The address, for each model a line and the sentence about its precision, and the example.

        Examples
        --------
        >>> next(found.lines())
        'http://127.0.0.1:8000/v1'
        """
        yield self.address
        for one in self.models:
            state = f", {one.slots} texts at once in {size(one.state_bytes)}" if one.slots else ""
            yield (
                f"  {one.name}: {one.parameters:,} parameters in {one.precision}, {size(one.weight_bytes)}, "
                f"context {one.context:,}{state}"
            )
            if one.choice:
                yield f"    {one.choice}"
        yield ""
        yield self.example

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values.

        Returns
        -------
        dict
            Keys address, models, example.

        Examples
        --------
        >>> found.to_dict()["address"]
        'http://127.0.0.1:8000/v1'
        """
        return asdict(self)


@typed
def serve(
    models: str | Path | Loaded | Sequence[str | Path | Loaded],
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    quantize: str | None = AUTO,
    dtype: str | None = None,
    state_dtype: str | None = None,
    ctx: int | None = None,
    slots: int = 8,
    threads: int | None = None,
    token: str | None = None,
    allow_origin: Sequence[str] = (),
    grace: float = 10.0,
    dry: bool = False,
    on_start: Callable[[Serving], object] | None = None,
) -> Serving:
    """Serves models over HTTP in the formats of OpenAI's API until it is interrupted.

    Parameters
    ----------
    models : str, Path, Loaded, or a sequence of them
        Models with weights: a run folder, a Hugging Face folder, a .gguf file, hf:owner/name, smollm2, minilm. Requests
        name them so; loaded models are named model-1, model-2 and so on.
    host : str
        Address to listen on. An address that other machines reach needs a token.
    port : int
        Port; 0 takes a free one.
    quantize, dtype, state_dtype : str, optional
        Weights and decode state, as for `chat` (`ModelOptions`). The quantisation "auto" also considers only precisions
        with which weights and decode states fit into 80 % of the free memory; None takes weights as they are stored. A
        model that is given loaded keeps its precision.
    ctx : int, optional
        Tokens of a prompt and its answer together; by default the model's context, at most 4,096.
    slots : int
        Texts of each model that are computed at once; more wait.
    threads : int, optional
        CPU threads.
    token : str, optional
        Secret of at least 16 characters that each request must carry as `Authorization: Bearer TOKEN`.
    allow_origin : sequence of str
        Origins of pages of other servers that may ask, such as http://localhost:3000.
    grace : float
        Seconds that running answers have to end once the server is interrupted.
    dry : bool
        Load the models and check memory, but open no port.
    on_start : callable, optional
        Called with the `Serving` once the server listens.

    Returns
    -------
    Serving
        Address, models and an example of a request.

    Raises
    ------
    RequestError
        For a model without weights, a quantisation of a model that is loaded already, a decode state that does not fit
        into memory, an address that cannot be bound, and an address of a network without a token.

    Examples
    --------
    >>> from glassformer.text import ByteTokenizer
    >>> config = gf.preset("llama@1m+vocab_size=257+context=64")
    >>> llm = gf.Loaded(config.build(seed=0), config, ByteTokenizer())
    >>> gf.serve(llm, dry=True).models[0].name
    'model-1'
    >>> gf.serve("smollm2")  # doctest: +SKIP
    """
    check_whole("port", port, 0)
    check_whole("slots", slots)
    for name, value in (("ctx", ctx), ("threads", threads)):
        if value is not None:
            check_whole(name, value, 2 if name == "ctx" else 1)
    for field, number, most in (("grace", grace, 3600), ("port", port, 65535), ("slots", slots, 256)):
        if not 0 <= number <= most:
            raise RequestError(code="range", field=field, value=number, expected=f"from 0 to {most:,}")
    access = access_of(host, token, allow_origin)
    need_libraries()
    machine.apply(machine.settings("cpu", threads=threads))
    served = served_models(models, quantize, dtype, state_dtype, ctx, slots)
    if dry:
        return offer(host, port, served, access)
    with listening(host, port) as sock:
        found = offer(host, sock.getsockname()[1], served, access)
        asyncio.run(run(served, access, sock, grace, lambda: (on_start or _print)(found)))
    return found


def _print(found: Serving) -> None:
    print(found, flush=True)


def served_models(
    models: str | Path | Loaded | Sequence[str | Path | Loaded], quantize: str | None, dtype: str | None,
    state_dtype: str | None, ctx: int | None, slots: int,
) -> list[Served]:  # fmt: skip
    """Loads the models and returns them with sessions whose states fit into memory. Raises RequestError."""
    some: list[Any] = [models] if isinstance(models, str | Path | Loaded) else list(models)
    names = [f"model-{i}" if isinstance(one, Loaded) else str(one) for i, one in enumerate(some, 1)]
    if not names or len(names) > MOST_MODELS:
        raise RequestError(
            f"give 1 to {MOST_MODELS} models", code="range", field="models", value=len(names), expected="at least one"
        )
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"{twice} is named twice; give it once", code="conflict", field="models", value=twice)
    asked = ModelOptions(quantize=quantize, dtype=dtype, device="cpu")  # type: ignore[arg-type]  # loading checks both
    found = []
    for name, one in zip(names, some, strict=True):
        words, how = "", replace(asked, device="auto")  # a model stays on its device
        if not isinstance(one, Loaded):
            how, words = decided(one, asked, "cpu", lambda config: fitting(config, ctx, slots, machine.free_memory()))
        found.append(Served(name, loaded_as(one, how), slots, ctx, state_dtype, words))
        if found[-1].session is None and found[-1].embedder is None:
            raise RequestError(
                f"{name} generates no text and has no tokenizer", code="unsupported", field="models", value=name
            )
    return found


def fitting(config: ModelConfig, ctx: int | None, slots: int, free: int | None) -> str | None:
    """Returns the most exact quantisation whose weights and decode states take at most `SHARE` of `free` bytes: None
    for fp32, bf16, int8, or int4 if no other fits."""
    context = ctx or min(config.context, LARGEST_CONTEXT)
    for kind, size_of_weight in BYTES.items():
        state = slots * config.state_bytes(context, torch.float32 if kind is None else torch.bfloat16)
        if free is None or config.num_params() * size_of_weight + state <= SHARE * free:
            return kind
    return "int4"


def offer(host: str, port: int, served: Sequence[Served], access: Access) -> Serving:
    """Returns the address and models of a server, with an example of a request to the first model."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    base = f"http://{shown}:{port}/v1"
    models = tuple(
        ServedModel(
            one.name, one.loaded.config.num_params(), one.precision, one.choice, held_bytes(one.loaded.model),
            one.context or 0, one.slots if one.session else 0, one.state_bytes,
        )
        for one in served
    )  # fmt: skip
    first = served[0]
    body: dict[str, Any] = {"model": first.name}
    if first.session is None:
        route, body = "embeddings", body | {"input": "A text"}
    elif chats(first):
        route, body = "chat/completions", body | {"messages": [{"role": "user", "content": "Hello"}]}
    else:
        route, body = "completions", body | {"prompt": "Once upon a time", "max_tokens": 32}
    secret = f" -H 'Authorization: Bearer {access.token}'" if access.token else ""
    example = f"curl {base}/{route}{secret} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    return Serving(base, models, example)


def chats(served: Served) -> bool:
    """Returns True for a model with a chat template."""
    try:
        return served.session is not None and bool(served.session.template)
    except RequestError:
        return False


async def run(
    served: Sequence[Served], access: Access, sock: socket.socket, grace: float, on_start: Callable[[], object]
) -> None:
    """Serves models until SIGINT or SIGTERM; running answers then have `grace` seconds. Raises WorkError."""
    from glassformer.serving.app import make_app

    await run_app(make_app(Computer(served), access), access.requests, sock, grace, on_start)
