"""From logits to text: a prompt is read once, then one token at a time. Needs only `init_state` and `forward`.

stream, generate   rows in one batch, as a tensor or as lists of ids of any lengths
Engine             requests of any length, as text or tokens, that join and leave a running batch
speculate, beams   the same text in fewer passes; the most likely text among several
"""

from glassformer.generation.compiled import CompiledStep
from glassformer.generation.rows import generate, stream
from glassformer.generation.rules import Rules
from glassformer.generation.sampling import Sampling, choose
from glassformer.generation.steps import decode, prefill

__all__ = ["CompiledStep", "Rules", "Sampling", "choose", "decode", "generate", "prefill", "stream"]
