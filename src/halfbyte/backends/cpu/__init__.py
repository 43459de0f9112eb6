"""The compiled CPU backend: C++ kernels, and the tables that they use."""
