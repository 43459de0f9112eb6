"""The GPU backend: Triton and CUDA C++ kernels, and what launches them."""
