# What a person types here. `make` alone lists it.

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m
PROMPT ?= Why is the sky blue?
# What is run in parallel, and what else pytest is told: make test PYTEST="-x -k scheduler"
PYTEST ?= -n auto --dist worksteal --maxprocesses 4
export VENV PROMPT

BUILD_INPUT := pyproject.toml constraints.txt CMakeLists.txt tools/install.py $(shell find csrc -type f)

.PHONY: help run docs pages test test-isa test-weights test-slow test-peers test-clients test-net test-ray soak bench lint clang arm sanitize sanitize-short format native clean

help:
	@echo "make run            install into $(VENV), fetch $(MODEL), answer a prompt (MODEL=..., PROMPT=...)"
	@echo "                    $(VENV)/bin/headrace is then the command, with serve, chat and all others"
	@echo "make docs           the documentation site in build/docs, without a network; warnings are errors"
	@echo "make pages          write the parts of the pages that are generated from the code"
	@echo "make test           the tests, ten to fifteen minutes on two cores; those without their model or data say so"
	@echo "make test-isa       tests of kernels, beams, engine and random loads on every instruction set this CPU has"
	@echo "make test-weights   only the tests on real weights"
	@echo "make test-slow      the long tests, of which make test runs short versions"
	@echo "make soak           random loads of the engine (MIXED_LOADS=first:last), each answer compared with the request alone;"
	@echo "                    then the server under mixed traffic and attacks, twice 20 minutes (SOAK_SECONDS=... for another time)"
	@echo "make test-peers     comparisons with other engines (installs them)"
	@echo "make test-clients   other clients of the OpenAI protocol against the server (installs them below build/clients)"
	@echo "make test-net       links between hosts, as network namespaces (root): links that go down for 5 s"
	@echo "make test-ray       batches and deployments on Ray (installs it below build/ray; root)"
	@echo "make clang          the C++ core and its test programs built by clang++, and run: 190 s of CPU, half that on two cores"
	@echo "make arm            the C++ test programs built for 64-bit Arm and run under qemu-user, as $(ARM_CPUS)"
	@echo "make sanitize       the C++ test programs under the address, undefined-behaviour and thread sanitizers"
	@echo "make sanitize-short the same with the plain kernels alone: 230 s of CPU, two minutes on two cores"
	@echo "make bench          tokens per second, load time and memory of $(MODEL) here, and the kernels' share of what this machine can"
	@echo "                    do; it fails where one is below 0.75 of what benchmarks/linears.json has for this processor"
	@echo "make mutants        mutation testing of the engine: are wrong lines noticed? (MODULES=... SAMPLE=100 SEED=1 JOBS=2)"
	@echo "make lint           ruff, mypy, clang-format; make format puts right what they can"
	@echo "make native         build the C++ core, showing the compiler's output"
	@echo "make clean          remove what was built (the environment, not the models)"

run: $(VENV)/.run
	@$(VENV)/bin/headrace run $(MODEL) "$$PROMPT" </dev/null  # a pipe that make was given would join the prompt

docs: $(VENV)/.dev
	$(VENV)/bin/python -m sphinx -W --keep-going -n -q -b html docs build/docs
	@echo "build/docs/index.html"

pages: $(VENV)/.dev
	$(VENV)/bin/python -m tests.pages

# Hundreds of processes are started: what they import is compiled once, also where the environment says otherwise.
test: $(VENV)/.dev
	PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest $(PYTEST)

test-isa: $(VENV)/.dev
	$(VENV)/bin/python tools/test_isa.py $(PYTEST)

test-weights: $(VENV)/.dev
	$(VENV)/bin/python -m pytest $(PYTEST) -m "weights and not slow and not peers"

test-slow: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -m slow

soak: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -s -m slow tests/property/test_mixed_loads.py tests/server/test_soak.py

test-peers: $(VENV)/.peers
	$(VENV)/bin/python -m pytest -m peers

# Hosts as network namespaces, which need root.
test-net: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -s -m net tests/net

# Installs Ray (about 740 MB) into an environment of its own; its sockets are in a network namespace, which needs root.
test-ray: $(VENV)/.dev
	$(VENV)/bin/python tools/install_ray.py
	unshare --net sh -c "ip link set lo up && exec build/ray/bin/python -m pytest -s -p no:cacheprovider -m ray tests/ray"

