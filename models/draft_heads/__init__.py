"""Contains draft heads: small layers that read a model's hidden states and draft its next tokens."""

from hybridmem.models.draft_heads.eagle3 import Eagle3Head
from hybridmem.models.draft_heads.interface import DraftHead
from hybridmem.models.draft_heads.next_token import NextTokenHead
from hybridmem.models.draft_heads.recorded import RecordedHead
from hybridmem.models.draft_heads.watched import HiddenRows

__all__ = ["DraftHead", "Eagle3Head", "HiddenRows", "NextTokenHead", "RecordedHead"]
