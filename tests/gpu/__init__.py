"""What a GPU computes, against the definition and against the CPU: `make gpu`. Without one, every test here skips."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
