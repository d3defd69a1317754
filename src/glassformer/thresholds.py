"""Numbers by which runs are judged: training, diagnosis (`glassformer why`), verdicts and pages use the same ones."""

DIVERGENCE_WINDOW = 50
"""Steps over which the loss is averaged to see whether it diverged."""
DIVERGENCE_NATS = 1.0
"""The loss has diverged where its mean over `DIVERGENCE_WINDOW` steps is so much above the lowest such mean before."""
COLLAPSED_LOGIT = 1e3
"""A head's attention has collapsed where its largest logit is above this and its entropy below `COLLAPSED_ENTROPY`
(Zhai et al. 2023, 2303.06296; Wortsman et al. 2023, 2309.14322)."""
COLLAPSED_ENTROPY = 0.05
"""Entropy of attention over that of an even spread."""
ALIKE_COSINE = 0.95
"""Tokens are alike where the mean cosine between them is above this (Dong et al. 2021, 2103.03404)."""
ALIKE_RANK = 0.05
"""Tokens are alike where their effective rank, as a share of the largest possible, is below this."""

CONFIDENCE = 0.95
"""Probability with which the intervals of a comparison, or of a claim, hold."""
EQUIVALENT = 0.005
"""Two arms are equivalent if their losses differ by less than this share of the first one's."""
FROM_CONTEXT = 0.1
"""A model has barely learned if context saves less than this share of the entropy of token frequencies: counts of pairs
of bytes, the least that uses context, save 19 % of it on python-docs and 22 % on python-source."""
WORTH_SAYING = 0.02
"""Sizes and budgets of two arms are called equal up to this share."""
