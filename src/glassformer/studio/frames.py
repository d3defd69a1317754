"""Pages of the library in frames, which may run their own script and nothing else."""

from __future__ import annotations

from starlette.responses import Response

from glassformer.studio.files import INDEX, media_type

FRAMED = "sandbox allow-scripts; frame-ancestors 'self'"
"""Policy of a page in a frame, next to the policy that the page has itself."""


def framed(page: str) -> Response:
    """Returns a page of the library for a frame."""
    headers = {"content-security-policy": FRAMED, "referrer-policy": "no-referrer"}
    return Response(page, media_type=media_type(INDEX), headers=headers)
