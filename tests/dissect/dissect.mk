# What `loadgen dissect` needs, and its tests; included by the Makefile.

.PHONY: dissect test-dissect

dissect:
	@python3 tests/real/engine/make_engine.py dissect

test-dissect: dissect
	.engine/dissect/bin/python -m pytest tests/dissect --timeout 240
