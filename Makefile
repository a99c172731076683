PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

# The whole pipeline on the embedded pocket model: from prompts to report.
demo: $(VENV)/.installed
	$(BIN)/twofold run pocket --out runs/pocket

test: $(VENV)/.installed lint
	$(BIN)/pytest -n 2

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf runs build dist
