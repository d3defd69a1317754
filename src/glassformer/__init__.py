"""Transformers under glass: compose any of them, train it, run it, look inside it, and know what every choice costs.

>>> import glassformer as gf
>>> model = gf.preset("llama@10m+gqa:2").build(seed=0)

Names are imported when first used, so `import glassformer` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glassformer.architectures import presets as presets
    from glassformer.comparison import Comparison as Comparison
    from glassformer.comparison import Design as Design
    from glassformer.comparison import compare as compare
    from glassformer.comparison import train as train
    from glassformer.comparison import tune as tune
    from glassformer.config import ModelConfig as ModelConfig
    from glassformer.conversion import save as save
    from glassformer.errors import RequestError as RequestError
    from glassformer.errors import WorkError as WorkError
    from glassformer.generation import Sampling as Sampling
    from glassformer.generation import generate as generate
    from glassformer.generation import stream as stream
    from glassformer.generation.session import Completion as Completion
    from glassformer.generation.session import Session as Session
    from glassformer.introspection import capture as capture
    from glassformer.introspection import edit as edit
    from glassformer.introspection import sites as sites
    from glassformer.laboratory import fit_scaling_law as fit_scaling_law
    from glassformer.laboratory.advice import Advice as Advice
    from glassformer.laboratory.advice import advise as advise
    from glassformer.laboratory.evidence import Claims as Claims
    from glassformer.laboratory.evidence import claims as claims
    from glassformer.laboratory.experiments import run as run
    from glassformer.laboratory.explaining import Explanation as Explanation
    from glassformer.laboratory.explaining import explain as explain
    from glassformer.laboratory.exporting import convert as convert
    from glassformer.laboratory.guide_table import Guides as Guides
    from glassformer.laboratory.guide_table import guides as guides
    from glassformer.laboratory.inspection import inspect as inspect
    from glassformer.laboratory.ladder import Ladder as Ladder
    from glassformer.laboratory.ladder import ablate as ablate
    from glassformer.laboratory.planned_run import dry_run as dry_run
    from glassformer.laboratory.proof import check as check
    from glassformer.laboratory.scaled import Scaling as Scaling
    from glassformer.laboratory.scaled import ScalingLaw as ScalingLaw
    from glassformer.laboratory.scaling import scale as scale
    from glassformer.laboratory.tokenized import TokenTable as TokenTable
    from glassformer.laboratory.tokenized import tokens as tokens
    from glassformer.loaded import Loaded as Loaded
    from glassformer.naming import preset as preset
    from glassformer.naming.chatting import chat as chat
    from glassformer.naming.loading import load as load
    from glassformer.planning import plan as plan
    from glassformer.retrieval import ask as ask
    from glassformer.retrieval import classify as classify
    from glassformer.retrieval import embed as embed
    from glassformer.retrieval import index as index
    from glassformer.serving.server import Serving as Serving
    from glassformer.serving.server import serve as serve
    from glassformer.training import Callback as Callback
    from glassformer.training import Recipe as Recipe
    from glassformer.training import Run as Run
    from glassformer.training import fast_training as fast_training
    from glassformer.training.post_mortem import why as why
    from glassformer.version import __version__ as __version__

_HOMES = {
    "Advice": "laboratory.advice",
    "Callback": "training",
    "Claims": "laboratory.evidence",
    "Guides": "laboratory.guide_table",
    "Ladder": "laboratory.ladder",
    "Scaling": "laboratory.scaled",
    "ScalingLaw": "laboratory.scaled",
    "TokenTable": "laboratory.tokenized",
    "Completion": "generation.session",
    "Loaded": "loaded",
    "Comparison": "comparison",
    "Design": "comparison",
    "Explanation": "laboratory.explaining",
    "ModelConfig": "config",
    "Recipe": "training",
    "RequestError": "errors",
    "Run": "training",
    "Sampling": "generation",
    "Session": "generation.session",
    "WorkError": "errors",
    "__version__": "version",
    "ablate": "laboratory.ladder",
    "advise": "laboratory.advice",
    "ask": "retrieval",
    "capture": "introspection",
    "sites": "introspection",
    "chat": "naming.chatting",
    "check": "laboratory.proof",
    "claims": "laboratory.evidence",
    "classify": "retrieval",
    "compare": "comparison",
    "convert": "laboratory.exporting",
    "dry_run": "laboratory.planned_run",
    "dynamics": "dynamics",
    "edit": "introspection",
    "embed": "retrieval",
    "explain": "laboratory.explaining",
    "fast_training": "training",
    "fit_scaling_law": "laboratory",
    "generate": "generation",
    "guides": "laboratory.guide_table",
    "index": "retrieval",
    "inspect": "laboratory.inspection",
    "lens": "lens",
    "load": "naming.loading",
    "plan": "planning",
    "preset": "naming",
    "presets": "architectures",
    "run": "laboratory.experiments",
    "Serving": "serving.server",
    "scale": "laboratory.scaling",
    "serve": "serving.server",
    "stream": "generation",
    "agents": "agents",
    "studio": "studio",
    "tokens": "laboratory.tokenized",
    "train": "comparison",
    "tune": "comparison",
    "why": "training.post_mortem",
}
"""Module that defines each public name. No public function has the name of a module: both could not be attributes."""

__all__ = [
    "Advice",
    "Callback",
    "Claims",
    "Guides",
    "Ladder",
    "Scaling",
    "ScalingLaw",
    "Serving",
    "TokenTable",
    "Completion",
    "Loaded",
    "Comparison",
    "Design",
    "Explanation",
    "ModelConfig",
    "Recipe",
    "RequestError",
    "Run",
    "Sampling",
    "Session",
    "WorkError",
    "ablate",
    "advise",
    "agents",
    "ask",
    "capture",
    "chat",
    "check",
    "claims",
    "classify",
    "compare",
    "convert",
    "dry_run",
    "dynamics",
    "edit",
    "embed",
    "explain",
    "fast_training",
    "fit_scaling_law",
    "generate",
    "guides",
    "index",
    "inspect",
    "lens",
    "load",
    "plan",
    "preset",
    "presets",
    "run",
    "save",
    "scale",
    "serve",
    "sites",
    "stream",
    "studio",
    "tokens",
    "train",
    "tune",
    "why",
]


if not TYPE_CHECKING:  # not imported lazily by name: nnsight gives every object, and so every module, a method `save`

    def save(
        model, tokenizer, folder, *, dtype=None, trained=None, family=None, ends=None, generation=None, pooling=None,
        force=False,
    ):  # fmt: skip
        """Writes a model as a Hugging Face folder, which `AutoModelForCausalLM.from_pretrained` loads.

        If no published class can hold the model, it is written as a class of Glassformer, which `transformers` loads
        once `glassformer` is imported. Reparametrised matrices are written as plain ones.

        Parameters
        ----------
        model
            A built `Model`.
        tokenizer
            Its tokenizer, or None.
        folder
            The folder to write.
        dtype
            torch dtype of the weights; by default unchanged.
        trained
            Recipe and checkpoint of a run, for the model card.
        family
            model_type of the published class; by default the first one that can hold the model.
        ends
            Ids of end tokens; by default the model's, or the tokenizer's.
        generation
            Decoding options for generation_config.json, as `load` and `Run` give them.
        pooling
            Pooling, as `load` gives it; the folder is then one of sentence-transformers too.
        force
            Replace files of the folder that this program did not write, and write next to other files.

        Returns
        -------
        Family
            The published class that holds the model: `model_type`, `architecture`.

        Raises
        ------
        RequestError
            If the family cannot hold the model, or the folder cannot be written or holds other files.

        Examples
        --------
        >>> import tempfile
        >>> import glassformer as gf
        >>> model = gf.preset("llama@0.3m+vocab_size=65").build(seed=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     gf.save(model, None, folder).architecture
        'LlamaForCausalLM'
        """
        return import_module("glassformer.conversion").save(**locals())


if not TYPE_CHECKING:  # a type checker refuses a name that does not exist

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'glassformer' has no attribute {name!r}")
        import sys

        if "torch" not in sys.modules and _HOMES[name] != "errors" and sys.stderr is not None and sys.stderr.isatty():
            print("loading torch ...", file=sys.stderr, flush=True)  # for some seconds without other output
        home = import_module(f"glassformer.{_HOMES[name]}")
        value = home if _HOMES[name] == name else getattr(home, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*(name for name in globals() if name.startswith("__")), *__all__]


# so that `transformers` loads models of Glassformer's own family
import_module("glassformer.register").hook(lambda: import_module("glassformer.conversion.transformers"))
