"""The model that `loadgen dissect` measures: a Llama in plain PyTorch, on one device or split over several."""
