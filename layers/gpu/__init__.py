"""The runner of one NVIDIA GPU: fused kernels, CUDA graphs, steps that follow each other closely.

    runner.py    one step: follow the message, upload, compute, sample, report
    inputs.py    what a step uploads, in one packed buffer
    tables.py    block tables that stay on the device
    forward.py   the decoder over the kernels of `layers/kernels`
    graphs.py    whole steps, and pieces of steps, as CUDA graphs
    room.py      memory that outlives a graph
    sampling.py  sampled tokens on their way to the host
    setup.py     which graphs there are, and how much memory is left for KV

Everything but graphs also runs on CPU tensors under Triton's interpreter. Device thread.
"""
