from hypothesis import strategies as st

from tests.convert.cases.base import Case
from tests.convert.cases.t5 import FIELDS

CASE = Case("UMT5ForConditionalGeneration", st.fixed_dictionaries(FIELDS), quiet=("shared",), loud=0.8)
