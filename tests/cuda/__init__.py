"""CUDA without a GPU: tensors that say they are on ``cuda:0`` and compute on the CPU, and the tests that use them."""
