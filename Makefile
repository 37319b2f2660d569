# The project's commands: `make help` lists them.
#
# Each target first makes .venv and installs what it needs, pinned by constraints.txt. Stamp files
# in .venv remember that, so a second run installs nothing until pyproject.toml or constraints.txt
# changes.

.DEFAULT_GOAL := help
.PHONY: help chat plot test test-gpu soak lint format bench clean

VENV := .venv
BIN := $(VENV)/bin
PYTHONS := python3.13 python3.12 python3.11 python3
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# PROMPT is text for the model and nothing else. `value` takes it unexpanded, the program reads it
# from its environment, and so neither make nor a shell ever looks inside it. Only a PROMPT given
# to make on its command line counts; shells have a variable of that name too.
unexport PROMPT
ifeq ($(origin PROMPT),command line)
export INTERLACE_PROMPT := $(value PROMPT)
CHAT_FLAGS := --prompt-env INTERLACE_PROMPT
endif

help:
	@echo 'make chat PROMPT="..."   ask one question and print the answer'
	@echo 'make chat                talk with the model; /help lists its commands, /quit leaves'
	@echo 'make plot                install what pictures need, for interlace trace --png'
	@echo 'make test                run the tests'
	@echo 'make test-gpu            run only the tests that need an NVIDIA GPU'
	@echo 'make soak                run tests of the store that look for what is rare, for some minutes'
	@echo 'make lint                check style and types, change nothing'
	@echo 'make format              put the code in the style that lint asks for'
	@echo 'make bench               measure decoding and prefill against transformers'
	@echo 'make clean               remove .venv, caches and build results'
	@echo
	@echo 'Everything is installed into .venv on first use, which takes some minutes.'

# exec: without a shell in between, Ctrl-C reaches the chat and not a shell that would leave first.
chat: $(VENV)/.run-installed
	@exec $(BIN)/interlace chat $(CHAT_FLAGS)

plot: $(VENV)/.plot-installed

# Bare pytest: `python -m pytest` would put the root on sys.path and load every module twice.
# Triton decides at import whether it interprets its kernels, so those have a process of their own.
# Two processes at a time, whatever the machine: a file's tests stay together, with what they share.
test: $(VENV)/.dev-installed
	@$(BIN)/pytest -W error -n 2 --dist loadfile --ignore=tests/kernels
	@TRITON_INTERPRET=1 $(BIN)/pytest -W error -n 2 --dist loadfile tests/kernels

test-gpu: $(VENV)/.dev-installed
	@$(BIN)/pytest -W error -m gpu

# The same tests as in `make test`, more often: killed writers, shared directories, random engines.
soak: $(VENV)/.dev-installed
	@$(BIN)/pytest -W error -n 2 --dist load --ignore=tests/kernels -m soak --soak --timeout 3600

lint: $(VENV)/.dev-installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict -p interlace
	@$(BIN)/mypy --strict tests

format: $(VENV)/.dev-installed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/.dev-installed
	@$(BIN)/interlace bench decode --vs transformers
	@$(BIN)/interlace bench prefill --vs transformers

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
	find . -name '*.egg-info' -prune -exec rm -rf {} +

# The first interpreter that runs, is new enough and has the modules that `venv` needs.
$(VENV)/.made:
	@for python in $(PYTHONS); do \
	    if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	        >/dev/null 2>&1; then \
	        echo "Making $(VENV) with `$$python --version`."; \
	        $$python -m venv $(VENV) && touch $@; exit; \
	    fi; \
	done; \
	echo 'Interlace needs Python 3.11 or newer with the venv module, and found none among:' >&2; \
	echo '  $(PYTHONS)' >&2; \
	echo 'Install one (on Debian or Ubuntu: apt install python3 python3-venv).' >&2; \
	exit 1

$(VENV)/.run-installed: $(VENV)/.made pyproject.toml constraints.txt
	@echo 'Installing Interlace and PyTorch into $(VENV). This takes a minute, or some on a slow line.'
	@$(PIP) -e .
	@touch $@

$(VENV)/.plot-installed: $(VENV)/.made pyproject.toml constraints.txt
	@echo 'Installing Interlace, PyTorch and matplotlib into $(VENV). This takes a minute, or some.'
	@$(PIP) -e '.[plot]'
	@touch $(VENV)/.run-installed $@

$(VENV)/.dev-installed: $(VENV)/.made pyproject.toml constraints.txt
	@echo 'Installing Interlace, PyTorch and the test tools into $(VENV). This takes a minute or some.'
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.run-installed $@
