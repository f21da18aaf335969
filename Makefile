# Everything needs only Python 3.11+ and this file: each target builds what it needs in .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Dozens of processes import the package in the tests: it is compiled once, even where the environment forbids it.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick test-pillow test-lowest browser lint format bench results docs dist audit container soak fuzz clean

help:
	@echo "make demo    classify real images and write demo-report/index.html and report.html"
	@echo "make test    run all tests            make quick   leave out the slow ones"
	@echo "make browser Chromium for the tests of the web page, by apt-get as root"
	@echo "make lint    ruff, mypy, layers        make format  let ruff rewrite"
	@echo "make test-pillow  the tests of views with two versions of Pillow"
	@echo "make test-lowest  the quick tests with the lowest versions that pyproject.toml allows, torch aside"
	@echo "make bench   speed and memory         make docs    build the documentation in site/"
	@echo "make results the page of results and the README's table, from the rows in results"
	@echo "make dist REPOSITORY=https://...      build and check the packages for an upload in dist/"
	@echo "make audit   known vulnerabilities    make container  build and run the Dockerfile on Debian's packages"
	@echo "make soak    30 minutes of good, bad and hostile requests    make fuzz  the readers of files, for longer"
	@echo "make setup   only the environment     make clean   remove it"

# The stamps depend on what decides the environment, so a second run installs nothing.
$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.embedded: $(VENV)/.base
	$(BIN)/usetta models pull embedded
	@touch $@

# OpenAI's own code is what the parity tests compare with. Its dependencies are left out: it would bring torchvision.
$(VENV)/.test: $(VENV)/.base
	$(PIP) install --constraint constraints.txt --editable '.[test,lint,hub]'
	$(PIP) install --no-deps openai-clip==1.0.1
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP) install --constraint constraints.txt --editable '.[docs]'
	@touch $@

setup: $(VENV)/.base $(VENV)/.embedded

demo: setup
	$(BIN)/usetta demo --out demo-report

test: setup $(VENV)/.test
	$(BIN)/python -m pytest -n auto --dist loadgroup

quick: setup $(VENV)/.test
	$(BIN)/python -m pytest -n auto --dist loadgroup -m "not slow"

# Views are the same bits with any Pillow that pyproject.toml allows: the lowest, which they were defined with, the newest.
test-pillow: $(VENV)/.test
	for version in 12.3.0 13.0.0; do \
		$(PIP) install --upgrade --target $(VENV)/pillow-$$version --no-deps pillow==$$version && \
		PYTHONPATH=$(VENV)/pillow-$$version $(BIN)/python -c "import PIL; assert PIL.__version__ == '$$version'" && \
		echo "Pillow $$version:" && \
		PYTHONPATH=$(VENV)/pillow-$$version $(BIN)/python -m pytest -q -n0 tests/views || exit 1; \
	done

$(VENV)/lowest/.done: pyproject.toml constraints.txt tools/lowest_versions.py $(VENV)/.embedded
	$(PYTHON) -m venv --clear $(VENV)/lowest
	$(PYTHON) tools/lowest_versions.py > $(VENV)/lowest/constraints.txt
	$(VENV)/lowest/bin/python -m pip --disable-pip-version-check --quiet install \
		--constraint constraints.txt --constraint $(VENV)/lowest/constraints.txt --editable '.[test,hub]'
	@touch $@

test-lowest: $(VENV)/lowest/.done
	$(VENV)/lowest/bin/python -m pytest -n auto --dist loadgroup -m "not slow"

# The tests of the web page take Debian's Chromium, and skip, saying so, where there is none.
browser:
	@if command -v chromium >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	else echo "no Chromium, and no way to install it here: the tests of the web page will be skipped"; fi

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup $(VENV)/.test
	$(BIN)/python -m benchmarks.use
	$(BIN)/python -m benchmarks.methods
	$(BIN)/python -m benchmarks.runner
	$(BIN)/python -m benchmarks.speed
	$(BIN)/python -m benchmarks.serve
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.launches
	$(BIN)/python -m benchmarks.views

results: $(VENV)/.test
	$(BIN)/python tools/results.py

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

# Known vulnerabilities of what is installed, from the package index. Some mirrors of it have no advisories, and pip-audit
# would find none: with --strict a package that cannot be audited is an error.
audit: $(VENV)/.test
	$(PYTHON) -m venv --clear $(VENV)/audit
	$(VENV)/audit/bin/python -m pip --disable-pip-version-check --quiet install pip-audit
	$(BIN)/python -m pip freeze --exclude-editable | grep '==' | sed 's/+cpu//' > $(VENV)/audit/installed.txt
	$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement $(VENV)/audit/installed.txt

fuzz: $(VENV)/.test
	USETTA_FUZZ=$${USETTA_FUZZ:-2000} $(BIN)/python -m pytest -q -n auto tests/test_fuzz.py

soak: setup $(VENV)/.test
	$(BIN)/python -m benchmarks.soak --minutes $${MINUTES:-30}

# Debian packages buildah and debootstrap, as root.
container:
	sh tools/container.sh

# A package index shows the README, so its links need the address of the repository.
dist: $(VENV)/.test
	@test -n "$(REPOSITORY)" || { echo "make dist REPOSITORY=https://... (where the repository is published)"; exit 2; }
	rm -rf dist
	USETTA_REPOSITORY="$(REPOSITORY)" $(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV) site demo-report dist
