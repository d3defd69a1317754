"""Pipeline parallelism: the ranks of `pp` have consecutive layers, through which microbatches pass (Narayanan et al.
2021, 2104.04473).

With p ranks and v chunks on each, the layers are p v stages, and stage j is the chunk j // p of rank j mod p. The first
stage has the embedding, the last the final norm and the head. `torch.distributed.pipelining` transfers activations
between them, by the schedule 1F1B, interleaved if v > 1. A rank's gradients are summed as trees, microbatch by
microbatch: their bits are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from glassformer.errors import RequestError
from glassformer.model import Block, Inputs, Model, locate
from glassformer.parallel.layout import stage_layers
from glassformer.parallel.sums import Tree
from glassformer.parts.core import auxiliary
from glassformer.parts.forward_pass import Pass

Around = Callable[[], AbstractContextManager[Any]]


def refuse_unstaged(model: Model, stages: int) -> None:
    """Raises RequestError if the layers of a model cannot be divided into `stages` pipeline stages."""
    layers = len(model.layers)
    reasons = {
        ("pp", f"{stages} stages are more than the {layers} layers"): stages > layers,
        ("encoder", "an encoder's output is read by every layer"): model.encoder is not None,
        ("head.tied", "a tied head needs the embedding's table, which is on another rank; +untied"): model.head.tied,
        ("dropout", "dropout would draw other masks"): any(_named(model.config.to_dict(), "dropout")),
        ("source", "a layer reads the keys of another one, which may be on another rank"): bool(
            list(_named(model.config.to_dict(), "source"))
        ),
        ("head.pool", "a head that pools has no loss for each token"): model.head.pool is not None,
    }
    for (field, why), holds in reasons.items():
        if holds:
            raise RequestError(f"pp={stages}: {why}", code="conflict", field=field, expected="pp=1")


def _named(tree: Any, field: str) -> Iterator[Any]:
    """Yields every value under the key `field` in a tree of dicts and lists, at any depth."""
    if isinstance(tree, dict):
        if field in tree:
            yield tree[field]
        for value in tree.values():
            yield from _named(value, field)
    elif isinstance(tree, list):
        for value in tree:
            yield from _named(value, field)


class Stages(Model):
    """Part of a model that one pipeline rank computes: its layers, under their names in the whole model.

    `loss` and `step` are calls of all ranks: activations pass to the next rank, and all ranks have the result.
    """

    def __init__(self, model: Model, rank: int, ranks: int, chunks: int = 1, group: Any = None):
        """Moves the layers of pipeline rank `rank` (of `ranks`, in process group `group`), in `chunks` separate groups,
        out of `model`."""
        count = ranks * chunks
        refuse_unstaged(model, count)
        parts = stage_layers(len(model.layers), count)
        held = [parts[number] for number in range(rank, count, ranks)]
        first, last = rank == 0, rank == ranks - 1
        nn.Module.__init__(self)
        self.config, self.encoder = model.config, None
        self.width, self.blocks = model.config.d_model, len(model.layers)
        none: Any = None
        self.embedding = model.embedding if first else none
        self.embed, self.final, self.logits = model.embed, model.final, model.logits
        self.layers = nn.ModuleList()
        blocks: dict[int, Any] = {layer: model.layers[layer] for part in held for layer in part}
        for layer, block in blocks.items():
            self.layers.add_module(str(layer), block)
        self.final_norm = model.final_norm if last else None
        self.head = model.head if last else none
        self.rank, self.ranks, self.group = rank, ranks, group
        chunks_of_layers = [
            Chunk(self, [blocks[layer] for layer in part], number == 0, number == count - 1)
            for number, part in zip(range(rank, count, ranks), held, strict=True)
        ]
        self.__dict__["chunks"] = chunks_of_layers  # not registered as a module, so that its layers keep their names
        self.around: Around = nullcontext
        """Function that returns the context of forward passes: autocast, and compiled regions."""
        self.share = 1.0
        """Weight of a microbatch's loss in the loss of the step."""

    chunks: list[Chunk]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def loss(self, tokens: Tensor, targets: Tensor, *_: Any, reduction: str = "mean", **given: Any) -> Tensor:
        """Returns the loss of the whole model on tokens (b, s), a scalar, or (b, s) for reduction "none"; without a
        gradient. A call of all ranks."""
        _refuse_given(given)
        count, x = self.ranks * len(self.chunks), tokens
        b, s = tokens.shape
        for number in range(count):
            owner, after = number % self.ranks, (number + 1) % self.ranks
            if self.rank == owner:
                x = self.chunks[number // self.ranks](x)
            if number + 1 < count and owner != after:
                if self.rank == owner:
                    dist.send(x.contiguous(), group=self.group, group_dst=after)
                elif self.rank == after:
                    x = torch.empty(b, s, self.width, dtype=self.dtype, device=self.device)
                    dist.recv(x, group=self.group, group_src=owner)
        losses = torch.zeros(targets.shape if reduction == "none" else (), device=self.device)
        if self.rank == self.ranks - 1:
            losses = self.head(x, None, targets, reduction).float().contiguous()
        if self.group is not None:
            dist.broadcast(losses, group=self.group, group_src=self.ranks - 1)
        return losses

    def forward(self, *_: Any, **__: Any) -> Tensor:
        raise RequestError(
            "the layers of this model are on several ranks, so it has no logits here; load the run in one process",
            code="conflict", field="pp", value=self.ranks, expected="pp=1",
        )  # fmt: skip

    def step(self, tokens: Tensor, targets: Tensor, atoms: int, share: float) -> list[float]:
        """Adds up the gradients of a batch (b, s) of `atoms` equal microbatches, each of weight `share` in the step's
        loss; returns their losses times `share`. A call of all ranks."""
        self.share = share
        parameters = [one for one in self.parameters() if one.requires_grad]
        trees = {parameter: Tree[Tensor](torch.add) for parameter in parameters}

        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None
            trees[parameter].push(parameter.grad)  # type: ignore[index]
            parameter.grad = None

        hooks = [one.register_post_accumulate_grad_hook(take) for one in parameters]
        try:
            losses = self._flow(tokens, targets, atoms)
        finally:
            for hook in hooks:
                hook.remove()
        for parameter, tree in trees.items():
            parameter.grad = tree.total() if tree.kept else None
        return losses

    def _flow(self, tokens: Tensor, targets: Tensor, atoms: int) -> list[float]:
        count, b = self.ranks * len(self.chunks), len(tokens) // atoms
        x = torch.empty(b, tokens.shape[1], self.width, dtype=self.dtype, device="meta")
        stages = [  # for this step only: they store received and sent tensors
            PipelineStage(
                chunk, number, count, self.device, group=self.group,
                input_args=tokens[:b].to("meta") if chunk.first else x.requires_grad_(),
                output_args=x.requires_grad_(),
            )
            for number, chunk in zip(range(self.rank, count, self.ranks), self.chunks, strict=True)
        ]  # fmt: skip
        plan: Any = {"loss_fn": self._loss_of, "scale_grads": False}
        if len(stages) == 1:
            schedule: Any = Schedule1F1B(stages[0], atoms, **plan)
        else:
            schedule = ScheduleInterleaved1F1B(list(stages), atoms, **plan)
        losses: list[Tensor] = []
        last = self.rank == self.ranks - 1
        given = {"target": targets, "losses": losses} if last else {}
        schedule.step(*([tokens] if self.rank == 0 else []), **given)
        told = torch.stack([loss.detach() for loss in losses]) if last else torch.zeros(atoms, device=self.device)
        dist.broadcast(told, group=self.group, group_src=self.ranks - 1)
        return [float(loss) for loss in told]

    def _loss_of(self, x: Tensor, targets: Tensor) -> Tensor:
        with self.around():
            return self.head(x, None, targets) * self.share


class Chunk(nn.Module):
    """Consecutive layers of a pipeline rank, with the embedding before the first layer of the model or the final norm
    after the last: tokens (b, s) or x (b, s, d) -> x (b, s, d)."""

    def __init__(self, stages: Stages, layers: Sequence[Block], first: bool, last: bool):
        super().__init__()
        self.__dict__["stages"], self.__dict__["layers"] = stages, layers  # not registered a second time
        self.first, self.last = first, last

    stages: Stages
    layers: Sequence[Block]

    def forward(self, x: Tensor) -> Tensor:
        stages = self.stages
        with stages.around(), auxiliary.gathering() as added:
            if self.first:
                pass_ = locate(stages.embedding.places(x), Inputs(x))
                x = stages.embed(stages.embedding(x, pass_))
            else:
                pass_ = Pass(0, x.shape[1], x.device)
            for layer in self.layers:
                x = layer(x, pass_)
            if self.last and stages.final_norm is not None:
                x = stages.final(stages.final_norm(x))
        return _Join.apply(x, stages.share, *added) if added else x


class _Join(torch.autograd.Function):
    """Identity on x whose backward pass also gives a gradient to the auxiliary losses of this stage, because the loss
    itself is computed on another rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float, *added: Tensor) -> Tensor:
        ctx.share, ctx.like = share, added
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, *[torch.full_like(one, ctx.share) for one in ctx.like]


def _refuse_given(given: dict[str, Any]) -> None:
    if named := [name for name, value in given.items() if value is not None]:
        raise RequestError(
            f"pp: {named[0]} does not travel from stage to stage; train on next tokens only",
            code="conflict", field="pp", value=named[0], expected="pp=1",
        )  # fmt: skip
