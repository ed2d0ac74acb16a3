"""One file per family of recurrences: the shapes of its row and state, and the fold itself."""

from memory.recurrences.fold import Fold
from memory.recurrences.mamba1 import Mamba1, mamba1_spec, rms_norm

__all__ = ["Fold", "Mamba1", "mamba1_spec", "rms_norm"]
