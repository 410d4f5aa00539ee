"""What vLLM needs on its PYTHONPATH to serve a ladder: a package, and the metadata by which vLLM finds it."""
