# Needs Python 3.11 or newer, pip and make; everything else is installed into .venv.
#   make PYTHON=python3.12 …    uses another Python
#   make VENV=PATH …            uses another environment
# PIP_CACHE_DIR and pip's other variables are honoured as usual.

PYTHON ?= $(shell command -v python3.11 || command -v python3 || command -v python)
VENV   ?= .venv
# versions that are known to work together; `make CONSTRAINTS= …` takes the newest of everything
CONSTRAINTS ?= $(wildcard .ci/constraints.txt)
SHELL  := bash

BIN := $(if $(filter /%,$(VENV)),$(VENV),$(CURDIR)/$(VENV))/bin
export PATH := $(BIN):$(PATH)
export PYTHONUTF8 := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

META    := settings.ini setup.py pyproject.toml
NBS     := $(shell find nbs -name '*.ipynb' -not -path '*/.*')
SITE    := $(wildcard nbs/_site/*.*)
REPORTS := $(shell find reports -type f 2>/dev/null)
# every grid but the searches for settings, which are not of the paper: `bicl_run search` does one
GRIDS   := $(filter-out search%,$(basename $(notdir $(wildcard nbs/experiments/grids/*.yaml))))
RUN     := $(VENV)/.installed
DEV     := $(VENV)/.installed-dev
BENCH   := $(VENV)/.installed-bench

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help reproduce test paper report docs lab bench chaos again versions readme export outputs clean distclean

help: ## list the targets (this list)
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

reproduce: $(RUN) ## the paper in two minutes, once installed: every method on MNIST permutations → reports/quick/
	@bicl_run quick && bicl_report quick
	@echo 'The report: reports/quick/index.md'

test: $(DEV) ## all tests: notebooks, tests/, documentation
	@OMP_NUM_THREADS=1 MPLBACKEND=agg python -m pytest -n auto --maxprocesses 4 --dist worksteal $(PYTEST)

paper: $(RUN) ## every experiment of the paper (hours; goes on where it stopped), then the report
	@bad=0; for g in $(GRIDS); do bicl_run $$g || bad=1; done; $(MAKE) report || bad=1; exit $$bad

# claims comes last, and speed after table1: they read what other pages have written; some pages have no grid
PAGES := explained strict listing rotations180 split cifar10 classes search generative ablations one outputs gpu faults reproducibility table1 speed claims
report: $(RUN) ## pages, tables and figures in nbs/pages/ and reports/ from the runs that are finished
	@bad=0; for g in $(PAGES); do \
	    case $$g in classes|speed|gpu|faults|reproducibility|claims) ;; *) test -d reports/$$g/runs || continue;; esac; \
	    bicl_report $$g || bad=1; done; exit $$bad

docs: _docs/index.html ## the documentation site → _docs/
	@echo 'The site is in _docs/. To read it with search: python3 -m http.server -d _docs'

lab: $(RUN) ## JupyterLab on nbs/
	@jupyter lab --notebook-dir nbs

bench: build/benchmark.ipynb ## speed against other libraries → reports/benchmark.csv (anew after make clean)

chaos: $(DEV) ## kill, stop and fill up everything for half an hour → reports/chaos.csv and its page
	@python tests/chaos.py $(CHAOS) && bicl_report faults

again: $(DEV) ## a quarter of Table 1 anew, twice, from fresh clones: the same bits? → reports/again.csv
	@python tests/again.py $(AGAIN); bad=$$?; bicl_report reproducibility; exit $$bad

# an environment of 5 GB for each: .venv-3.12, .venv-3.13, .venv-newest, .venv-lowest
QUICK := tests/test_house.py tests/test_data.py tests/test_streams.py tests/test_resume.py \
         tests/test_faults.py tests/test_properties.py tests/test_machines.py
versions: ## the quick tests elsewhere: make versions PYTHONS="3.12 3.13 newest lowest"
	@bad=0; for v in $(or $(PYTHONS),3.12 3.13); do what="PYTHON=$(PYTHON)"; case $$v in \
	    newest) what="$$what CONSTRAINTS=";; \
	    lowest) mkdir -p build; python .ci/constraints.py --lowest > build/lowest.txt; \
	        what="$$what CONSTRAINTS=build/lowest.txt";; \
	    *) what=; for p in python$$v ~/.pyenv/versions/$$v*/bin/python; do \
	        if $$p --version >/dev/null 2>&1; then what="PYTHON=$$p"; break; fi; done;; esac; \
	    [ -n "$$what" ] || { echo "make versions: no Python $$v is installed here" >&2; bad=1; continue; }; \
	    $(MAKE) VENV=.venv-$$v $$what test PYTEST='$(QUICK)' || bad=1; done; exit $$bad

readme: README.md ## README.md from nbs/index.ipynb, with the numbers that are in reports/

export: $(DEV) ## bicl/ from the notebooks, and the notebooks cleaned
	@nbdev_export && nbdev_clean

outputs: $(DEV) ## fresh outputs for notebooks: make outputs NB=nbs/03_memory.ipynb
	@python nbs/_site/build.py execute $(NB)

clean: ## remove what was built, but neither the environment nor any result
	@rm -rf _docs build .pytest_cache .ruff_cache
	@find bicl tests nbs -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove the environment too
	@rm -rf .venv bicl.egg-info

README.md: nbs/index.ipynb nbs/_site/build.py $(REPORTS) | $(DEV)
	@python nbs/_site/build.py readme && touch $@

_docs/index.html: $(NBS) $(SITE) $(REPORTS) $(wildcard bicl/*.py) | $(DEV)
	@python nbs/_site/build.py docs

# The notebook that papermill leaves is the sign that this machine has measured this code.
build/benchmark.ipynb: nbs/experiments/benchmark.ipynb $(wildcard bicl/*.py) | $(BENCH)
	@mkdir -p build
	@papermill --cwd nbs/experiments $< $@

# One environment, filled in steps. Debian may lack ensurepip: then pip puts itself into it.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo 'Python 3.11 or newer is needed: make PYTHON=python3.12 …' >&2; exit 1; }
	@echo "Creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	    $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $(VENV)/bin/python install --quiet pip; }

$(RUN): $(META) $(CONSTRAINTS) | $(VENV)/bin/python
	@$(call install,.)
$(DEV): $(META) | $(RUN)
	@$(call install,.[dev])
$(BENCH): $(META) | $(RUN)
	@$(call install,.[bench])

# pip prints a line per package: on a terminal they are written over each other.
define install
set -eo pipefail; \
echo "Installing $(1) into $(VENV) (the first time some minutes: torch is about 5 GB)"; \
python -m pip install --progress-bar off $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '$(1)' | awk -v tty=$$(test -t 2 && echo 1 || echo 0) \
    '/^ *(Collecting|Downloading|Installing)/ {n++; \
        if (tty) {printf "\r\033[K%5d  %.70s", n, $$0; fflush()}} \
     END {if (tty) printf "\r\033[K"}'; \
touch $@; echo "Installed."
endef
