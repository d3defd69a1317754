"""One thread, fixed seeds: a test that passes once passes always."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start, too

import pytest
import torch
from hypothesis import settings

settings.register_profile("glassformer", derandomize=True, deadline=None, max_examples=40, database=None)
settings.load_profile("glassformer")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a command that ran in this process may have taken all cores
    yield
