"""Packing of arrays into a page: at the least precision that is visible, deflated, in one piece of base64."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor


def shares(x: Tensor, fine: bool) -> np.ndarray:
    """Encodes numbers from 0 to 1 as integers of 16 bits (`fine`), or 8: number = (code / largest code)^2, so that
    small numbers keep their digits."""
    kind = np.uint16 if fine else np.uint8
    roots = x.nan_to_num(0.0).clamp(0, 1).double().sqrt().numpy()
    return np.rint(roots * np.iinfo(kind).max).astype(kind)


def short_floats(x: Tensor) -> np.ndarray:
    """Encodes numbers as bfloat16, the upper half of a float32, in unsigned integers of 16 bits."""
    return x.bfloat16().view(torch.int16).numpy().view(np.uint16)


def indices(x: Tensor, count: int) -> np.ndarray:
    """Encodes integers from 0 to count - 1 as unsigned integers of 16 bits if they fit, else of 32."""
    return x.numpy().astype(np.uint16 if count <= 1 << 16 else np.uint32)


def packed(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns {"arrays": {name: [dtype, first byte, number of values]}, "bytes": all arrays, deflated, in base64};
    little-endian."""
    where, pieces, first = {}, [], 0
    for name, array in arrays.items():
        where[name] = [str(array.dtype), first, array.size]
        pieces.append(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
        first += len(pieces[-1])
    return {"arrays": where, "bytes": base64.b64encode(zlib.compress(b"".join(pieces), 6)).decode("ascii")}
