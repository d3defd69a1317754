"""A rank's part of a model has the initial bits of one process, and no rank ever holds more than its part."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glassformer.naming import preset
from glassformer.parallel.apply import Ranks
from glassformer.parallel.pieces import Held, gap_or_overlap
from glassformer.parallel.process_groups import ProcessGroups
from glassformer.parallel.sums import local
from tests.parallel.threads import as_threads

SIZE = "layers=4+d_model=32+vocab_size=61+context=16"
TINY = f"{SIZE}+heads=4"
LAYOUTS = [
    "fsdp=4",
    "replicate=2",
    "tp=2",
    "fsdp=2,tp=2",
    "cp=2,fsdp=2",
    "pp=2",
    "pp=2,interleave=2",
    "pp=2,replicate=2",
]
CASES = [
    *((f"llama@1m+{TINY}+gqa:2+bias", layout) for layout in LAYOUTS),
    (f"llama@1m+{TINY}+moe:4:2+ffn.balance_rate=0.01", "fsdp=4,ep=2"),
    (f"mamba@1m+{SIZE}", "fsdp=4"),
    (f"mamba@1m+{SIZE}", "tp=2"),
    (f"gpt2@1m+{TINY}+sigmareparam", "replicate=2"),
    (f"bloom@1m+{TINY}", "fsdp=2,tp=2"),
]


@pytest.mark.parametrize("given", [False, True], ids=["drawn", "given"])
@pytest.mark.parametrize(("expression", "layout"), CASES)
def test_every_layout_has_the_initial_weights_of_one_process(expression: str, layout: str, given: bool):
    config = preset(expression)
    model = config.build(seed=3)
    if given:
        for one in model.state_dict().values():
            one.add_(1.0 if one.is_floating_point() else 1)
    whole = {**dict(model.named_buffers()), **model.state_dict()}
    weights = model.state_dict() if given else None
    buffers = dict(model.named_buffers()).keys() - model.state_dict().keys()

    def work(groups: ProcessGroups) -> tuple[Held, dict[str, Tensor]]:
        built = Ranks(groups).build(config, 3, "cpu", given=weights)
        return Held.of_model(built), {name: one for name, one in built.named_buffers() if name in buffers}

    boxes: dict[str, set[Any]] = {name: set() for name in model.state_dict()}
    for held, beside in as_threads(layout, work):
        for piece in held.pieces:
            cut = tuple(slice(*span) for span in zip(piece.box.at, piece.box.end, strict=True))
            assert torch.equal(piece.values, whole[piece.name][cut]), piece.name
            boxes[piece.name].add(piece.box)
        assert all(torch.equal(one, whole[name]) for name, one in beside.items())
    for name, found in boxes.items():
        assert gap_or_overlap(found, tuple(whole[name].shape)) is None, name


class Peak(TorchDispatchMode):
    """Peak bytes of the tensors off the meta device that operations of this thread make; of a tensor that ranks share,
    only this rank's part counts."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Counter[int] = Counter()
        """Tensors of each storage."""
        self.now = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in (local(one) for one in tree_leaves(made) if isinstance(one, Tensor)):
            if not one.is_meta:
                storage = one.untyped_storage()
                self._add(storage._cdata, storage.nbytes(), 1)
                weakref.finalize(one, self._add, storage._cdata, storage.nbytes(), -1)
        return made

    def _add(self, storage: int, size: int, tensors: int) -> None:
        before, self.held[storage] = self.held[storage], self.held[storage] + tensors
        self.now += size * (bool(self.held[storage]) - bool(before))
        self.bytes = max(self.bytes, self.now)


@pytest.mark.parametrize(("layout", "most"), [("fsdp=4", 0.35), ("pp=4", 0.45), ("tp=4", 0.35), ("fsdp=2,tp=2", 0.35)])
def test_a_rank_allocates_little_more_than_its_part(layout: str, most: float):
    """A quarter of the model, and a block of rows while it is drawn."""
    config = preset("llama@1m+layers=4+d_model=256+heads=4+vocab_size=1024+context=16+untied")
    whole = 4 * config.num_params()

    def work(groups: ProcessGroups) -> int:
        with Peak() as peak:
            model = Ranks(groups).build(config, 0, "cpu")
        kept = sum(piece.values.nbytes for piece in Held.of_model(model).pieces)
        assert kept < 0.4 * whole
        return peak.bytes

    assert max(as_threads(layout, work)) < most * whole
