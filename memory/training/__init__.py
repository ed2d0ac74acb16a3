"""Trains models on texts of any length: activations of one chunk at a time, and gradients through the memory.

`docs/how-to/training.md` shows how to use it. Inference imports nothing from this package.
"""

from hybridmem.memory.training.chunk import Head, logprobs_of
from hybridmem.memory.training.tape import Branch, Tape

__all__ = ["Branch", "Head", "Tape", "logprobs_of"]
