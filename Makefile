# Every verb is safe to repeat: what is already there is found in a moment and left alone.
.DEFAULT_GOAL := help
.PHONY: setup gpu image agents demo demo-gpu test quick cluster check lock docs clean help

setup:  ## packages, .venv and Apptainer; as root it installs what the machine lacks
	containers/setup.sh

gpu:  ## .venv-gpu, an environment for GPUs, which the other verbs leave alone
	containers/setup.sh gpu

image: setup  ## the demo's task image, in .cache/images
	containers/build_image.sh

agents: setup  ## qwen-code and mini-swe-agent for sandboxes, in .cache/agents
	containers/build_agents.sh

demo: image  ## train on this machine and show what was learned
	.venv/bin/python -m hpc_swe.demo

demo-gpu: gpu  ## the same on one GPU of this machine
	containers/build_image.sh
	.venv-gpu/bin/python -m hpc_swe.demo configs/demo_gpu.toml $(WITH) --out runs/demo-gpu

test: image  ## every test that needs no GPU
	containers/build_agents.sh || true
	tests/kit/cluster/install.sh
	tests/kit/install_browser.sh
	tests/kit/install_packages.sh
	tests/run.sh

cluster: setup  ## a shell on a Slurm cluster of six nodes, here and for as long as the shell lasts
	tests/kit/cluster/install.sh
	.venv/bin/python -m tests.kit.cluster

quick: setup  ## the tests that a developer runs between two edits
	tests/run.sh quick

check: setup  ## style, types and the direction of imports
	.venv/bin/ruff check && .venv/bin/ruff format --check && .venv/bin/mypy && .venv/bin/lint-imports

lock: setup  ## uv.lock, after a change of dependencies; it names no registry, so that each user's own is asked
	.venv/bin/uv lock
	sed -E -i -e 's#https?://[^/"]*#https://example.invalid#' -e '/^wheels = \[$$/,/^\]$$/d' -e '/^sdist = /d' uv.lock

docs:  ## these pages as a site, in build/site; it fails where a link leads nowhere
	test -x .cache/docs/bin/mkdocs || { python3 -m venv .cache/docs && .cache/docs/bin/pip install -q '.[docs]'; }
	.cache/docs/bin/mkdocs build --strict

clean:  ## remove .venv and .cache; runs/ stays
	rm -rf .venv .cache

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1 - /p' Makefile
