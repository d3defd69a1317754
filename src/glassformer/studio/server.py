"""`glassformer studio`: opens a port, prints the address with its token, and opens the browser."""

from __future__ import annotations

import asyncio
import sys
import webbrowser
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from glassformer.errors import RequestError, check_whole
from glassformer.figures.terminal import Printed
from glassformer.serving.ports import access_of, listening, need_libraries, run_app
from glassformer.studio.secret import token_of

PORT = 8600


@dataclass(frozen=True)
class Studio(Printed):
    """Address of the studio's pages; `print` shows it.

    Examples
    --------
    >>> gf.studio.start("llama@10m", dry=True).expression
    'llama@10m'
    """

    raw = True
    address: str
    """URL of the pages, with a token after #, which a browser does not send; the page exchanges it for a cookie."""
    expression: str | None
    """Model shown at first; None for none."""

    def lines(self) -> Iterator[str]:
        """Yields the address.

        Yields
        ------
        str
            The address.

        Examples
        --------
        >>> next(gf.studio.start(dry=True).lines())
        'http://127.0.0.1:8600/'
        """
        yield self.address

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values.

        Returns
        -------
        dict
            Keys address and expression.

        Examples
        --------
        >>> sorted(gf.studio.start(dry=True).to_dict())
        ['address', 'expression']
        """
        return asdict(self)


def start(
    expression: str | None = None,
    *,
    port: int = PORT,
    folder: str | Path = "comparisons",
    no_open: bool = False,
    dry: bool = False,
    grace: float = 2.0,
    on_start: Callable[[Studio], object] | None = None,
) -> Studio:
    """Serves the pages on this machine until Ctrl-C or SIGTERM.

    Parameters
    ----------
    expression : str, optional
        Model shown at first. Files are opened only if they are named here.
    port : int
        Port of 127.0.0.1; 0 takes a free one.
    folder : str or Path
        Folder of the trainings that pages start and show. A later start with the same folder and port has the same
        token, so that an open page continues.
    no_open : bool
        Do not open the browser.
    dry : bool
        Check the model and return the address without a token, but open no port.
    grace : float
        Seconds that running answers have to end once the server is interrupted.
    on_start : callable, optional
        Called with the `Studio` once it listens.

    Returns
    -------
    Studio
        The address.

    Raises
    ------
    RequestError
        For a port that cannot be opened, and with `dry` for a model that does not exist.

    Examples
    --------
    >>> import glassformer as gf
    >>> print(gf.studio.start("llama@10m", dry=True))
    http://127.0.0.1:8600/
    >>> gf.studio.start("llama@10m")  # doctest: +SKIP
    """
    check_whole("port", port, 0)
    if port > 65535:
        raise RequestError(code="range", field="port", value=port, expected="from 0 to 65,535")
    need_libraries()
    if dry:
        if expression is not None:
            from glassformer.naming.models import preset

            preset(expression)
        return Studio(f"http://127.0.0.1:{port}/", expression)
    with listening("127.0.0.1", port) as sock:
        found = _opened(sock.getsockname()[1], expression, token_of(Path(folder)))
        asyncio.run(_run(found, Path(folder), sock, grace, no_open, on_start or _print))
    return found


@dataclass(frozen=True)
class _Opened(Studio):
    token: str = ""
    port: int = 0


def _opened(port: int, expression: str | None, token: str) -> _Opened:
    place = "" if expression is None else f"&/compose?e={quote(expression, safe='')}"
    return _Opened(f"http://127.0.0.1:{port}/#token={token}{place}", expression, token, port)


async def _run(
    found: _Opened, folder: Path, sock: Any, grace: float, no_open: bool, on_start: Callable[[Studio], object]
) -> None:
    from dataclasses import replace

    from glassformer.studio.app import Pages, make_studio, open_routes

    rules = replace(
        access_of("127.0.0.1", found.token, ()), open=open_routes(), cookie=f"glassformer_{found.port}"
    )  # fmt: skip

    def started() -> None:
        on_start(Studio(found.address, found.expression))
        if not no_open:
            webbrowser.open(found.address)

    await run_app(make_studio(Pages(rules, found.expression, folder)), rules.requests, sock, grace, started)


def _print(found: Studio) -> None:
    print(found, flush=True, file=sys.stdout)
