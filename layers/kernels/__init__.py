"""Triton kernels for one NVIDIA GPU, each an ordinary function over torch tensors.

They take outputs as arguments, wait for nothing and read nothing back, so all of them can be
captured in a CUDA graph. Which configuration runs is looked up by shape, never measured at run
time: equal shapes give equal bits. Device thread.

Importing needs no triton and no GPU; calling needs both, or Triton's interpreter and CPU tensors
(set TRITON_INTERPRET=1 before the first import).
"""
