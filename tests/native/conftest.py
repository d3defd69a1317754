"""Fixtures of tests of machine code."""

from __future__ import annotations

import pytest

from glassformer.machine import native


@pytest.fixture(params=["avx2", "avx512vnni"])
def options(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Compiler options of a kernel that this processor has."""
    one = native.KERNELS[request.param]
    if (missing := native.lacking(one)) or native.compiler() is None:
        pytest.skip(f"no {missing or 'compiler'} here")
    return one.options
