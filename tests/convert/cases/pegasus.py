from hypothesis import strategies as st

from tests.convert.cases.bart import FIELDS, QUIET
from tests.convert.cases.base import Case

CASE = Case("PegasusForConditionalGeneration", st.fixed_dictionaries(FIELDS), quiet=QUIET, loud=1.0, first_token=3)
