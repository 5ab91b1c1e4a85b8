# Each target sets itself up: a virtual environment in .venv, made once, from Python 3.11 or newer.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNELS := .kernels/.installed
REFERENCES := .references/.installed
SECOND := .references/second/.installed
MEGATRON := .megatron/.installed
SITE := .docs/.installed
NEXT := .torch-next/.installed
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
TWO_AT_A_TIME := -m pytest -n 2 --dist loadfile --durations 0 --durations-min 1
OF_MEGATRON = $(if $(wildcard $(MEGATRON)),$(dir $(MEGATRON))bin,$(BIN))/python $(TWO_AT_A_TIME)
export OMP_NUM_THREADS ?= 2
# Large temporaries otherwise time the kernel's page faults on CPU.
export MALLOC_MMAP_THRESHOLD_ ?= 1073741824
export MALLOC_TRIM_THRESHOLD_ ?= 1073741824
# With it pytest rewrites every test file in each process, and each run of a test compiles the package.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: servers gguf install demo test test-rest test-megatron soak-megatron test-all kernels references megatron torch-next test-map soak faults soak-faults soak-flips reliability lint format families families-sweep walk bench growth operators gpu-table docs reference-pages assets clean help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "vlmpack needs Python 3.11 or newer, found $$($(PYTHON) --version); set PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch, transformers and the rest into $(VENV): some minutes, once"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@# On all cores, where pip takes one. It fails where a package has files for another Python.
	@$(BIN)/python -m compileall -qq -j 0 "$$($(BIN)/python $(PURELIB))" || true
	@touch $@

install: $(STAMP)  ## the package and all that it needs into .venv, which the other targets make as well

demo: $(STAMP)  ## finetune the tiny VLM on handwritten digits, packed, and show what it learned
	$(BIN)/python -m vlmpack finetune recipes/digits-demo.yaml

test: $(STAMP)  ## the quick tests, under 5 minutes on two idle cores
	$(BIN)/python $(TWO_AT_A_TIME)

test-rest: $(STAMP)  ## the tests that CI runs beside those of `make test`
	-$(MAKE) --no-print-directory kernels
	-$(MAKE) --no-print-directory references
	-$(MAKE) --no-print-directory megatron
	$(BIN)/python $(TWO_AT_A_TIME) -m 'slow and not soak and not megatron'
	$(MAKE) --no-print-directory test-megatron

test-megatron: $(STAMP)  ## the mcore engine's tests, on the newest megatron-core where `make megatron` installed it
	$(OF_MEGATRON) -m 'megatron and not soak'

test-all: lint test test-rest  ## linters and every test that CI runs

kernels: $(KERNELS)  ## Triton and kernels for CUDA that tests run on a CPU, into .kernels (0.7 GB)

# Beside the environment, never in it; setup.py of three would compile, or download what was compiled.
$(KERNELS): tests/support/kernel_packages.txt | $(STAMP)
	rm -rf $(@D)
	MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE \
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --no-build-isolation --target $(@D) -r $<
	@cp $< $@

references: $(REFERENCES) $(SECOND)  ## torchvision, bitsandbytes, transformers 4 and a server, which tests compare with on a CPU, into .references (270 MB)

$(REFERENCES): tests/support/reference_packages.txt tests/support/apart_packages.txt | $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --target $(@D) -r $<
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --target $(@D)/apart -r tests/support/apart_packages.txt
	@cp $< $@

# A Python of its own, whose transformers is an older one.
$(SECOND): tests/support/second_packages.txt $(REFERENCES) | $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m venv --without-pip $(@D)
	site=$$($(@D)/bin/python $(PURELIB)) && \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --target $$site -r $< && \
		echo "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" > $$site/beneath.pth
	@cp $< $@

megatron: $(MEGATRON)  ## the newest megatron-core and Triton into .megatron, whose Python has the rest from here (0.7 GB)

# A Python of its own, so that processes that tests start have it as well; it wants 3.12 and runs on 3.11.
$(MEGATRON): tests/support/megatron_packages.txt | $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m venv --without-pip $(@D)
	site=$$($(@D)/bin/python $(PURELIB)) && \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --ignore-requires-python --target $$site -r $< && \
		echo "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" > $$site/beneath.pth
	@cp $< $@

NEXT_TORCH ?= 2.14.1
torch-next: $(NEXT)  ## the quick tests with a newer torch (NEXT_TORCH=2.14.1), in an environment of its own (5 GB, for CUDA)
	$(dir $(NEXT))bin/python $(TWO_AT_A_TIME) tests --ignore tests/house --ignore tests/package

# Everything else as it is pinned. A build for CUDA runs on a CPU as well.
$(NEXT): pyproject.toml constraints.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	grep -v '^torch==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(@D)/constraints.txt 'torch==$(NEXT_TORCH)' -e '.[dev]'
	@touch $@

soak: $(STAMP)  ## repetitions and full products of cases, before a release: hours
	-$(MAKE) --no-print-directory kernels
	-$(MAKE) --no-print-directory references
	-$(MAKE) --no-print-directory megatron
	$(BIN)/python $(TWO_AT_A_TIME) -m 'soak and not megatron'
	$(MAKE) --no-print-directory soak-megatron

