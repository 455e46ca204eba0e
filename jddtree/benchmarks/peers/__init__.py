"""What public CUDA engines use, measured at the same shapes: Marlin, FlashMLA and cuBLAS through torch.

Torch and vLLM's compiled kernels are wanted here alone, and only while measuring (`library`). `__main__` is
the command, `rows` hands its rows to `bench kernels` and `bench step`.
"""
