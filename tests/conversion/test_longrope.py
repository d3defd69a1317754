"""LongRope written out in full: equal for configs that rotate alike, and only for them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.config import ModelConfig
from glassformer.conversion.families import FAMILIES
from glassformer.conversion.fields import Fields
from glassformer.errors import Code
from glassformer.parts.core.base import BuildContext
from glassformer.parts.position.scaling import LongRopeScalingConfig
from tests.refused import refused

from .test_words import LONG, SHORT, SIZES

torch.set_num_threads(1)

CONTEXT, TRAINED = 24, 12
GROWN = math.sqrt(1 + math.log(2) / math.log(TRAINED))  # what the factor 2 makes of 12
FACTORS = st.lists(st.sampled_from([1.0, 2.5]), min_size=2, max_size=2).map(tuple)
CONFIGS = st.builds(
    LongRopeScalingConfig,
    factor=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    original_context=st.sampled_from([None, TRAINED, CONTEXT, 40]),
    short=FACTORS,
    long=FACTORS,
    attention_factor=st.sampled_from([None, 1.0, GROWN, 1.3]),
).filter(lambda config: config.short != config.long)
"""Strategy of scalings whose two lists differ; with equal lists, the context at which they switch would be a difference
without effect."""


def turns(config: LongRopeScalingConfig) -> list[tuple[float, ...]]:
    """Returns frequencies times magnitude for every length of text up to well beyond all contexts."""
    scaling, exponent = config.build(BuildContext(1, 1, CONTEXT, 1)), torch.tensor([0.0, 0.5])
    tables = (scaling.frequencies(exponent, 1e4, 4, t) for t in range(1, 64))
    return [(scaling.magnitude, *table.tolist()) for table in tables]


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(one=CONFIGS, other=CONFIGS)
def test_resolved_config_computes_the_same(one: LongRopeScalingConfig, other: LongRopeScalingConfig) -> None:
    where = BuildContext(d_model=8, vocab_size=61, context=CONTEXT, n_layers=1)
    plain, alike = one.resolved(where), other.resolved(where)
    assert turns(plain) == turns(one)
    assert plain.resolved(where) == plain
    assert (plain == alike) == (turns(one) == turns(other))


def phi3(trained: int = TRAINED, **scaling: Any) -> ModelConfig:
    said = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG, **scaling}
    fields = {**SIZES, "rope_scaling": said, "original_max_position_embeddings": trained}
    return FAMILIES["phi3"].config(Fields(fields))


SAME = [{}, {"factor": 2.0}, {"attention_factor": GROWN}, {"factor": 9.0, "attention_factor": GROWN}]
OTHER: list[dict[str, Any]] = [
    *({"factor": 4.0}, {"attention_factor": 1.0}, {"short_factor": LONG}, {"long_factor": SHORT}),
    {"trained": 16, "attention_factor": GROWN},
]


@pytest.mark.parametrize("said", SAME + OTHER, ids=str)
def test_models(said: dict[str, Any]) -> None:
    """Fields that equal the default of a published config keep its logits, other values change them, at a length below
    the trained context and one above."""
    one, other = phi3(), phi3(**said)
    assert (one.resolved() == other.resolved()) == (said in SAME)
    tokens = torch.randint(61, (1, 20), generator=torch.Generator().manual_seed(0))
    models = [config.build(seed=0) for config in (one, other)]
    with torch.no_grad():
        equal = [torch.equal(*(model(tokens[:, :t]) for model in models)) for t in (10, 14, 20)]
    assert all(equal) == (said in SAME)


@pytest.mark.parametrize(
    ("trained", "code", "field"),
    [
        (0, "range", "original_max_position_embeddings"),
        (1, "unsupported", "rope_scaling.original_max_position_embeddings"),
    ],
)
def test_a_trained_context_of_one_has_no_magnitude(trained: int, code: Code, field: str) -> None:
    with refused(code=code, field=field):
        phi3(trained).resolved()
