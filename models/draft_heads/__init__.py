"""Contains draft heads: small layers that read a model's hidden states and draft its next tokens."""

from hybridmem.models.draft_heads.dflash import DFlashHead
from hybridmem.models.draft_heads.eagle3 import Eagle3Head
from hybridmem.models.draft_heads.interface import BlankHead, DraftHead
from hybridmem.models.draft_heads.next_token import NextTokenHead
from hybridmem.models.draft_heads.recorded import RecordedBlankHead, RecordedHead
from hybridmem.models.draft_heads.watched import HiddenRows

__all__ = [
    "BlankHead",
    "DFlashHead",
    "DraftHead",
    "Eagle3Head",
    "HiddenRows",
    "NextTokenHead",
    "RecordedBlankHead",
    "RecordedHead",
]
