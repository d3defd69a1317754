from hypothesis import strategies as st

from tests.conversion.cases.base import Case
from tests.conversion.cases.t5 import FIELDS

CASE = Case("MT5ForConditionalGeneration", st.fixed_dictionaries(FIELDS), quiet=("shared",), loud=0.8)
