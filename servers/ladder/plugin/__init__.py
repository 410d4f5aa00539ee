"""The folder that vLLM needs on its PYTHONPATH to serve a ladder model: a package and its entry-point metadata."""
