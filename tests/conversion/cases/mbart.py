from hypothesis import strategies as st

from tests.conversion.cases.bart import FIELDS, QUIET
from tests.conversion.cases.base import Case

CASE = Case("MBartForConditionalGeneration", st.fixed_dictionaries(FIELDS), quiet=QUIET, loud=1.0, first_token=3)
