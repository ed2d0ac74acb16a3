"""Kernels for CUDA devices, written in Triton: `memory.kernels.signature.Kernels`."""

from __future__ import annotations

from memory.kernels.cuda.channel_states import selective_scan
from memory.kernels.cuda.convolution import causal_conv
from memory.kernels.cuda.matrix_states import matrix_scan
from memory.kernels.cuda.norms import rms_norm
from memory.kernels.cuda.vectors import linear_scan, softplus, wkv4

__all__ = ["causal_conv", "linear_scan", "matrix_scan", "rms_norm", "selective_scan", "softplus", "wkv4"]
