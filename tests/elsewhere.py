"""A second device, in Python: its tensors hold numbers of the CPU's, and what a graphics card refuses it refuses too.

The tests need no such card: a tensor that is left on the CPU, or a result that is read on the wrong device, fails here
as on CUDA or MPS. Refused are operands on two devices (except scalars and indices), numpy of a tensor on the device, a
generator of another device and, if asked, fp64, which MPS lacks. The results and the speed of a card's kernels are not
tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from glassformer.parts.precision import WITHOUT_FP64

NAME = "elsewhere"
DOUBLE = (torch.float64, torch.complex128)
MOVES = ("aten::_to_copy", "aten::copy_")
PLACES = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class _Switch:
    """State of the device in this process: off until a test turns it on."""

    on = False
    double = True


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return _Switch.on

    def has_primary_context(self, device: int) -> bool:
        return _Switch.on

    def is_built(self) -> bool:
        return True


class _Module:
    """The functions that torch requires of `torch.<device>`."""

    @staticmethod
    def is_available() -> bool:
        return _Switch.on

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def synchronize(device: object = None) -> None:
        pass

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass

    @staticmethod
    def get_rng_state(device: object = None) -> Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class _Generator:
    """`torch.Generator` for either device; of this one's generators it is remembered that they are."""

    ours: ClassVar[dict[int, torch.Generator]] = {}

    def __new__(cls, device: object = "cpu") -> Any:
        if not _is_ours(device):
            return _real_generator(device)  # type: ignore[arg-type]
        made = _real_generator("cpu")
        cls.ours[made._cdata] = made  # kept, so that no other gets its address
        return made


if not torch.cuda.is_available():  # autograd would ask this device, and no longer the GPU, whom to wait for
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module(), hook=_Hooks())
    _DEVICE = torch.device(NAME, 0)
_real_generator = torch.Generator


def _is_ours(device: object) -> bool:
    return device is not None and torch.device(device).type == NAME  # type: ignore[arg-type]


class Elsewhere(Tensor):
    """A tensor of the device; `raw` are its numbers."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> Elsewhere:
        assert raw.device.type == "cpu", raw.device
        if raw.dtype in DOUBLE and not _Switch.double:
            raise TypeError(f"this device has no {raw.dtype}")
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=_DEVICE
        )

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        made = op.decompose(*args, **(kwargs or {}))  # what consists of others is still whole in inference mode
        return _run(op, *args, **(kwargs or {})) if made is NotImplemented else made

    def tolist(self) -> Any:
        return self.raw.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {self.device} tensor to numpy; copy it to the CPU first")

    def __array__(self, *args: Any) -> Any:
        raise TypeError(f"can't convert {self.device} tensor to numpy; copy it to the CPU first")

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.raw!r} on {NAME}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("only what was copied to the CPU can be written")


# What the CPU has under another name.


def _packed(pairs: Tensor, tiles: int) -> Tensor:
    """Packs 4-bit weights as CUDA and MPS do: two neighbours of a row per byte, the first in the upper half."""
    assert pairs.dtype == torch.uint8 and (2 * pairs.shape[1]) % (16 * tiles) == 0
    return pairs.clone()


def _product(x: Elsewhere, packed: Elsewhere, group: int, scales: Elsewhere) -> Tensor:
    """Returns x W^T with W = (q - 8) s + z, scales and zeros (groups, o, 2)."""
    q = torch.stack([packed.raw >> 4, packed.raw & 15], -1).flatten(1).float() - 8
    s, z = (part.repeat_interleave(group, 0).t().float() for part in scales.raw.unbind(-1))
    return Elsewhere((x.raw.float() @ (q * s + z).t()).to(x.dtype))


_KERNELS: dict[str, Callable[..., Tensor]] = {
    "aten::_convert_weight_to_int4pack": _packed,
    "aten::_weight_int4pack_mm": _product,
}


@torch.inference_mode(False)  # torch makes no views of a wrapper that came from inside
def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    name, leaves = op._schema.name, tree_leaves((args, kwargs))
    here = [leaf for leaf in leaves if isinstance(leaf, Elsewhere)]
    to, generator = kwargs.pop("device", None), kwargs.get("generator")
    kwargs.pop("pin_memory", None)
    results_here = _is_ours(to) if to is not None else bool(here)
    for leaf in leaves:
        stranger = isinstance(leaf, Tensor) and not isinstance(leaf, Elsewhere) and leaf.dim() > 0
        if stranger and name not in MOVES and not (name in PLACES and leaf.dtype in (torch.long, torch.bool)):
            raise RuntimeError(f"{op}: {tuple(leaf.shape)} on {leaf.device} with tensors on {_DEVICE}")
    if isinstance(generator, torch._C.Generator) and (generator._cdata in _Generator.ours) != results_here:
        raise RuntimeError(f"{op}: a generator of another device")
    if name in _KERNELS:
        return _KERNELS[name](*args, **kwargs)
    raw_args, raw_kwargs = tree_map_only(Elsewhere, lambda tensor: tensor.raw, (args, kwargs))
    if to is not None:
        raw_kwargs["device"] = torch.device("cpu")
    out = op(*raw_args, **raw_kwargs)
    known = {id(tensor.raw): tensor for tensor in here}
    if any(tensor.shape != tensor.raw.shape for tensor in here):
        raise NotImplementedError(f"{op}: a tensor of this device cannot change its size")
    if name == "aten::copy_":
        return args[0]
    if name == "aten::_to_copy" and id(out) in known:
        out = out.clone()

    def back(tensor: Tensor) -> Tensor:
        if not results_here:
            return tensor
        # The wrapper knows no conjugate or negative bit, so that what asks it for one would read the number as it is.
        return known[id(tensor)] if id(tensor) in known else Elsewhere(tensor.resolve_conj().resolve_neg())

    return tree_map_only(Tensor, back, out)


_every = torch._C._dispatch_library("IMPL", "_", "", __file__, 0)  # operations of any name
_every.fallback("PrivateUse1", _run, False)
_own = torch._C._dispatch_library("IMPL", "aten", "", __file__, 0)
for _name in (
    "empty.memory_format", "empty_strided", "_to_copy", "arange", "arange.start", "arange.start_step", "linspace",
    "logspace", "eye", "eye.m", "randperm", "randperm.generator",
):  # fmt: skip
    _packet, _, _overload = _name.partition(".")
    _op = getattr(getattr(torch.ops.aten, _packet), _overload or "default")
    _own.impl(_name, "PrivateUse1", partial(_run, _op), False)


@contextmanager
def device(double: bool = True) -> Iterator[str]:
    """Turns the device on inside the block, with fp64 if `double`; yields its name."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here, on which `make gpu` tries the same")
    with patch.object(torch, "Generator", _Generator):
        _Switch.on, _Switch.double = True, double
        if not double:
            WITHOUT_FP64.add(NAME)
        try:
            yield NAME
        finally:
            _Switch.on, _Switch.double = False, True
            WITHOUT_FP64.discard(NAME)
