"""Asks of an error what it says to programs: its code, and the field at fault. Sentences may change, these may not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from glassformer.errors import Code, RequestError, WorkError


@contextmanager
def refused(*, code: Code, field: str) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expects a RequestError of exactly this code and field inside; gives it as `pytest.raises` does."""
    with pytest.raises(RequestError) as caught:
        yield caught
    error = caught.value
    assert (error.code, error.field) == (code, field), f"{error.code!r}, {error.field!r}: {error}"


@contextmanager
def failed(*, code: Code) -> Iterator[pytest.ExceptionInfo[WorkError]]:
    """Expects a WorkError of this code inside; gives it as `pytest.raises` does."""
    with pytest.raises(WorkError) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code!r}: {caught.value}"
