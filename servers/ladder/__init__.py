"""A Llama in plain PyTorch, of any shape, on one device or split over several; `loadgen dissect` takes it apart.

Only this folder and `loadgen/dissect` import torch.
"""
