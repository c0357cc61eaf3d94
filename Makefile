# Everything happens in .venv, which is made when it is first needed and renewed when pyproject.toml or constraints.txt change.
#   make train      train CartPole-v1 and print its score
#   make test       lint, format check, strict types, all tests with coverage: what continuous integration runs
#   make lint       lint, format check and types alone          make format    put every file into shape
#   make bench      speed beside its peers, for docs/performance.md (half an hour); make guard: the regression guard alone
#   make teams      memory and teams, for docs/memory_and_teams.md (an hour)
#   make learning   scores beside Stable-Baselines3, 5 seeds each, for docs/results.md (hours)
#   make faults     what a run survives, for docs/reliability.md (half an hour); IDS="A1 C7" some of it, FACTOR=1 the full counts
#   make docs       renew the generated pages                   make clean     remove .venv and everything that tools left

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
PYTHON ?= python3.11 python3 python3.12 python3.13 python
JOBS ?= 2
CODE := src tests faults examples benchmarks docs

.DEFAULT_GOAL := help
.PHONY: help train test browser lint format bench guard teams learning faults docs clean

help:
	@sed -n 's/^# \{0,3\}//p' Makefile | head -9

# The first interpreter of $(PYTHON) that runs and is new enough; a name alone says neither.
$(VENV)/made:
	@for python in $(PYTHON); do \
		if $$python -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "making $(VENV) with $$($$python --version)"; \
			$$python -m venv --clear $(VENV) && touch $@ && exit 0; \
			exit 1; \
		fi; \
	done; \
	echo "inchworm needs Python 3.11 or newer; none of '$(PYTHON)' is. Install one, or type: make PYTHON=/path/to/python" >&2; exit 1

# torch comes first and alone: it is the one big download, and everything else is small once it is there.
$(VENV)/installed: $(VENV)/made pyproject.toml constraints.txt
	@echo "installing inchworm into $(VENV) (the first time takes a minute or two)"
	@$(PIP) torch
	@$(PIP) -e .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "installing what the tests need"
	@$(PIP) -e '.[dev,box2d,mujoco,atari,marl,bench]'
	@touch $@

train: $(VENV)/installed
	@$(BIN)/inchworm train CartPole-v1
	@echo "(the commands are in $(BIN); to type them as they stand: . $(BIN)/activate)"

# The page of a replay is tested in a real browser. Where there is none, Debian's is installed if we may; else that test is skipped, and says so.
BROWSER := chromium chromium-browser google-chrome
browser:
	@for name in $(BROWSER); do command -v $$name > /dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		echo "installing chromium, in which the page of a replay is tested"; \
		(apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium) > /dev/null 2>&1 \
			|| echo "chromium could not be installed: the browser's test is skipped"; \
	else echo "there is no chromium here: the browser's test is skipped"; fi

lint: $(VENV)/installed-dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy --strict

test: lint browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --cov --cov-report=term:skip-covered --cov-fail-under=90

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

# Each script keeps what it measured and renews the page, so that any of them can be run again alone.
bench: $(VENV)/installed-dev
	$(BIN)/python benchmarks/compare.py
	$(BIN)/python benchmarks/profiles.py
	$(BIN)/python benchmarks/solve.py
	$(BIN)/python benchmarks/step_costs.py
	$(BIN)/python benchmarks/images.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/steady.py

guard: $(VENV)/installed-dev
	$(BIN)/python benchmarks/guard.py

teams: $(VENV)/installed-dev
	$(BIN)/python benchmarks/corridor.py
	$(BIN)/python benchmarks/recurrent.py
	$(BIN)/python benchmarks/skirmish.py
	$(BIN)/python benchmarks/combat.py
	$(BIN)/python benchmarks/spread.py

learning: $(VENV)/installed-dev
	$(BIN)/python benchmarks/learning.py

IDS ?=
FACTOR ?=
faults: $(VENV)/installed-dev
	PYTHONPATH=.:tests $(BIN)/python -m faults $(IDS) $(if $(FACTOR),--factor $(FACTOR))

docs: $(VENV)/installed-dev
	$(BIN)/python docs/make_config_table.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov dist build MUJOCO_LOG.TXT
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
