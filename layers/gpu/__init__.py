"""The runner of one NVIDIA GPU: fused kernels, CUDA graphs, steps that follow each other closely.

    runner.py    one step: follow the message, upload, compute, sample, report
    inputs.py    what a step uploads, in one packed buffer
    tables.py    block tables that stay on the device
    forward.py   the decoder over the kernels of `layers/kernels`
    sampling.py  tokens that go from step to step without touching the host

Everything but graphs also runs on CPU tensors under Triton's interpreter. Device thread.
"""
