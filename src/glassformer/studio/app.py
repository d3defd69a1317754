"""Routes of the studio: files of the page, answers to its questions, and the API of `glassformer serve`."""

from __future__ import annotations

import hmac
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from glassformer.errors import RequestError, WorkError
from glassformer.serving.body import body_of
from glassformer.serving.guard import HEALTH, Access, Guard, Receive, Refused, Scope, Send
from glassformer.serving.streams import Gone, Json, unless_gone
from glassformer.serving.wire import error_body, refusal
from glassformer.studio.bodies import (
    ChangeRequest,
    ChoicesRequest,
    ComposeRequest,
    CostRequest,
    DifferenceRequest,
    ExpressionRequest,
    LearnRequest,
    LoginRequest,
    LookRequest,
    ModelRequest,
    NextRequest,
    PatchRequest,
    StatesRequest,
)
from glassformer.studio.desk import Desk
from glassformer.studio.files import INDEX, LANGUAGES, POLICY, media_type, page_files
from glassformer.studio.frames import framed
from glassformer.studio.kept import PageShelf
from glassformer.studio.known import LONGEST, check_name, name_of
from glassformer.studio.run_routes import RunRoutes
from glassformer.version import __version__

LOGIN = "/api/login"
MOST_ALSO = 2
"""Largest number of models of a link that are listed with the others."""


def open_routes() -> frozenset[tuple[str, str]]:
    """Returns (method, path) of the routes that need no token: files of the page, which hold no user data, and
    login."""
    paths = ["/", HEALTH, *(f"/page/{name}" for name in page_files())]
    return frozenset({(method, path) for method in ("GET", "HEAD") for path in paths} | {("POST", LOGIN)})


