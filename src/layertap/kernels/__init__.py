"""Kernels for a GPU, in Triton, for what PyTorch's indexing does at a fraction of the memory's speed."""
