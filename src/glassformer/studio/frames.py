"""Pages of the library in frames, which may run their own script and nothing else."""

from __future__ import annotations

from starlette.responses import Response

from glassformer.studio.files import INDEX, media_type

FRAMED = "sandbox allow-scripts; frame-ancestors 'self'"
"""Content security policy of a page in a frame, in addition to the page's own."""


def framed(page: str) -> Response:
    """Returns the response with a page of the library, for a frame."""
    headers = {"content-security-policy": FRAMED, "referrer-policy": "no-referrer"}
    return Response(page, media_type=media_type(INDEX), headers=headers)
