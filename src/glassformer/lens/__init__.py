"""Readings of a model: functions that return data which can draw itself. Built on `gf.capture` and `gf.edit`."""

from glassformer.lens.ablation import HeadAblation, head_ablation
from glassformer.lens.attribution import LogitAttribution, logit_attribution
from glassformer.lens.distance import AttentionDistance, attention_distance
from glassformer.lens.edits import (
    ablate_experts,
    ablate_ffn,
    ablate_heads,
    ablate_layer,
    ablate_mixer,
    ablate_neurons,
    add_direction,
    patch,
    replace,
    scale,
)
from glassformer.lens.heads import (
    HeadScores,
    duplicate_token_scores,
    first_token_scores,
    head_scores,
    induction_scores,
    previous_token_scores,
)
from glassformer.lens.inspection import Inspection, inspect
from glassformer.lens.logit_lens import LogitLens, logit_lens, unembed
from glassformer.lens.maps import AttentionMap, AttentionMaps, SideBySide, attention_map, attention_maps, side_by_side
from glassformer.lens.meaning import MeaningScores, meaning_scores
from glassformer.lens.neighbours import Neighbours, embedding_neighbours, nearest
from glassformer.lens.patching import ActivationPatching, IndirectObject, activation_patching, indirect_object
from glassformer.lens.positions import PositionPicture, position_picture
from glassformer.lens.reading import Reading
from glassformer.lens.rollout import Rollout, attention_rollout
from glassformer.lens.routing import ExpertRouting, expert_routing
from glassformer.lens.similarity import TokenSimilarity, token_similarity
from glassformer.lens.sinks import (
    AttentionSinks,
    MassiveActivation,
    MassiveActivations,
    attention_sinks,
    massive_activations,
)

__all__ = [
    "ActivationPatching", "AttentionDistance", "AttentionMap", "AttentionMaps", "AttentionSinks", "ExpertRouting",
    "HeadAblation", "HeadScores", "IndirectObject", "Inspection", "LogitAttribution", "LogitLens",
    "MassiveActivation", "MassiveActivations", "MeaningScores", "Neighbours", "PositionPicture", "Reading",
    "Rollout", "SideBySide", "TokenSimilarity", "ablate_experts", "ablate_ffn", "ablate_heads", "ablate_layer",
    "ablate_mixer", "ablate_neurons", "activation_patching", "add_direction", "attention_distance", "attention_map",
    "attention_maps", "attention_rollout", "attention_sinks", "duplicate_token_scores", "embedding_neighbours",
    "expert_routing", "first_token_scores", "head_ablation", "head_scores", "indirect_object", "induction_scores",
    "inspect", "logit_attribution", "logit_lens", "massive_activations", "meaning_scores", "nearest", "patch",
    "position_picture", "previous_token_scores", "replace", "scale", "side_by_side", "token_similarity", "unembed",
]  # fmt: skip
