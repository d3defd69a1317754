"""Handlers of the server's routes. Every answer is JSON, server-sent events, or text for Prometheus."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from glassformer.errors import RequestError, WorkError, shown
from glassformer.generation.grammar import Grammar, Grammars
from glassformer.generation.prompt_scores import PromptScores
from glassformer.generation.session import Session
from glassformer.generation.vectors import Embedder, tokenized
from glassformer.introspection import in_vocabulary, sites
from glassformer.serving.answering import Completing, ignored_header
from glassformer.serving.answers import ChatFormat, CompletionFormat
from glassformer.serving.body import body_of
from glassformer.serving.computing import Busy, Computer, Served, ServedTask
from glassformer.serving.guard import Access, Guard, Refused
from glassformer.serving.inside import Insight
from glassformer.serving.messages import CountRequest, MessageAnswering, MessagesRequest, anthropic_error
from glassformer.serving.metrics import TYPE
from glassformer.serving.operations import OPERATIONS, document
from glassformer.serving.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TemplateRequest,
    TextRequest,
    TokenizeRequest,
)
from glassformer.serving.responses import ResponseAnswering, ResponsesRequest
from glassformer.serving.streams import Gone, Json, unless_gone
from glassformer.serving.tools import described, shows_tools
from glassformer.serving.wire import error_body, refusal
from glassformer.text.messages import chat_prompt
from glassformer.text.spelling import Spelling
from glassformer.version import __version__


class Api:
    """Handlers of all routes, for the models of one computer."""

    def __init__(self, computer: Computer) -> None:
        self.computer = computer
        computer.metrics.routes = frozenset(one.path for one in OPERATIONS)
        self.spellings = dict[str, Spelling]()
        self.grammars = dict[str, Grammars]()
        self.fingerprints = dict[str, str]()
        for served in self.models.values():
            self._prepare(served)

    @property
    def models(self) -> dict[str, Served]:
        """Name -> served model."""
        return self.computer.models

    def add(self, served: Served) -> None:
        """Adds a model; it replaces a model of the same name."""
        self._prepare(served)
        self.computer.add(served)

    def _prepare(self, served: Served) -> None:
        name, loaded = served.name, served.loaded
        self.fingerprints[name] = fingerprint(served)
        if loaded.tokenizer is not None:
            spelling = Spelling(loaded.tokenizer)
            self.spellings[name] = spelling
            self.grammars[name] = Grammars(spelling, loaded.model.vocab_size, loaded.model.ends)

    def routes(self) -> list[Route]:
        """Returns a Starlette route for each operation."""
        return [
            Route(one.path.replace("{name}", "{name:path}"), getattr(self, one.handler), methods=[one.method])
            for one in OPERATIONS
        ]

    # State of the server

    async def health(self, request: Request) -> Response:
        """Returns the status "ok" while the server runs."""
        return Json({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Answers GET /metrics with counts for Prometheus."""
        computer = self.computer
        lines = computer.metrics.lines(computer.texts().items(), computer.calls)
        return Response("\n".join(lines) + "\n", media_type=TYPE)

    async def openapi(self, request: Request) -> Response:
        """Answers GET /openapi.json with the OpenAPI document."""
        return Json(document())

    async def list_models(self, request: Request) -> Response:
        """Answers GET /v1/models with the list of models."""
        return Json({"object": "list", "data": [self._about(one) for one in self.models.values()]})

    async def one_model(self, request: Request) -> Response:
        """Answers GET /v1/models/NAME with the properties of a model."""
        return Json(self._about(self._served(request.path_params["name"])))

    def _about(self, served: Served) -> dict[str, Any]:
        return {
            "id": served.name, "object": "model", "created": served.created, "owned_by": "glassformer",
            "context": served.context, "parameters": served.loaded.config.num_params(),
            "generates": served.session is not None, "embeds": served.embedder is not None,
            "sites": list(sites(served.loaded.model)),
        }  # fmt: skip

    def _served(self, name: str) -> Served:
        if name not in self.models:
            raise NoModel(f"the model {shown(name)!r} is unknown; this server has {', '.join(self.models)}")
        return self.models[name]

    def _writing(self, name: str) -> Served:
        served = self._served(name)
        if served.session is None or name not in self.spellings:
            raise RequestError(f"{name} generates no text", code="unsupported", field="model", value=name)
        return served

    # Text

    async def chat(self, request: Request) -> Response:
        """Answers POST /v1/chat/completions."""
        given = await body_of(request, ChatRequest)
        served = self._writing(given.model)
        insight = await self._insight(served, given)
        task, ids = await self._start_chat(served, given, insight)
        form = ChatFormat(
            served.name, self.fingerprints[served.name], self.spellings[served.name], bool(given.logprobs)
        )
        found = Completing(task, form, given, [ids], bool(given.functions()))
        found.insight = insight
        return await found.response(request)

    async def message(self, request: Request) -> Response:
        """Answers POST /v1/messages, in Anthropic's format."""
        given = (await body_of(request, MessagesRequest)).chat()
        served = self._writing(given.model)
        task, ids = await self._start_chat(served, given)
        calls = bool(given.functions())
        found = MessageAnswering(task, served.name, self.spellings[served.name], given, ids, calls)
        return await found.response(request)

    async def count_tokens(self, request: Request) -> Response:
        """Answers POST /v1/messages/count_tokens with the number of tokens of a prompt."""
        given = (await body_of(request, CountRequest)).chat()
        session = self._writing(given.model).session
        assert session is not None
        _, ids = await run_in_threadpool(prompt_of, session, given)
        return Json({"input_tokens": len(ids)})

    async def respond(self, request: Request) -> Response:
        """Answers POST /v1/responses, OpenAI's newer format."""
        asked = await body_of(request, ResponsesRequest)
        given = asked.chat()
        served = self._writing(given.model)
        task, ids = await self._start_chat(served, given)
        assert served.session is not None
        options = served.session.options(**given.options())
        found = ResponseAnswering(
            task, asked, self.spellings[served.name], given, ids, bool(given.functions()), options
        )
        return await found.response(request)

    async def apply_template(self, request: Request) -> Response:
        """Answers POST /apply-template with the prompt that the template makes of a chat."""
        given = (await body_of(request, TemplateRequest)).chat()
        session = self._writing(given.model).session
        assert session is not None
        text, ids = await run_in_threadpool(prompt_of, session, given)
        return Json({"prompt": text, "count": len(ids)})

    async def _insight(self, served: Served, given: TextRequest) -> Insight | None:
        """Returns the observer for a request's field `glass`, checked by another thread; None without the field."""
        if given.glass is None:
            return None
        loaded, spelling = served.loaded, self.spellings[served.name]
        return await run_in_threadpool(Insight, given.glass, loaded.model, loaded.config, spelling)

    async def _start_chat(
        self, served: Served, given: ChatRequest, insight: Insight | None = None
    ) -> tuple[ServedTask, list[int]]:
        """Starts the answer to a chat. Returns its task and the ids of the prompt."""
        options = given.options()
        self.computer.check_room(served, given.n or 1)
        session = served.session
        assert session is not None
        grammar = await self._grammar(served, given)
        ids = await run_in_threadpool(lambda: prompt_of(session, given)[1])
        return self.computer.start(served, [ids], session.options(**options), (), grammar, insight), ids

    async def _grammar(self, served: Served, given: TextRequest) -> Grammar | None:
        """Returns the grammar that an answer must match, compiled within bounds by another thread; None without one."""
        if (found := given.description()) is None:
            return None
        return await run_in_threadpool(self.grammars[served.name].compile, *found)

    async def complete(self, request: Request) -> Response:
        """Answers POST /v1/completions with continuations of the prompts."""
        given = await body_of(request, CompletionRequest)
        served = self._writing(given.model)
        options, prompts = given.options(), given.prompts()
        self.computer.check_room(served, len(prompts) * (given.n or 1))
        session = served.session
        assert session is not None
        grammar = await self._grammar(served, given)
        read = await run_in_threadpool(lambda: [session.read(prompt)[0] for prompt in prompts])
        scores = []
        if given.echo and given.logprobs is not None:
            scores = [PromptScores(given.logprobs, only=given.max_tokens == 0) for _ in read]
        form = CompletionFormat(
            served.name, self.fingerprints[served.name], self.spellings[served.name], given.logprobs is not None
        )
        if given.max_tokens == 0 and not scores:
            found = Completing(None, form, given, read)
            await run_in_threadpool(found.echo)
        else:
            insight = await self._insight(served, given)
            task = self.computer.start(served, read, session.options(**options), scores, grammar, insight)
            found = Completing(task, form, given, read)
            found.insight = insight
            found.scores = scores
            if given.echo:
                await run_in_threadpool(found.echo)
        return await found.response(request)

    # Vectors and tokens

    async def embed(self, request: Request) -> Response:
        """Answers POST /v1/embeddings with a vector for each text."""
        given = await body_of(request, EmbeddingRequest)
        served = self._served(given.model)
        embedder = served.embedder
        if embedder is None:
            raise RequestError(f"{served.name} has no tokenizer", code="unsupported", field="model", value=served.name)
        inputs = given.inputs()
        rows = await run_in_threadpool(lambda: [embedded_ids(embedder, one) for one in inputs])

        async def vectors() -> list[torch.Tensor]:
            return [await self.computer.call(partial(vector_of, embedder, row)) for row in rows]

        found = await unless_gone(vectors(), request.receive)
        if given.dimensions not in (None, len(found[0])):
            raise RequestError(
                f"the vectors of {served.name} have {len(found[0])} dimensions", code="unsupported", field="dimensions",
                value=given.dimensions,
            )  # fmt: skip
        data = [
            {"object": "embedding", "index": i, "embedding": encoded(vector, given.encoding_format)}
            for i, vector in enumerate(found)
        ]
        count = sum(map(len, rows))
        usage = {"prompt_tokens": count, "total_tokens": count}
        body = {"object": "list", "data": data, "model": served.name, "usage": usage}
        return Json(body, headers=ignored_header(given.ignored()))

    async def tokenize(self, request: Request) -> Response:
        """Answers POST /tokenize with the token ids of a text."""
        given = await body_of(request, TokenizeRequest)
        served = self._served(given.model)
        tokenizer = served.loaded.tokenizer
        if tokenizer is None:
            raise RequestError(f"{served.name} has no tokenizer", code="unsupported", field="model", value=served.name)
        ids = (await run_in_threadpool(tokenizer.encode_prompt, given.prompt)).tolist()
        return Json({"count": len(ids), "max_model_len": served.context, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        """Answers POST /detokenize with the text of token ids."""
        given = await body_of(request, DetokenizeRequest)
        served = self._served(given.model)
        tokenizer = served.loaded.tokenizer
        if tokenizer is None:
            raise RequestError(f"{served.name} has no tokenizer", code="unsupported", field="model", value=served.name)
        return Json({"prompt": await run_in_threadpool(tokenizer.decode, given.tokens)})


def prompt_of(session: Session, given: ChatRequest) -> tuple[str, list[int]]:
    """Returns the text that the model's template makes of a chat, and its token ids. Raises RequestError."""
    template, tokenizer = session.template, session.tokenizer
    assert tokenizer is not None
    messages = [one.plain() for one in given.messages]
    functions = [one.plain() for one in given.functions()]
    if shows_tools(template.source):
        tools = [{"type": "function", "function": one} for one in functions]
        variables = {"tools": tools} if tools else {}
    else:
        messages, variables = described(messages, functions), {}
    return chat_prompt(tokenizer, template, messages, **variables)


class NoModel(Exception):
    """Refusal of a request whose model is not served."""


def embedded_ids(embedder: Embedder, given: str | list[int]) -> Any:
    """Returns the token ids of an input, a text or ids. Raises RequestError if it is too long: no input is cut."""
    if isinstance(given, str):
        row = tokenized(embedder.tokenizer, [f"{embedder.pooling.prompt}{given}"], embedder.limit + 1)[0]
    else:
        row = np.array(given)
        in_vocabulary(int(row.max()), embedder.model.vocab_size, "token", "input")
    if len(row) <= embedder.unpooled:
        raise RequestError("the input is empty; give at least one token", code="missing", field="input")
    if len(row) > embedder.limit:
        raise RequestError(
            f"the input has {len(row):,} tokens, and this model reads {embedder.limit:,}",
            code="range", field="input", value=len(row), expected=f"at most {embedder.limit:,} tokens",
        )  # fmt: skip
    return row


def vector_of(embedder: Embedder, row: Any) -> torch.Tensor:
    """Returns the vector (d,) of a row of ids, computed in a batch of one, so that it does not depend on other rows."""
    return embedder.vectors([row])[0].float().cpu()


def encoded(vector: torch.Tensor, how: str | None) -> list[float] | str:
    """Returns a vector as numbers, or as base64 of little-endian fp32."""
    if not bool(vector.isfinite().all()):
        raise WorkError("the model's vector holds numbers that are not finite", code="diverged")
    values = vector.numpy().astype("<f4")
    return base64.b64encode(values.tobytes()).decode() if how == "base64" else values.tolist()


def fingerprint(served: Served) -> str:
    """Returns a hash of all that a seeded text depends on, except the request: model, precision, versions, threads."""
    facts = (served.name, str(served.loaded.model.dtype), served.precision, served.context, __version__,
             torch.__version__, torch.get_num_threads())  # fmt: skip
    return f"gf_{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"


def make_app(computer: Computer, access: Access, log: Callable[[str], None] | None = None) -> Guard:
    """Returns the application for an ASGI server: the routes behind the guard."""
    return Guard(make_api(Api(computer)), access, log, computer.metrics.count)


def make_api(api: Api) -> Starlette:
    """Returns the application of the routes and of their errors, without the guard."""
    computer = api.computer

    def answer(request: Request, body: dict[str, Any], status: int, headers: Any = None) -> Response:
        if request.url.path.startswith("/v1/messages"):
            body = anthropic_error(status, body)
        return Json(body, status, headers=headers)

    async def refused(request: Request, problem: Exception) -> Response:
        if isinstance(problem, RequestError | WorkError):
            path = request.url.path
            prompt = "input" if path in ("/v1/embeddings", "/v1/responses") else "prompt"
            status, body = refusal(problem, "messages" if "chat" in path or "/messages" in path else prompt)
            return answer(request, body, status)
        if isinstance(problem, NoModel):
            return answer(request, error_body(str(problem), param="model", code="model_not_found"), 404)
        if isinstance(problem, Busy):
            body = error_body(str(problem), "rate_limit_error", code="rate_limit_exceeded")
            return answer(request, body, 429, {"retry-after": str(problem.seconds)})
        if isinstance(problem, Refused):
            return answer(request, error_body(str(problem), problem.kind), problem.status, problem.headers)
        assert isinstance(problem, HTTPException)
        words = {404: "this route is unknown", 405: "this route takes another method"}
        body = error_body(words.get(problem.status_code, problem.detail))
        return answer(request, body, problem.status_code, dict(problem.headers or {}))

    async def gone(request: Request, problem: Exception) -> Response:
        return Response(status_code=499)  # no client reads it

    async def failed(request: Request, problem: Exception) -> Response:
        return answer(request, error_body("the server failed on this request", "server_error"), 500)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await run_in_threadpool(computer.stop)

    handlers: Any = dict.fromkeys([RequestError, WorkError, NoModel, Busy, Refused, HTTPException], refused)
    handlers |= {Gone: gone, Exception: failed}
    app = Starlette(routes=api.routes(), exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    return app
