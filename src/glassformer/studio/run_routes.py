"""Routes of trainings and of the texts that they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from glassformer.serving.body import body_of
from glassformer.serving.streams import EventStream, Json
from glassformer.studio.bodies import (
    DynamicsRequest,
    RunRequestBody,
    RunsRequest,
    TextPieceRequest,
    TrainRequest,
    WhyRequest,
)
from glassformer.studio.desk import Desk
from glassformer.studio.frames import framed

if TYPE_CHECKING:
    from glassformer.studio.runs import Runs


class RunRoutes:
    """Handlers of the routes about trainings in a folder; `runs()` returns them, and is slow at its first call."""

    def __init__(self, runs: Callable[[], Runs], desk: Desk) -> None:
        self.runs, self.desk = runs, desk

    def routes(self) -> list[Route]:
        """Returns a Starlette route for each path about trainings and texts."""
        return [
            Route("/api/runs", self.listed),
            Route("/api/runs/plan", self.plan, methods=["POST"]),
            Route("/api/runs/start", self.start, methods=["POST"]),
            Route("/api/runs/stop", self.stop, methods=["POST"]),
            Route("/api/runs/resume", self.resume, methods=["POST"]),
            Route("/api/runs/over", self.over, methods=["POST"]),
            Route("/api/runs/why", self.why, methods=["POST"]),
            Route("/api/runs/dynamics", self.dynamics, methods=["POST"]),
            Route("/api/runs/{name}/events", self.events),
            Route("/api/runs/{name}/report", self.report),
            Route("/api/texts", self.text, methods=["POST"]),
        ]

    async def _answer(self, request: Request, question: Callable[[Runs], Any]) -> Response:
        return Json(await self.desk.answer(lambda: question(self.runs()), request.receive))

    async def listed(self, request: Request) -> Response:
        """Answers GET /api/runs with the trainings and the texts to train on."""
        return await self._answer(request, lambda runs: runs.listed())

    async def plan(self, request: Request) -> Response:
        """Answers POST /api/runs/plan: checks a training, and returns its runs, time and notes."""
        given = await body_of(request, TrainRequest)
        return await self._answer(request, lambda runs: runs.plan(given))

    async def start(self, request: Request) -> Response:
        """Answers POST /api/runs/start: starts a training in a separate process."""
        given = await body_of(request, TrainRequest)
        return await self._answer(request, lambda runs: runs.start(given))

    async def stop(self, request: Request) -> Response:
        """Answers POST /api/runs/stop: asks a training to save its run and end."""
        name = (await body_of(request, RunRequestBody)).name

        def question(runs: Runs) -> Any:
            runs.comparisons.stop_named(runs.known(name))
            return {"name": name}

        return await self._answer(request, question)

    async def resume(self, request: Request) -> Response:
        """Answers POST /api/runs/resume: continues a training in a separate process."""
        name = (await body_of(request, RunRequestBody)).name

        def question(runs: Runs) -> Any:
            runs.comparisons.resume(runs.known(name))
            return {"name": name}

        return await self._answer(request, question)

    async def over(self, request: Request) -> Response:
        """Answers POST /api/runs/over with the curves of several trainings in one figure."""
        given = await body_of(request, RunsRequest)
        return await self._answer(request, lambda runs: runs.over(given.names))

    async def why(self, request: Request) -> Response:
        """Answers POST /api/runs/why with the diagnosis of a run."""
        given = await body_of(request, WhyRequest)
        return await self._answer(request, lambda runs: runs.why(given.name, given.run))

    async def dynamics(self, request: Request) -> Response:
        """Answers POST /api/runs/dynamics with curves and maps of the statistics that a training has recorded so
        far."""
        given = await body_of(request, DynamicsRequest)
        return await self._answer(request, lambda runs: runs.dynamics(given.name, given.statistic))

    async def events(self, request: Request) -> Response:
        """Answers GET /api/runs/NAME/events with a stream of the views of a training."""
        name = request.path_params["name"]
        runs = await run_in_threadpool(self.runs)
        await run_in_threadpool(runs.known, name)
        return EventStream(runs.events(name, request.headers.get("last-event-id")), {})

    async def report(self, request: Request) -> Response:
        """Answers GET /api/runs/NAME/report with the report of a training, for a frame; status 404 before it is
        written."""
        runs = await run_in_threadpool(self.runs)
        page = await run_in_threadpool(runs.page, request.path_params["name"])
        if page is None:
            raise HTTPException(404)
        return framed(page)

    async def text(self, request: Request) -> Response:
        """Answers POST /api/texts: writes a piece of a text that was dropped onto the page."""
        given = await body_of(request, TextPieceRequest)
        return await self._answer(request, lambda runs: runs.texts.take(given))
