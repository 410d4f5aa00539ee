"""The folder that must be on vLLM's PYTHONPATH to serve a ladder model.

The folder contains a Python package and the package's entry-point metadata.
"""
