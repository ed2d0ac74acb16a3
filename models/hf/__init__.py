"""Lets models of transformers run on a memory: their attention and recurrent modules are replaced in place."""

from hybridmem.models.hf.attach import Attached, attach
from hybridmem.models.hf.classes import ATTACHABLE

__all__ = ["ATTACHABLE", "Attached", "attach"]
