# All targets use .venv, which is created on first use and updated when pyproject.toml or constraints.txt change.
#   make train      train CartPole-v1 and print its score
#   make test       lint, format check, strict types, and all tests with coverage, as in continuous integration
#   make lint       lint, format check and types only           make format    format all files
#   make bench      speed compared with other libraries, for docs/performance.md (half an hour); make guard: the regression guard only
#   make teams      memory and teams, for docs/memory_and_teams.md (an hour)
#   make learning   learning compared with Stable-Baselines3, 15 seeds each, for docs/results.md (hours)
#   make variants   settings compared seed by seed: forget bias, value scaling, JAX and NumPy (hours; an interrupted one continues)
#   make tasks      curricula, adaptation and laws found from data, for docs/curricula_measured.md (hours)
#   make extensions curiosity and exports, for docs/extensions.md        make collectors   processes and Ray, for docs/collectors_measured.md
#   make presets    the presets' scores over seeds, for docs/results.md (hours; an interrupted one continues)
#   make faults     faults that a run survives, for docs/reliability.md (half an hour); IDS="A1 C7" selects procedures, FACTOR=1 runs the full counts
#   make doctor     what the doctor finds on environments and seeds that did not set its thresholds, for docs/doctor.md (20 minutes)
#   make docs       update the config page and the notebook     make site      build the documentation as a site in build/site/html
#   make clean      remove .venv and the files left by tools

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
PYTHON ?= python3.11 python3 python3.12 python3.13 python
# Test processes: one more than the cores of CI, because some tests wait for env workers.
JOBS ?= 3
CODE := src tests faults examples benchmarks docs

.DEFAULT_GOAL := help
.PHONY: help train test browser lint format bench guard teams tasks extensions learning variants presets faults doctor collectors docs clean

help:
	@sed -n '/^$$/q; s/^# \{0,3\}//p' Makefile

# Use the first interpreter of $(PYTHON) that runs and is new enough.
$(VENV)/made:
	@for python in $(PYTHON); do \
		if $$python -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "creating $(VENV) with $$($$python --version)"; \
			$$python -m venv --clear $(VENV) && touch $@ && exit 0; \
			exit 1; \
		fi; \
	done; \
	echo "inchworm needs Python 3.11 or newer, and none of '$(PYTHON)' is. Install one, or run: make PYTHON=/path/to/python" >&2; exit 1

$(VENV)/installed: $(VENV)/made pyproject.toml constraints.txt
	@echo "installing inchworm into $(VENV) (under a minute the first time)"
	@$(PIP) -e .
	@touch $@

# torch first and separately: it is the only large download.
$(VENV)/installed-dev: $(VENV)/installed
	@echo "installing torch and the test dependencies"
	@$(PIP) torch
	@$(PIP) -e '.[dev,torch,jax,box2d,mujoco,atari,marl,video,bench]'
	@$(PIP) --no-deps gymnax && $(PIP) matplotlib seaborn  # gymnax 1.0.1 asks for gymnasium below 1.4
	@touch $@

train: $(VENV)/installed
	@$(BIN)/inchworm train CartPole-v1
	@echo "(to put the inchworm command on your path, run: . $(BIN)/activate)"

# Replay pages are tested in a real browser. Without one, Debian's chromium is installed if possible; otherwise that test is skipped with a message.
BROWSER := chromium chromium-browser google-chrome
browser:
	@for name in $(BROWSER); do command -v $$name > /dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		echo "installing chromium for the test of replay pages"; \
		(apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium) > /dev/null 2>&1 \
			|| echo "chromium could not be installed; the browser test is skipped"; \
	else echo "chromium not found; the browser test is skipped"; fi

lint: $(VENV)/installed-dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy --strict

test: lint browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --cov --cov-report=term:skip-covered --cov-fail-under=97

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

# The peers of the JAX backend, each in an environment of its own (benchmarks/jax_peers.py says how); without them it runs alone.
JAX_PEERS ?=
# Each script stores its measurements and updates its part of the page, so each can be run on its own.
bench: $(VENV)/installed-dev
	$(BIN)/python benchmarks/compare.py
	$(BIN)/python benchmarks/profiles.py
	$(BIN)/python benchmarks/solve.py
	$(BIN)/python benchmarks/jax_native.py $(JAX_PEERS)
	$(BIN)/python benchmarks/jax_solve.py $(JAX_PEERS)
	$(BIN)/python benchmarks/step_costs.py
	$(BIN)/python benchmarks/images.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/steady.py
	$(BIN)/python benchmarks/tracking_cost.py
	$(BIN)/python benchmarks/sweep.py
	$(BIN)/python benchmarks/loop_cost.py
	$(BIN)/python benchmarks/report_page.py

guard: $(VENV)/installed-dev
	$(BIN)/python benchmarks/guard.py

teams: $(VENV)/installed-dev
	$(BIN)/python benchmarks/corridor.py
	$(BIN)/python benchmarks/recurrent.py
	$(BIN)/python benchmarks/skirmish.py
	$(BIN)/python benchmarks/combat.py
	$(BIN)/python benchmarks/spread.py
	$(BIN)/python benchmarks/connect_four.py

extensions: $(VENV)/installed-dev
	$(BIN)/python benchmarks/curiosity.py
	$(BIN)/python benchmarks/exports.py

tasks: $(VENV)/installed-dev
	$(BIN)/python benchmarks/maze.py
	$(BIN)/python benchmarks/meta.py
	$(BIN)/python benchmarks/symbolic.py

learning: $(VENV)/installed-dev
	$(BIN)/python benchmarks/learning.py

variants: $(VENV)/installed-dev
	$(BIN)/python benchmarks/forget_bias.py
	$(BIN)/python benchmarks/value_scaling.py
	$(BIN)/python benchmarks/jax_learning.py
	$(BIN)/python benchmarks/off_policy.py

presets: $(VENV)/installed-dev
	$(BIN)/python benchmarks/presets.py
	$(BIN)/python benchmarks/learning.py --report

IDS ?=
FACTOR ?=
faults: $(VENV)/installed-dev
	PYTHONPATH=.:tests $(BIN)/python -m faults $(IDS) $(if $(FACTOR),--factor $(FACTOR))

doctor: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n $(JOBS) -m by_hand tests/analysis/test_doctor.py
	$(BIN)/python benchmarks/doctor.py

RLLIB ?=
RSL_RL ?=
collectors: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m by_hand tests/collect/test_ray_job.py tests/train/test_ray_train.py
	$(BIN)/python benchmarks/async_collection.py
	$(BIN)/python benchmarks/ray_scaling.py $(if $(RLLIB),--rllib-python $(RLLIB))
	$(BIN)/python benchmarks/device_env.py $(if $(RSL_RL),--rsl-rl-python $(RSL_RL))

docs: $(VENV)/installed-dev
	$(BIN)/python docs/make_config_table.py
	$(BIN)/python docs/make_notebook.py

.PHONY: site
site: $(VENV)/installed-dev
	$(BIN)/python docs/make_site.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov dist build MUJOCO_LOG.TXT
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