soak-megatron: $(STAMP)  ## what `make soak` runs of the mcore engine, on the newest megatron-core as `make test-megatron`
	$(OF_MEGATRON) -m 'soak and megatron'

FAULTS = PYTHONPATH=.:tests $(BIN)/python -m
faults: $(STAMP)  ## each row of the matrix of faults in a short form: 4 minutes on two idle cores
	$(FAULTS) faults.run $(if $(RESULTS),--results $(RESULTS))

soak-faults: MINUTES = 25
soak-faults: $(STAMP)  ## random deaths over engines and sources for MINUTES=25; it goes on where it stopped
	$(FAULTS) faults.soak --minutes $(MINUTES)

soak-flips: $(STAMP)  ## bits flipped in a single replica, and what finds them; half an hour
	$(FAULTS) faults.flips

reliability: $(STAMP)  ## write docs/reliability.md from what `make faults` and `make soak-faults` found
	$(FAULTS) faults.page

test-map: $(STAMP)  ## which test files are about which module; OF=packing.offline for some alone
	cd tests && ../$(BIN)/python -m support.which_tests $(OF)

lint: $(STAMP)  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

families: $(STAMP)  ## write the table of model families into docs/families.md
	$(BIN)/python -m vlmpack families --into docs/families.md

families-sweep: $(STAMP)  ## try every class of transformers anew (tools/sweep), then write the table
	$(BIN)/python -m tools.sweep.run
	$(BIN)/python -m vlmpack families --into docs/families.md

WHEEL = $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12
servers: $(STAMP)  ## read from wheels which names of exports vLLM and SGLang take, into tools/servers/facts.json (380 MB, removed)
	rm -rf .servers && mkdir .servers
	$(WHEEL) --platform manylinux_2_28_x86_64 --dest .servers vllm==0.33.0
	$(WHEEL) --platform manylinux_2_34_x86_64 --dest .servers sglang==0.5.23
	PYTHONPATH=.:tests $(BIN)/python -m support.exported_names .servers/exports
	$(BIN)/python -m tools.servers.run .servers/exports .servers/*.whl $(if $(CHECK),--check)
	$(BIN)/python -m tools.servers.page
	rm -rf .servers

GGUF := .servers/converter
gguf: $(STAMP)  ## convert every family's export with llama.cpp's published converter, into tools/servers/facts.json (80 MB, removed)
	rm -rf .servers && mkdir .servers
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
		--dest .servers llama-cpp-python==0.3.36
	$(BIN)/python -m venv --without-pip $(GGUF)
	site=$$($(GGUF)/bin/python $(PURELIB)) && \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --target $$site sentencepiece==0.2.3 && \
		echo "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" > $$site/beneath.pth
	PYTHONPATH=.:tests $(BIN)/python -m support.exported_names .servers/exports
	$(BIN)/python -m tools.servers.gguf_run .servers/exports .servers/*.tar.gz $(GGUF)/bin/python $(if $(CHECK),--check)
	$(BIN)/python -m tools.servers.page
	rm -rf .servers

operators: $(STAMP)  ## launches, bytes and predicted time of a GPU's step, on a machine without one
	$(BIN)/python benchmarks/operators.py

MINUTES ?= 8
gpu-table: $(STAMP)  ## on one GPU: kernels, steps, transformers' Trainer and peft in MINUTES=8; FAKE=1 runs the list on a CPU
	$(BIN)/python benchmarks/gpu_table.py --minutes $(MINUTES) $(if $(FAKE),--fake)

docs: $(SITE)  ## build docs/ as a site into .docs/site; a link that leads nowhere fails
	@# --quiet would hide warnings from --strict as well.
	NO_MKDOCS_2_WARNING=1 .docs/bin/mkdocs build --strict
	@echo "open .docs/site/index.html"

# A Python of its own, since pages need none of the package's dependencies.
$(SITE): pyproject.toml constraints.txt | $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $$($(BIN)/python -c \
		'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

reference-pages: $(STAMP)  ## write docs/reference from the recipe's schema and the commands
	$(BIN)/python tools/reference_pages.py

walk: $(STAMP)  ## write tools/walks.txt: the files and functions that a bin, a step, a checkpoint and a launch enter
	$(BIN)/python -m tools.walk

growth: $(STAMP)  ## launches and plans on 1, 10 and 100 million samples that are made up: 15 minutes, 5 GB of disk
	for millions in 1 10 100; do \
	  $(BIN)/python benchmarks/growth_ranks.py --samples $${millions}000000 --shards $$((millions * 500)) || exit 1; \
	done

bench: $(STAMP)  ## packed against padded, attention, collator
	$(BIN)/python benchmarks/run.py

assets: $(STAMP)  ## rebuild the tiny model and the digit shards
	$(BIN)/python -m assets.build

clean:  ## remove the environment and caches, keep runs
	rm -rf $(VENV) $(dir $(KERNELS)) $(dir $(REFERENCES)) $(dir $(MEGATRON)) $(dir $(SITE)) $(dir $(NEXT)) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache *.egg-info
