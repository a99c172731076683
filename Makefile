PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

TRANSFORMERS := 5.17 5.18 5.19 5.20 5.21

.PHONY: demo test gpu-test gpu-bench interpret lint interop interop-transformers llm-compressor clean

# The whole pipeline on the embedded pocket model: from prompts to report.
demo: $(VENV)/.installed
	$(BIN)/twofold run pocket --out runs/pocket

test: $(VENV)/.installed lint
	$(BIN)/pytest -n 2

# The files of all tests that need a GPU, whole (some tests take a GPU where there is one), in the environment of
# $(PYTHON), which has a torch for it, pytest, and twofold[gpu]'s needs.
KERNEL_TESTS = $(shell grep -lE 'mark\.(gpu|triton)' -r tests --include='test_*.py')
gpu-test:
	$(PYTHON) -m pytest $(KERNEL_TESTS)

# The engine at Qwen3.5-4B's shape; the same command goes on where it was stopped.
gpu-bench:
	$(PYTHON) -m twofold.cli bench --shape qwen3.5-4b --accept-length 5.03 --json build/engine_4b.json

# A GPU's kernels without one: in Triton's interpreter against their references, and compiled for sm_80, sm_86 and sm_90.
interpret: $(VENV)/.installed $(VENV)-interpret/.installed
	TRITON_INTERPRET=1 $(VENV)-interpret/bin/python -m pytest -n 2 -m triton $(KERNEL_TESTS)
	$(VENV)-interpret/bin/python -m pytest -n 2 tests/ops/decode/test_compiles.py

$(VENV)-interpret/.installed: $(VENV)/.installed scripts/interpreter_environment.sh
	PYTHON=$(PYTHON) scripts/interpreter_environment.sh $(VENV)-interpret $(VENV)

# vLLM, in an environment of its own, answers as Twofold does: exports of the pocket model, token for token.
interop: $(VENV)/.installed $(VENV)-interop/.installed
	$(BIN)/python scripts/interop/compare.py --python $(VENV)-interop/bin/python --json build/interop_cpu.json

$(VENV)-interop/.installed: scripts/interop/environment.sh scripts/interop/torch_for_cpu.sh scripts/interop/requirements.txt
	PYTHON=$(PYTHON) scripts/interop/environment.sh $(VENV)-interop

# Every transformers that Twofold allows, each in an environment of its own, gives Twofold's logits.
interop-transformers: $(VENV)/.installed $(TRANSFORMERS:%=$(VENV)-transformers-%/.installed)
	$(BIN)/python scripts/interop/compare_transformers.py --json build/interop_transformers.json \
		$(TRANSFORMERS:%=--python $(VENV)-transformers-%/bin/python)

$(VENV)-transformers-%/.installed: $(VENV)/.installed scripts/interop/transformers_environment.sh
	PYTHON=$(PYTHON) scripts/interop/transformers_environment.sh $(VENV)-transformers-$* $* $(VENV)

# A checkpoint of llm-compressor's GPTQ, made in an environment of its own, is where distillation starts; it answers in
# vLLM as in Twofold.
llm-compressor: $(VENV)/.installed $(VENV)-llmcompressor/.installed $(VENV)-interop/.installed
	$(VENV)-llmcompressor/bin/python scripts/interop/llm_compressor.py build/llm-compressor
	$(BIN)/twofold run scripts/interop/llm_compressor.toml --out runs/llm-compressor --until pack
	$(BIN)/python scripts/interop/compare.py --python $(VENV)-interop/bin/python \
		--target build/llm-compressor --json build/interop_llm_compressor.json

$(VENV)-llmcompressor/.installed: scripts/interop/requirements-llmcompressor.txt
	$(PYTHON) -m venv $(VENV)-llmcompressor
	scripts/interop/torch_for_cpu.sh $(VENV)-llmcompressor
	$(VENV)-llmcompressor/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

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
