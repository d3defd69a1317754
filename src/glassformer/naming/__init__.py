"""Expressions that name models: EXPR -> ModelConfig, and `load` in loading.py: EXPR -> a model with its weights.

    EXPR   := NAME[@SIZE][+CHANGE...]         gpt2    llama@10m    gpt2@10m+rope+rmsnorm+swiglu+gqa:2
    NAME   := a preset | a .yaml or .json config | a run or checkpoint folder | a .gguf file | hf:owner/name | smollm2
    CHANGE := a short name, with a value after a colon if it takes one | path=value

A change is a function ModelConfig -> ModelConfig that leaves everything else unchanged: a part that already has the
named kind keeps its fields. Short names are declared by the parts (`parts/core/words.py`). For training, changes of the
recipe may be among them: +recipe.FIELD=VALUE, as `glassformer why` suggests.

Naming a preset imports neither a trainer nor a converter; only a NAME that is a file or a checkpoint does.
"""

from glassformer.names.sizes import SIZES, shape
from glassformer.naming.assign import assign
from glassformer.naming.changes import changes, words
from glassformer.naming.models import at_size, own_value, parse, preset, split_recipe, without_size
from glassformer.naming.sizes import resize

__all__ = [
    "SIZES", "assign", "at_size", "changes", "own_value", "parse", "preset", "resize", "shape", "split_recipe",
    "without_size", "words",
]  # fmt: skip
