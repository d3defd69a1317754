"""Thresholds for judging runs, shared by training, diagnosis (`glassformer why`), verdicts and pages."""

DIVERGENCE_WINDOW = 50
"""Number of steps over which the loss is averaged to detect divergence"""
DIVERGENCE_NATS = 1.0
"""Rise of the mean loss over `DIVERGENCE_WINDOW` steps above the lowest earlier one that counts as divergence"""
COLLAPSED_LOGIT = 1e3
"""Largest logit above which a head's attention counts as collapsed if its entropy is below `COLLAPSED_ENTROPY` (Zhai et
al. 2023, 2303.06296; Wortsman et al. 2023, 2309.14322)"""
COLLAPSED_ENTROPY = 0.05
"""Entropy of attention, as a fraction of a uniform distribution's, below which a head may count as collapsed"""
ALIKE_COSINE = 0.95
"""Mean cosine between tokens above which they count as alike (Dong et al. 2021, 2103.03404)"""
ALIKE_RANK = 0.05
"""Effective rank of tokens, as a fraction of the largest possible one, below which they count as alike"""

CONFIDENCE = 0.95
"""Confidence level of the intervals of a comparison, or of a claim"""
EQUIVALENT = 0.005
"""Relative difference of two losses, as a fraction of the first, below which two arms are equivalent"""
FROM_CONTEXT = 0.1
"""Saving from context, as a fraction of the entropy of token frequencies, below which a model has barely learned:
counts of byte pairs, the simplest use of context, save 19 % of it on python-docs and 22 % on python-source"""
WORTH_SAYING = 0.02
"""Relative difference up to which sizes and budgets of two arms are called equal"""
