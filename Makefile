# Everything that continuous integration runs, as targets. PYTHON names the interpreter.
PYTHON ?= python

.PHONY: help test thorough sanitize sanitize-tests wheel check format pages notebook
help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 18

test:  ## the quick tests
	$(PYTHON) -m pytest

thorough:  ## the tests that take long
	$(PYTHON) -m pytest -m thorough

sanitize:  ## the native code under sanitizers
	$(PYTHON) scripts/sanitize.py

sanitize-tests:  ## the tests of the native code under sanitizers, without the compilers' warnings and the threads
	$(PYTHON) scripts/sanitize.py --tests

wheel:  ## build the wheel (or take WHEEL), and decode from it where there is no compiler
	$(PYTHON) scripts/check_wheel.py $(if $(WHEEL),--wheel $(WHEEL),--keep dist)

check:  ## every gate but the tests: style, types, documentation
	PYTHON=$(PYTHON) scripts/check

format:  ## rewrite files as ruff wants them
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

pages:  ## generated pages, and the figures of README
	for name in benchmarks comparison applications reproduction readme settings controller; do $(PYTHON) research/$${name}_page.py; done

notebook:  ## run examples/tour.ipynb and keep its outputs
	$(PYTHON) research/notebook.py examples/tour.ipynb
