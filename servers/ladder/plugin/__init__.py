"""A folder with a plugin for vLLM, which can then serve models with Ladder Residual (arXiv 2501.06589).

The folder must be on vLLM's PYTHONPATH. It contains the Python package `ladder_residual`, and the metadata by which
vLLM finds this package.
"""