# A client that cannot be installed is skipped, with the reason.
test-clients: $(VENV)/.dev
	-$(VENV)/bin/python tools/install_clients.py
	$(VENV)/bin/python -m pytest -m clients -rP tests/clients

# $(call programs,FOLDER,OPTIONS): the C++ test programs alone, built in build/FOLDER, and run. Without address
# randomisation (setarch): older thread sanitizers cannot do with much of it.
define programs
	$(call build_programs,$(1),$(2))
	@setarch "$$(uname -m)" -R $(VENV)/bin/ctest --test-dir build/$(1) --output-on-failure
endef

define build_programs
	@echo "== $(1)"
	@$(VENV)/bin/cmake -S . -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM="$$(realpath $(VENV))/bin/ninja" \
		-DHEADRACE_MODULE=OFF -DCMAKE_BUILD_TYPE=Release $(2) >/dev/null
	@$(VENV)/bin/cmake --build build/$(1) --target programs
endef

clang: $(VENV)/.dev
	$(call programs,clang,-DCMAKE_CXX_COMPILER=clang++)

# Cross-built; each CPU runs the kernels it has: plain, with the dot product, with that of unsigned by signed bytes.
ARM_CPUS ?= cortex-a72 neoverse-n1 max
ARM_TOOLS := aarch64-linux-gnu-g++ qemu-aarch64

arm: $(VENV)/.dev
	@for tool in $(ARM_TOOLS); do command -v $$tool >/dev/null || { \
		echo "make arm needs $$tool, which is not here: on Debian, apt install g++-aarch64-linux-gnu qemu-user"; exit 1; }; done
	$(call build_programs,arm,-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_EXE_LINKER_FLAGS=-static \
		-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64)
	@for cpu in $(ARM_CPUS); do echo "== $$cpu"; \
		QEMU_CPU=$$cpu $(VENV)/bin/ctest --test-dir build/arm --output-on-failure || exit 1; done

sanitize: $(VENV)/.dev
	$(call programs,sanitize-address,-DHEADRACE_SANITIZE=address)
	$(call programs,sanitize-thread,-DHEADRACE_SANITIZE=thread)

# Compiling is most of the time, so here the kernels are compiled once instead of five times.
sanitize-short: $(VENV)/.dev
	$(call programs,sanitize-address-short,-DHEADRACE_SANITIZE=address -DHEADRACE_PLAIN=ON)
	$(call programs,sanitize-thread-short,-DHEADRACE_SANITIZE=thread -DHEADRACE_PLAIN=ON)

bench: $(VENV)/.run
	@$(VENV)/bin/headrace bench local $(MODEL)
	@$(VENV)/bin/python -m benchmarks.linears --shares benchmarks/linears.json

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(shell find csrc tests/native -name '*.cpp' -o -name '*.h' -o -name '*.inl')

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format
	$(VENV)/bin/clang-format -i $(shell find csrc tests/native -name '*.cpp' -o -name '*.h' -o -name '*.inl')

native: $(VENV)/.run
	$(VENV)/bin/python -m pip install -v --no-deps --no-build-isolation --editable .
	@$(VENV)/bin/python -c "import sys, headrace.core as core; sys.exit(core.reason() or 0)"

clean:
	rm -rf $(VENV) build src/headrace/core/*.so

# The stamps: installing again only when what it depends on has changed.
$(VENV)/.run: $(BUILD_INPUT)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Headrace needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another: make run PYTHON=python3.12")'
	@$(PYTHON) tools/install.py serve ground
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(PYTHON) tools/install.py dev
	@touch $@

$(VENV)/.peers: $(VENV)/.dev
	@$(PYTHON) tools/install.py dev peers
	@touch $@

# Mutation testing: make mutants MODULES="ops.trees kv" SAMPLE=100 SEED=1 JOBS=2; AGAIN=--again repeats what was not killed.
SAMPLE ?= 100
SEED ?= 1
JOBS ?= 2

.PHONY: mutants
mutants: $(VENV)/.dev
	@nice -n 15 $(VENV)/bin/python tools/mutants.py $(MODULES) --sample $(SAMPLE) --seed $(SEED) --jobs $(JOBS) $(AGAIN)