class Pages:
    """Handlers of the studio's routes, with the models, comparisons and pages that they answer from."""

    def __init__(self, access: Access, expression: str | None = None, folder: Path = Path("comparisons")) -> None:
        self.access, self.expression, self.folder = access, expression, folder
        self._runs: Any = None
        self.own = () if expression is None else (name_of(expression),)
        self.desk, self.shelf = Desk(), Desk()
        """Thread that answers questions about configs, and thread that loads models."""
        self._models: Any = None
        self.kept = PageShelf()
        self._making = threading.Lock()

    def models(self) -> Any:
        """Returns the models with weights (`studio.models.Models`); the first call imports torch and makes them."""
        with self._making:
            if self._models is None:
                from glassformer.studio.models import Models

                self._models = Models(
                    self.expression, lambda: self.runs().weights(), lambda path: self.runs().weights_of(path)
                )
            return self._models

    def runs(self) -> Any:
        """Returns the comparisons of the folder (`studio.runs.Runs`); the first call imports and makes them."""
        with self._making:
            if self._runs is None:
                from glassformer.studio.runs import Runs

                self._runs = Runs(self.folder)
            return self._runs

    def close(self) -> None:
        """Ends the threads; comparisons continue in their processes."""
        self.desk.close()
        self.shelf.close()
        if self._models is not None:
            self._models.close()

    async def others(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request for a route of `glassformer serve` to its application."""
        await (await run_in_threadpool(self.models)).app(scope, receive, send)

    def routes(self) -> list[Route]:
        """Returns a Starlette route for each path of the studio, those of `RunRoutes` included."""
        return [
            Route("/", self.index),
            Route("/page/{name}", self.file),
            Route(HEALTH, self.health),
            Route(LOGIN, self.login, methods=["POST"]),
            Route("/api/start", self.start),
            Route("/api/difference", self.difference, methods=["POST"]),
            Route("/api/compose", self.compose, methods=["POST"]),
            Route("/api/exports", self.exports, methods=["POST"]),
            Route("/api/choices", self.choices, methods=["POST"]),
            Route("/api/change", self.change, methods=["POST"]),
            Route("/api/cost", self.cost, methods=["POST"]),
            Route("/api/models", self.list_models),
            Route("/api/model", self.model, methods=["POST"]),
            Route("/api/next", self.next, methods=["POST"]),
            Route("/api/look", self.look, methods=["POST"]),
            Route("/api/states", self.states, methods=["POST"]),
            Route("/api/patch", self.patch, methods=["POST"]),
            Route("/api/learn", self.learn, methods=["POST"]),
            Route("/api/pages/{name}", self.kept_page),
            *RunRoutes(self.runs, self.desk).routes(),
        ]

    # Files and the start

    async def index(self, request: Request) -> Response:
        """Answers GET / with the page."""
        return self._file(INDEX)

    async def file(self, request: Request) -> Response:
        """Answers GET /page/NAME with a file of the page; status 404 for another name."""
        return self._file(request.path_params["name"])

    def _file(self, name: str) -> Response:
        if name not in page_files():
            raise HTTPException(404)
        headers = {"content-security-policy": POLICY, "referrer-policy": "no-referrer"}
        return Response(page_files()[name], media_type=media_type(name), headers=headers)

    async def health(self, request: Request) -> Response:
        """Answers GET on the health route with the status "ok" while the studio runs."""
        return Json({"status": "ok"})

    async def login(self, request: Request) -> Response:
        """Answers POST /api/login: exchanges the token of the address for a cookie that scripts cannot read."""
        given = await body_of(request, LoginRequest)
        token = self.access.token or ""
        if not hmac.compare_digest(given.token.encode(), token.encode()):
            raise Refused(401, "this is not the token that the command line printed", "authentication_error")
        cookie = f"{self.access.cookie}={token}; Path=/; HttpOnly; SameSite=Strict"
        return Json({"status": "ok"}, headers={"set-cookie": cookie})

    async def start(self, request: Request) -> Response:
        """Answers GET /api/start with the version, the model shown at first, and the languages of the page."""
        return Json({"version": __version__, "expression": self.expression, "languages": LANGUAGES})

    # Questions about configs

    def _named(self, expression: str) -> str:
        return check_name(expression, self.own)

    async def _answer(self, request: Request, question: Callable[[], Any]) -> Response:
        return Json(await self.desk.answer(question, request.receive))

    async def difference(self, request: Request) -> Response:
        """Answers POST /api/difference with drawings, differing parts and costs of two models."""
        given = await body_of(request, DifferenceRequest)
        first, second = self._named(given.first), self._named(given.second)

        def question() -> Any:
            from glassformer.studio.gallery import difference

            return difference(first, second)

        return await self._answer(request, question)

    async def compose(self, request: Request) -> Response:
        """Answers POST /api/compose with a model's drawing, counts and notes."""
        given = await body_of(request, ComposeRequest)
        expression, base = self._named(given.expression), given.base and self._named(given.base)

        def question() -> Any:
            from glassformer.studio.compose import compose

            return compose(expression, base)

        return await self._answer(request, question)

    async def exports(self, request: Request) -> Response:
        """Answers POST /api/exports with the tools that can load a model."""
        expression = self._named((await body_of(request, ExpressionRequest)).expression)

        def question() -> Any:
            from glassformer.studio.compose import exports

            return exports(expression)

        return await self._answer(request, question)

    async def choices(self, request: Request) -> Response:
        """Answers POST /api/choices with the choices of an axis, each tried on a model."""
        given = await body_of(request, ChoicesRequest)
        expression = self._named(given.expression)

        def question() -> Any:
            from glassformer.studio.compose import choices

            return choices(expression, given.axis)

        return await self._answer(request, question)

    async def change(self, request: Request) -> Response:
        """Answers POST /api/change with the expression of a model after a change."""
        given = await body_of(request, ChangeRequest)
        expression = self._named(given.expression)
        self._named(f"{expression}+{given.change}")

        def question() -> Any:
            from glassformer.studio.compose import with_change

            return {"expression": with_change(expression, given.change)}

        return await self._answer(request, question)

    async def cost(self, request: Request) -> Response:
        """Answers POST /api/cost with the plan of a model: parameters, memory and time."""
        given = await body_of(request, CostRequest)
        expression = self._named(given.expression)

        def question() -> Any:
            from glassformer.studio.compose import cost

            return cost(expression, **given.options())

        return await self._answer(request, question)

    # Models with weights

    async def list_models(self, request: Request) -> Response:
        """Answers GET /api/models with the models that can be loaded, and the names of those that are loaded."""

        also = [name for name in request.query_params.getlist("also")[:MOST_ALSO] if len(name) <= LONGEST]

        def question() -> Any:
            models = self.models()
            listed = models.listed(also)
            names = [one["name"] for one in listed]
            return {"models": names, "listed": listed, "loaded": list(models.api.models)}

        return Json(await self.shelf.answer(question, request.receive))

    async def model(self, request: Request) -> Response:
        """Answers POST /api/model: loads a model and returns its facts."""
        given = await body_of(request, ModelRequest)
        return Json(await self.shelf.answer(lambda: self.models().about(given.model), request.receive))

    async def _served(self, request: Request, name: str) -> Any:
        return await self.shelf.answer(lambda: self.models().served(name), request.receive)

    async def next(self, request: Request) -> Response:
        """Answers POST /api/next with the distribution of the next token, before and after the sampling settings."""
        given = await body_of(request, NextRequest)
        served = await self._served(request, given.model)
        models = self.models()

        def question() -> Any:
            from glassformer.studio.models import distribution

            return distribution(models.api, served, given.text, given.settings())

        return Json(await unless_gone(models.api.computer.call(question), request.receive))

    async def look(self, request: Request) -> Response:
        """Answers POST /api/look with the inspection of a model that reads a text, without some of its components."""
        given = await body_of(request, LookRequest)
        served = await self._served(request, given.model)

        def question() -> Any:
            from glassformer.studio.look import look

            return look(served, self.models().label(given.model), given.text, tuple(given.ablate), self.kept)

        return Json(await self.shelf.answer(question, request.receive))

    async def states(self, request: Request) -> Response:
        """Answers POST /api/states with the decode state that a model keeps of a text, and the experts of its
        tokens."""
        given = await body_of(request, StatesRequest)
        served = await self._served(request, given.model)

        def question() -> Any:
            from glassformer.studio.inside import kept

            return kept(served, given.text, given.layer)

        return Json(await self.shelf.answer(question, request.receive))

    async def patch(self, request: Request) -> Response:
        """Answers POST /api/patch with the predictions after a text, with activations of another text put in."""
        given = await body_of(request, PatchRequest)
        served = await self._served(request, given.model)

        def question() -> Any:
            from glassformer.studio.patching import patched

            return patched(served, given.text, given.other, given.site, given.places, given.every)

        return Json(await self.shelf.answer(question, request.receive))

    async def learn(self, request: Request) -> Response:
        """Answers POST /api/learn with the steps of a forward pass and their numbers; builds a model without
        weights."""
        given = await body_of(request, LearnRequest)
        name = None if given.model is None else given.model.strip()

        def question() -> Any:
            from glassformer.studio import learn

            if given.chapter != "model":
                return learn.three() if given.chapter == "three" else learn.toy(given.text)
            if name is None:
                raise RequestError("the chapter of a model needs one", code="missing", field="model")
            models = self.models()
            trained = models.trained_here(name)
            loaded = models.served(name).loaded if trained else learn.untrained(self._named(name))
            return learn.chosen(loaded, name, given.text, given.layer, given.head, trained)

        return Json(await self.shelf.answer(question, request.receive))

    async def kept_page(self, request: Request) -> Response:
        """Answers GET /api/pages/NAME with a page of the library, for a frame that may run only its own script."""
        page = self.kept.get(request.path_params["name"])
        if page is None:
            raise HTTPException(404)
        return framed(page)


def make_studio(pages: Pages, log: Callable[[str], None] | None = None) -> Guard:
    """Returns the application for an ASGI server: the routes behind the guard."""

    async def refused(request: Request, problem: Exception) -> Response:
        if isinstance(problem, RequestError | WorkError):
            status, body = refusal(problem)
            return Json(body, status)
        if isinstance(problem, Refused):
            return Json(error_body(str(problem), problem.kind), problem.status, headers=problem.headers)
        assert isinstance(problem, HTTPException)
        words = {404: "this route is unknown", 405: "this route takes another method"}
        body = error_body(words.get(problem.status_code, problem.detail))
        return Json(body, problem.status_code, headers=dict(problem.headers or {}))

    async def gone(request: Request, problem: Exception) -> Response:
        return Response(status_code=499)  # no client reads it

    async def failed(request: Request, problem: Exception) -> Response:
        return Json(error_body("the server failed on this request", "server_error"), 500)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        pages.desk.prepare(_import)
        try:
            yield
        finally:
            await run_in_threadpool(pages.close)

    handlers: Any = dict.fromkeys([RequestError, WorkError, Refused, HTTPException], refused)
    handlers |= {Gone: gone, Exception: failed}
    app = Starlette(routes=pages.routes(), exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.router.default = pages.others
    return Guard(app, pages.access, log)


def _import() -> None:
    """Imports torch and the rooms that answer, while the page is drawn."""
    import glassformer.studio.compose
    import glassformer.studio.gallery

    assert glassformer.studio.compose and glassformer.studio.gallery
