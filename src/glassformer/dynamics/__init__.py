"""Statistics of training as pure functions, the watch of a run, and the diagnosis of a failed one."""

from glassformer.dynamics.activations import (
    Massive,
    composite_norm,
    composite_residual,
    massive,
    relative_residual,
    residual_rms,
    token_cosine,
)
from glassformer.dynamics.attention import (
    attention_entropy,
    causal_counts,
    entropy_bound,
    inverse_participation_ratio,
    max_attention_logit,
    sink_mass,
    sink_rate,
)
from glassformer.dynamics.diagnosis import Cause, Diagnosis
from glassformer.dynamics.gradients import gradient_norm, gradient_rms, update_ratio
from glassformer.dynamics.outputs import dead_units, log_z, max_violation, router_entropy, router_load
from glassformer.dynamics.records import Records, read_records
from glassformer.dynamics.rules import diagnose
from glassformer.dynamics.spectra import (
    CosineMap,
    cosine_map,
    cosine_matrix,
    effective_rank,
    effective_rank_of,
    product_spectrum,
    row_cosine,
    singular_values,
    spectral_norm,
    spectral_norm_of,
    stable_rank,
    stable_rank_of,
)
from glassformer.dynamics.spikes import Spikes
from glassformer.dynamics.watch import Moment, Watch

__all__ = [
    "Cause", "CosineMap", "Diagnosis", "Massive", "Moment", "Records", "Spikes", "Watch", "attention_entropy",
    "causal_counts", "composite_norm", "composite_residual", "cosine_map", "cosine_matrix", "dead_units",
    "diagnose", "effective_rank", "effective_rank_of", "entropy_bound", "gradient_norm", "gradient_rms",
    "inverse_participation_ratio", "log_z", "massive", "max_attention_logit", "max_violation", "product_spectrum",
    "read_records", "relative_residual", "residual_rms", "router_entropy", "router_load", "row_cosine",
    "singular_values", "sink_mass", "sink_rate", "spectral_norm", "spectral_norm_of", "stable_rank",
    "stable_rank_of", "token_cosine", "update_ratio",
]  # fmt: skip
