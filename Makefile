# The commands of this project. `make burst` and `make test` need Python >= 3.11, git and make, and install the rest.
#
#   make burst           install into .venv and send the first burst, to the built-in simulated TGI
#   make test            check layout, types and imports; test the commands against the project's own servers on loopback
#   make test-system     test the commands against the operating system, other programs, and the clock of an idle machine
#   make test-pages      test every page in Chromium
#   make test-packaging  test the wheel, the image, Compose, Kubernetes, small benchmarks, and ten thousand streams
#   make coverage        run the tests of `test`, `test-system` and `test-pages` one at a time and measure their line coverage
#   make engine          install real inference servers for this machine's CPU, and gateways, in .engine
#   make test-real       run the tests that need these servers
#   make test-dissect    test `loadgen dissect` with torch on this machine's CPU
#   make test-docker     test docker-compose.yml and `loadgen servers` on a real Docker engine in .docker-engine
#   make endurance       kills, full disks, corrupted responses and a million requests (takes an hour)
#   make docs            generate the reference pages
#   make clean           remove everything that these commands created

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start hundreds of interpreters, which compile these modules once.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
# Collecting the pages' tests as well would cost each process a second.
WITHOUT_BROWSER := tests/unit tests/property tests/contract tests/seams tests/integration tests/tidy

.PHONY: burst test test-system test-pages test-packaging coverage endurance docs clean

# Exit code 5 means that this machine was too busy for exact figures. That is acceptable for a first look.
burst: .venv/.installed
	@$(BIN)/loadgen burst --server tgi --n 1000 || [ $$? -eq 5 ]

test: .venv/.tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports & $(BIN)/mypy && wait $$!
	$(BIN)/python -m pytest -n 5 --dist loadgroup -m "not browser" $(WITHOUT_BROWSER)

test-system: .venv/.tests .venv/.compiler .venv/.network .venv/.tls
	$(BIN)/python -m pytest -n 4 --dist loadgroup -m "not alone" tests/system
	$(BIN)/python -m pytest -m "alone and not scale" tests/system

test-pages: .venv/.tests .venv/.browser
	$(BIN)/python -m pytest -n 3 --dist loadgroup -m browser tests/browser tests/seams

test-packaging: .venv/.tests .venv/.compiler .venv/.network
	$(BIN)/python -m pytest tests/packaging tests/benchmarks
	$(BIN)/python -m pytest -m scale tests/system

coverage: .venv/.tests .venv/.browser .venv/.compiler .venv/.network .venv/.tls
	$(BIN)/python -m pytest --cov --cov-report=term

endurance: export PYTHONPATH := .
endurance: .venv/.tests
	$(BIN)/python tests/endurance/hostile.py
	$(BIN)/python tests/endurance/hostile_second.py
	$(BIN)/python tests/endurance/kills.py
	$(BIN)/python tests/endurance/full_disk.py
	$(BIN)/python tests/endurance/long.py

docs: .venv/.installed
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv .engine .docker-engine .coverage .*_cache .hypothesis

-include tests/real/engine.mk
-include tests/dissect/dissect.mk
-include tests/docker/docker.mk

# $(call need,TEST,PACKAGES): if TEST fails, install these Debian packages, or tell the user to install them.
need = $(1) || { \
	if [ "$$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing $(2) with apt."; \
		apt-get -q update && DEBIAN_FRONTEND=noninteractive \
			apt-get -q install -y --no-install-recommends -o DPkg::Lock::Timeout=300 $(2); \
	else \
		echo "This needs $(2). Install it, for example: sudo apt-get install $(2)" >&2; exit 1; \
	fi; }

# Find the first Python that is new enough. `make PYTHON=/path/to/python burst` selects another.
find_python = python=$$(for each in $(if $(PYTHON),"$(PYTHON)",python3 python3.14 python3.13 python3.12 python3.11); do \
		"$$each" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$each" && break; \
	done) || { echo "This needs Python 3.11 or newer. Name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }

# On Debian, `python3 -m venv` needs a separate package that is named after the Python version.
.venv/bin/python:
	@set -e; $(find_python); \
	package=$$("$$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	$(call need,"$$python" -c 'import ensurepip' 2>/dev/null,$$package); \
	echo "Creating .venv with $$("$$python" --version)."; \
	"$$python" -m venv --clear .venv

.venv/.installed: pyproject.toml | .venv/bin/python
	@echo "Installing llm-loadgen into .venv. This happens once and takes about a minute."
	@$(BIN)/python -m pip install -q -e .
	@touch $@

.venv/.tests: pyproject.toml | .venv/bin/python
	@echo "Installing the test dependencies into .venv. This happens once and takes a minute or two."
	@$(BIN)/python -m pip install -q -e '.[test]'
	@touch .venv/.installed $@

# The system tests use network namespaces (iproute2) with separate clocks (util-linux) as machines.
.venv/.network: .venv/.tests
	@set -e; $(call need,command -v ip >/dev/null,iproute2); \
	$(call need,command -v unshare >/dev/null && command -v nsenter >/dev/null,util-linux)
	@touch $@

# Third-party TLS servers: nginx and haproxy as proxies, and `openssl s_server`. Debian installs daemons in /usr/sbin.
.venv/.tls: .venv/.tests
	@set -e; PATH="$$PATH:/usr/sbin"; $(call need,command -v nginx >/dev/null,nginx); \
	$(call need,command -v haproxy >/dev/null,haproxy); \
	$(call need,command -v openssl >/dev/null,openssl)
	@touch $@

# Playwright's Node needs libatomic. Ubuntu has Chromium only as a snap, so Playwright downloads one there.
.venv/.browser: .venv/.tests
	@set -e; $(call need,$(BIN)/python -m playwright --version >/dev/null 2>&1,libatomic1); \
	if grep -q '^ID=ubuntu' /etc/os-release 2>/dev/null; then \
		$(BIN)/python -m playwright install $$([ "$$(id -u)" -ne 0 ] || echo --with-deps) chromium; \
	else \
		$(call need,command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null,chromium-headless-shell); \
	fi
	@touch $@

# The tests compile a stand-in for the GPU driver's library.
.venv/.compiler: | .venv/bin/python
	@set -e; $(call need,command -v cc >/dev/null,gcc libc6-dev)
	@touch $@
