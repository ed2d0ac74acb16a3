"""Lets models of transformers run on a memory: their attention and recurrent modules are replaced in place."""

from hybridmem.models.hf.attach import ATTACHABLE, Attached, attach

__all__ = ["ATTACHABLE", "Attached", "attach"]
