# The tests with a real Docker engine; included by the Makefile.

.PHONY: test-docker

test-docker: .venv/.tests
	$(BIN)/python tests/docker/engine.py $(BIN)/python -m pytest tests/docker --timeout 600 --durations 12
