"""The CUDA backend: Triton kernels, one module per operation, and cuBLAS for dense products.

Every kernel also runs on CPU tensors under Triton's interpreter (TRITON_INTERPRET=1), which is how the tests check it
against the torch reference on machines without a GPU. Kernels that take part in a decode step read how many rows are
live from device memory, so that one captured graph serves every layout.
"""
