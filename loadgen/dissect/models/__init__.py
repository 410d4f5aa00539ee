"""PyTorch models that `loadgen dissect` measures."""
