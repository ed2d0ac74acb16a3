"""Models of transformers that run on a memory: attention and mixers replaced in place."""

from models.hf.attach import ATTACHABLE, Attached, attach

__all__ = ["ATTACHABLE", "Attached", "attach"]
