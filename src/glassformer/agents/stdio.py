"""Server of tools on standard input and output, by the `mcp` package."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from glassformer.agents.comparisons import Comparisons
from glassformer.agents.tools import Toolbox, ToolList
from glassformer.errors import RequestError
from glassformer.version import __version__

INSTRUCTIONS = (
    "Glassformer composes transformers from parts. A model is an expression NAME[@SIZE][+CHANGE...]; presets lists the "
    "words. plan and diff build no model. compare trains on seeds that the server draws; report its verdicts with "
    "their intervals, and every comparison under similar. A refusal has code, field and message."
)
"""Text that an agent gets when it connects."""


def check_library() -> None:
    """Raises RequestError if the `mcp` package is missing or older than version 2."""
    if find_spec("mcp") is None or find_spec("mcp_types") is None:
        raise RequestError(
            "tools for agents need the mcp package, version 2.3 or later; pip install 'glassformer[mcp]'",
            code="missing", field="mcp",
        )  # fmt: skip


def serve_tools(
    folder: str | Path = "comparisons", *, allow_runs: bool = False, most_minutes: float = 60.0, dry: bool = False
) -> ToolList:
    """Serves tools to an agent on standard input and output until it closes them; returns the list of tools.

    Parameters
    ----------
    folder
        Folder of the comparisons that tools list, report and, with `allow_runs`, add to.
    allow_runs
        Offer `compare`, which starts training and writes into `folder`.
    most_minutes
        Longest time of one comparison, which is then stopped and saved.
    dry
        Return the tools, but answer no agent.

    Raises
    ------
    RequestError
        If the `mcp` package is missing, or `most_minutes` is not a positive number.
    """
    if not 0 < most_minutes <= 1e6:
        raise RequestError(
            code="range", field="most_minutes", value=most_minutes, expected="a number of minutes above 0"
        )
    comparisons = Comparisons(Path(folder), most_minutes)
    toolbox = Toolbox(comparisons, allow_runs)
    tools = ToolList(toolbox.described())
    if dry:
        return tools
    check_library()
    import anyio
    import mcp_types as types  # type: ignore[import-not-found]
    from mcp.server import Server  # type: ignore[import-not-found]
    from mcp.server.stdio import stdio_server  # type: ignore[import-not-found]

    turn = anyio.Lock()  # calls that compute are answered one after the other

    async def list_tools(_: Any, __: Any) -> types.ListToolsResult:
        tools = [
            types.Tool(
                name=one["name"], description=one["description"], input_schema=one["schema"],
                annotations=types.ToolAnnotations(
                    read_only_hint=not one["writes"], destructive_hint=False, open_world_hint=False
                ),
            )
            for one in toolbox.described()
        ]  # fmt: skip
        return types.ListToolsResult(tools=tools)

    async def call_tool(_: Any, asked: types.CallToolRequestParams) -> types.CallToolResult:
        if asked.name == "results":  # which may wait, and computes nothing
            found = await anyio.to_thread.run_sync(toolbox.call, asked.name, asked.arguments)
        else:
            async with turn:
                found = await anyio.to_thread.run_sync(toolbox.call, asked.name, asked.arguments)
        text = types.TextContent(text=json.dumps(found.fields, allow_nan=False))
        return types.CallToolResult(content=[text], structured_content=found.fields, is_error=found.refused)

    async def answer() -> None:
        server = Server(
            "glassformer", version=__version__, instructions=INSTRUCTIONS, on_list_tools=list_tools,
            on_call_tool=call_tool,
        )  # fmt: skip
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())

    try:
        anyio.run(answer)
    finally:
        comparisons.stop()
    return tools
