"""Tests of published claims: a file for each subject, which ends with the list `CLAIMS`; an entry adds a claim.

claim       a claim, a measurement, and the rule that derives a verdict
bench       the place of a measurement: folder, text, seeds, comparisons
contrast    measurements of trained models by their losses
timing      measurements of two pieces of work by their time
stored      results as files, with machine and date
catalogue   the list of all claims
rows        claims with what is stored of each
measuring   claims measured, stored and listed
"""

from glassformer.laboratory.evidence.catalogue import known, named
from glassformer.laboratory.evidence.measuring import Claims, claims
from glassformer.laboratory.evidence.rows import ClaimRow, overview

__all__ = ["ClaimRow", "Claims", "claims", "known", "named", "overview"]
