"""Triton kernels: quantize, append_, dequantize and attention on GPUs, for every format of the table.

Importing this package imports triton; ``kvq_ops`` does so when an operator first meets a tensor that the kernels serve.
"""
