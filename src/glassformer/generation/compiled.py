"""Decoding step as machine code, kept on disk.

An eager step of a small model spends more time between its operations than in them. `torch.export` and AOTInductor
compile `forward` into a library once (one to three minutes), which later processes load in a moment; the library holds
no weights. Attention reads only the filled part of the state, so one library serves every length. Products of one row
have separate code (`one_row.py`), which reads weights two to four times as fast as torch's kernels for many rows.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from glassformer.errors import RequestError, WorkError
from glassformer.files import atomic_file, cache_folder
from glassformer.generation.one_row import products
from glassformer.generation.steps import new_state, warn_crossing
from glassformer.introspection import sites
from glassformer.machine.threads import at_most, paced
from glassformer.model import Model
from glassformer.parts import few_rows
from glassformer.parts.quantized import GROUP, Bf16Linear
from glassformer.parts.state import ModelState

SHORTEST = 8
"""Smallest number of slots that a step attends to, because the compiler specialises code for a size of 1."""


class CompiledStep:
    """Compiled decoding step: called with tokens (b, 1) and a state, it returns the logits (b, v) of the next tokens,
    equal to `model(tokens, state)[:, -1]`.

    Takes `batch` rows and a state from its `init_state`. On a GPU each process records the step as a CUDA graph, which
    attends to all slots at every step; it has been tested on a GPU with Triton, not yet as such a graph."""

    def __init__(self, model: Model, batch: int, max_len: int, dtype: torch.dtype | None = None):
        if max_len < 2 * SHORTEST:
            raise RequestError(
                f"a step for {max_len} tokens is not worth compiling; {2 * SHORTEST} are the least",
                code="range", field="max_len", value=max_len,
            )  # fmt: skip
        if any(isinstance(module, Bf16Linear) for module in model.modules()):
            raise RequestError(
                "a compiled step reads weights as they are; load the model without quantize='bf16'",
                code="conflict", field="quantize", value="bf16",
            )  # fmt: skip
        self.model, self.batch, self.max_len, self.dtype = model, batch, max_len, dtype
        self._keys = torch.arange(max_len, device=model.device)
        self._run: Callable[..., Tensor] | None = None
        self._same = False
        """True if one thread computes the same bits as all threads."""
        self._sites = list(sites(model).values())

    def init_state(self) -> ModelState:
        state = new_state(self.model, self.batch, self.max_len, self.dtype)
        if self._graph:
            for tensor in state.tensors().values():
                torch._dynamo.mark_static_address(tensor)  # or a graph would copy the memory at every step
        return state

    def __call__(self, tokens: Tensor, state: ModelState) -> Tensor:
        assert self._run is not None, "load() it first"
        warn_crossing(self.model.settled, state, 1)
        if state.rows is None:
            state.spread([state.length] * self.batch)
        seen = self.max_len if self._graph else max(state.length + 1, SHORTEST)
        watched = any(site.watched for site in self._sites)  # the library calls no observer
        # The library excludes the last slot (`seen` in `_compile`), which the compiler would treat as another case.
        if watched or (seen == self.max_len and not self._graph):
            return self.model(tokens, state)[:, -1].float()
        with paced(self, "step", free=self._same):
            logits = self._run(tokens.contiguous(), state.rows, self._keys[:seen], state.tensors())
        state.advance(state.length + 1, 0)  # the rows' own lengths were advanced inside
        return logits

    @property
    def _graph(self) -> bool:
        return self._keys.device.type == "cuda"

    @property
    def path(self) -> Path:
        """Path of the library; its name hashes all that the code depends on, not the values of the weights."""
        weights = {name: [str(w.dtype), *w.shape] for name, w in _constants(self.model).items()}
        source = hashlib.sha256()
        for file in sorted(Path(__file__).parents[1].rglob("*.[pc][yp]*")):
            if {"parts", "model.py", "compiled.py", "one_row.py"} & set(file.parts):
                source.update(file.read_bytes())
        said = [
            self.model.config.to_dict(), weights, self.batch, self.max_len, str(self.dtype), torch.__version__,
            torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), few_rows.kernel(),
            sys.platform, source.hexdigest(),
        ]  # fmt: skip
        name = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:24]
        return cache_folder() / "decode" / f"{name}.pt2"

    @property
    def ready(self) -> bool:
        return self.path.is_file()

    def load(self) -> CompiledStep:
        """Loads the library from the disk and returns this step; builds the library first unless `ready`."""
        if self._graph:
            self._run = self._recorded(mode="reduce-overhead")
            return self
        path = self.path
        if not path.is_file():
            self._build(path)
        package: Any = torch._inductor.aoti_load_package(str(path))
        held, names = {f"model.{name}": w for name, w in _constants(self.model).items()}, package.get_constant_fqns()
        held |= load_file(path.with_suffix(".safetensors"))
        group = torch.tensor(GROUP)  # argument of the 4-bit product, the only other constant
        self._constants = {name: held.get(name, group) for name in names}  # the package holds only their addresses
        package.load_constants(self._constants, check_full_update=True, user_managed=True)
        self._run = package
        self._check(path)
        return self

    def _recorded(self, **how: Any) -> Callable[..., Tensor]:
        """Returns a function of the library's arguments that runs a decoding step made by `torch.compile(**how)`: the
        path for GPUs. The traced function takes a state, because torch 2.11 cannot trace the copy of one."""
        like, model = self.init_state(), self.model
        own = torch.zeros(self.batch, dtype=torch.int64, device=self._keys.device)
        torch._dynamo.mark_static_address(own)  # a graph may write only into memory that stays in place

        def step(tokens: Tensor, state: ModelState) -> Tensor:
            return model(tokens, state)[:, -1].float()

        run: Any = torch.compile(step, fullgraph=True, dynamic=False, **how)

        def call(tokens: Tensor, rows: Tensor, keys: Tensor, memory: dict[str, Tensor]) -> Tensor:
            logits: Tensor = run(tokens, like.over(memory, own.copy_(rows), len(keys)))
            rows.copy_(own)
            return logits

        return call

    def _build(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with atomic_file(path, private=True) as temporary:
                self._compile(str(temporary), path.with_suffix(".safetensors"))
        except (RequestError, WorkError):  # from the disk, with a message that needs no other
            raise
        except Exception as problem:
            first = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            raise WorkError(
                f"this model's step cannot be compiled here ({first[:200]}); leave --compile out", code="unsupported"
            ) from problem

    @torch.no_grad()
    def _compile(self, library: str, constants: Path) -> None:
        state = self.init_state()
        state.spread([0] * self.batch)
        memory, tokens = state.tensors(), torch.zeros(self.batch, 1, dtype=torch.long)
        seen = torch.export.Dim("seen", min=SHORTEST, max=self.max_len - 1)
        shapes: Any = ({}, {}, {0: seen}, {name: {} for name in memory})
        given = (tokens, state.rows, self._keys[: SHORTEST + 1], memory)
        options = {
            "aot_inductor.package_constants_in_so": False,
            "aot_inductor.custom_ops_to_c_shims": few_rows.shims() if few_rows.kernel() else {},
        }
        with warnings.catch_warnings(), ExitStack() as stack:
            warnings.simplefilter("ignore")
            # If both counts are equal, Inductor's loops use torch's number of threads at run time; otherwise today's.
            stack.enter_context(patch("os.cpu_count", torch.get_num_threads))
            program = torch.export.export(_Step(self.model, state), given, dynamic_shapes=shapes, strict=False)
            program = program.run_decompositions(products())
            with atomic_file(constants, private=True) as temporary:
                save_file(dict(program.constants), temporary)
            torch._inductor.aoti_compile_and_package(program, package_path=library, inductor_configs=options)

    @torch.no_grad()
    def _check(self, path: Path) -> None:
        """Compares the library's logits with the model's, because the library depends on more than its name hashes.

        Raises WorkError, and deletes the file, if they differ by over 30 %: a wrong library is off by about 100 %, a
        correct one in bf16 by some per cent, because it sums in another order."""
        vocab_size = self.model.vocab_size
        mine, theirs, again = self.init_state(), self.init_state(), self.init_state()
        self._same, same = False, True
        for token in (1 % vocab_size, 2 % vocab_size):
            tokens = torch.full((self.batch, 1), token)
            a, b = self(tokens, mine), self.model(tokens, theirs)[:, -1].float()
            with at_most(1):
                same &= torch.equal(self(tokens, again), a)
            if not float((a - b).norm()) <= 0.3 * float(b.norm()):
                path.unlink(missing_ok=True)
                raise WorkError(
                    "the compiled step does not compute what the model does; it was deleted, try again", code="damaged"
                )
        self._same = same


class _Step(nn.Module):
    def __init__(self, model: Model, like: ModelState):
        super().__init__()
        self.model, self.like = model, like

    def forward(self, tokens: Tensor, rows: Tensor, keys: Tensor, memory: dict[str, Tensor]) -> Tensor:
        state = self.like.over(memory, rows, keys.shape[0])
        return self.model(tokens, state)[:, -1].float()


def _constants(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
