"""Verbs that serve other programs and browsers: serve, mcp, studio.

A verb imports what computes inside its function, so that its help imports no torch.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Literal

from cyclopts import Parameter

from glassformer.cli.options import Count, Flag, Json, ModelName, Named
from glassformer.errors import RequestError


def serve(
    models: Annotated[
        list[str],
        ModelName(weights=True),
        Parameter(
            negative="",
            help="Models with weights: a run folder, a Hugging Face folder, a .gguf file, hf:owner/name, smollm2, "
            "minilm. Requests name them as they are written here.",
        ),
    ],
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    quantize: Literal["auto", "bf16", "int8", "int4", "keep"] | None = "auto",
    dtype: Literal["float32", "bfloat16"] | None = None,
    state_dtype: Literal["float32", "bfloat16", "int8"] | None = None,
    ctx: Count | None = None,
    slots: int = 8,
    threads: int | None = None,
    token: Annotated[str | None, Parameter(env_var="GLASSFORMER_TOKEN", show_env_var=True)] = None,
    allow_origin: Annotated[list[str] | None, Parameter(negative="")] = None,
    grace: float = 10.0,
    dry: Flag = False,
    json: Json = False,
) -> None:
    """Serve models over HTTP to programs that speak OpenAI's API.

    It runs until Ctrl-C or SIGTERM.

    Parameters
    ----------
    host
        Address to listen on. An address that other machines reach needs --token.
    port
        Port; 0 takes a free one.
    quantize
        Quantisation of the weights: int8 or int4; keep uses those of a .gguf file; bf16 prepacks bfloat16 weights;
        none takes them as they are stored; auto takes the fastest on this machine, as generate does, that fits into
        80 % of the free memory.
    dtype
        Dtype of weights and decode state; by default the checkpoint's, or bfloat16 with --quantize.
    state_dtype
        Dtype of the decode state only; int8 keeps a scale for each vector.
    ctx
        Tokens of a prompt and its answer together; by default the model's context, at most 4096.
    slots
        Texts of each model that are computed at once; more wait.
    threads
        CPU threads; by default one per core.
    token
        Secret of at least 16 characters that each request must carry as Authorization: Bearer TOKEN.
    allow_origin
        Origin of web pages that may send requests (CORS), such as http://localhost:3000; repeatable.
    grace
        Seconds that running answers have to end after SIGTERM.
    dry
        Load the models, check memory, print what would be served, and stop.
    """
    _need_libraries()
    from glassformer.cli import waiting
    from glassformer.cli.show import print_result
    from glassformer.serving.server import Serving
    from glassformer.serving.server import serve as serve_models

    def show(found: Serving) -> None:
        waiting.end()
        print_result(found, json)

    found = serve_models(
        models, host=host, port=port, quantize=quantize, dtype=dtype, state_dtype=state_dtype, ctx=ctx, slots=slots,
        threads=threads, token=token, allow_origin=allow_origin or (), grace=grace, dry=dry, on_start=show,
    )  # fmt: skip
    if dry:
        show(found)


def mcp(
    *,
    folder: str = "comparisons",
    allow_runs: Flag = False,
    most_minutes: float = 60.0,
    dry: Flag = False,
    json: Json = False,
) -> None:
    """Offer verbs as tools to an agent over standard input and output (Model Context Protocol).

    The tools are plan, presets, diff, results, runs, and with --allow-runs compare. The agent's program starts this
    command and ends it.

    Parameters
    ----------
    folder
        Folder of comparisons that results and runs read, and compare writes to.
    allow_runs
        Offer compare, which trains models on this machine; without it all tools only read.
    most_minutes
        Longest time of one comparison, which is then stopped and saved.
    dry
        Print the tools, and stop.
    """
    from glassformer.agents.stdio import serve_tools
    from glassformer.cli import waiting
    from glassformer.cli.show import show

    waiting.end()
    found = serve_tools(folder, allow_runs=allow_runs, most_minutes=most_minutes, dry=dry)
    if dry:
        show(found, json)


def studio(
    expression: Named | None = None,
    /,
    *,
    port: int = 8600,
    folder: str = "comparisons",
    no_open: Flag = False,
    grace: float = 2.0,
    dry: Flag = False,
    json: Json = False,
) -> None:
    """Open the pages in a browser: compose a model and see its costs, train and compare, write, look inside.

    They are served on this machine until Ctrl-C or SIGTERM, and load nothing from the network. The address holds a
    token that the browser exchanges for a cookie; without it, every request is refused.

    Parameters
    ----------
    expression
        Model shown at first. Files are opened only if they are named here.
    port
        Port of 127.0.0.1; 0 takes a free one.
    folder
        Folder of the comparisons that pages start and show.
    no_open
        Print the address, but do not open the browser.
    grace
        Seconds that running answers have to end after SIGTERM.
    dry
        Check the model, print the address without a token, and stop.
    """
    _need_libraries()
    from glassformer.cli import waiting
    from glassformer.cli.show import print_result
    from glassformer.studio.server import Studio, start

    def show(found: Studio) -> None:
        waiting.end()
        print_result(found, json)

    found = start(expression, port=port, folder=folder, no_open=no_open, grace=grace, dry=dry, on_start=show)
    if dry:
        show(found)


def _need_libraries() -> None:
    """Raises RequestError unless the libraries of the server are installed."""
    for library in ("starlette", "uvicorn"):
        if find_spec(library) is None:
            message = f"serving needs {library}; pip install 'glassformer[serve]'"
            raise RequestError(message, code="missing", field=library)
