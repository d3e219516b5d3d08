# Few targets; each calls a command that explains itself with --help.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON := .venv/bin/python
CLUSTER ?= local

.PHONY: help setup demo oracle soak bench test test-engines fuzz test-unit lint crds chart docs reference cluster-up cluster-down images clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

setup: ## everything that a fresh Debian 12 machine needs (packages, environments, tiny models)
	python3 -m hack.setup

demo: ## cluster, operator, two engines, one store, a verified policy change under load (CLUSTER=kind, CLUSTER=context:NAME)
	python3 -m hack.demo --cluster $(CLUSTER) $(ARGS)

test: ## every test there is: lint, unit, component, integration, end to end
	python3 -m hack.test $(STAGES)

oracle: ## the long oracle: changes under faults, three replicas, every answer checked (about 40 minutes)
	$(PYTHON) -m tests.e2e.oracle $(ARGS)

soak: ## changes of policy while everything is killed and frozen, on this machine without a node (an hour at most)
	$(PYTHON) -m bench.soak $(ARGS)

bench: ## the measurements of docs/performance.md (ARGS="fanout" for one, ARGS=--help for all)
	$(PYTHON) -m bench $(ARGS)

test-engines: ## the component tests on every vLLM release that the plugin knows, and old engines in a cluster (50 GB)
	MOONTIDE_TEST_ENGINES=all python3 -m hack.test component releases
	python3 -m hack.engines check

fuzz: ## thousands of wild specs against a real API server and an operator at work (COUNT=5000, SEED=1)
	MOONTIDE_FUZZ=$(or $(COUNT),5000) MOONTIDE_FUZZ_SEED=$(or $(SEED),1) $(PYTHON) -m pytest -q -s tests/integration/test_fuzz.py

test-unit: ## the tests that need nothing but Python (seconds)
	$(PYTHON) -m pytest -q tests/unit

lint: ## ruff, mypy --strict, import contracts, the site of docs/
	python3 -m hack.test lint

crds: ## generate crds/ and the chart's copies from the models
	$(PYTHON) -m moontide.crdgen

chart: ## snapshots of what the Helm chart makes of values (read the diff)
	$(PYTHON) -m hack.chart

reference: ## docs/reference, from the models, the CLI and the chart's values
	$(PYTHON) -m hack.reference

docs: ## the site, into artifacts/site; a dead link ends the build
	NO_MKDOCS_2_WARNING=true .venv/bin/mkdocs build --strict

cluster-up: ## a real Kubernetes cluster on this machine
	python3 -m hack.cluster up

cluster-down: ## end it and leave nothing behind
	python3 -m hack.cluster down
	python3 -m hack.cluster verify-clean

images: ## build the images and load them into the local cluster
	python3 -m hack.images build

clean: cluster-down ## the same, and delete environments and caches of this folder
	rm -rf .venv artifacts .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
