"""The speed of `train` for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from glassformer import machine
from glassformer.machine import threads as pacing
from glassformer.parts.region import compiled_regions


@contextmanager
def fast_training(
    device: str = "auto", dtype: str = "auto", threads: int | None = None, compile: bool | None = None
) -> Iterator[machine.Settings]:
    """Inside, a loop over `model.loss` runs as fast as `train`: torch uses all cores, the process keeps the memory that
    a step frees, and the elementwise regions of models are compiled, where there is a compiler, for the shapes they
    meet first. Yields the settings: `how.device`, and `how.autocast()` for the dtype.

    >>> with gf.fast_training() as how:
    ...     model = config.build(seed=0).to(how.device)
    ...     for inputs, targets in batches:
    ...         with how.autocast():
    ...             loss = model.loss(inputs, targets)
    ...         loss.backward()

    device, dtype   auto, or as in a recipe; bfloat16 where its products are faster than float32's here
    threads         of the CPU; None: all cores. On leaving torch has as many as before. How they wait for each other is
                    chosen by how long steps take, from one call of the optimizer to the next (`machine.threads`)
    compile         None: where it can be done. It takes some tens of seconds in the first step

    Shapes that change from step to step compile again, a few times, and then run eagerly: evaluate and generate
    outside.
    Raises RequestError for settings that this machine does not have.
    """
    how = machine.settings(device, dtype, threads, compile)
    before, fixed = torch.get_num_threads(), pacing.fixed()
    machine.apply(how)
    beat = pacing.Beat("step of a loop")
    timed = register_optimizer_step_post_hook(lambda optimizer, *_: beat(optimizer))
    try:
        with compiled_regions(how.compile):
            yield how
    finally:
        timed.remove()
        torch.set_num_threads(before)
        pacing.fix(fixed)
