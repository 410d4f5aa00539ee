# The real engines and their tests; included by the Makefile.

.PHONY: engine test-real

engine:
	@python3 tests/real/engine/make_engine.py

test-real: engine .venv/.tests .venv/.tls
	$(BIN)/python -m pytest tests/real --timeout 300
