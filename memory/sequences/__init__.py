"""Computes positions, without tensors: the ledger, packing, fold points, pages, rollback and drops."""

from hybridmem.memory.sequences.batch import count_tokens, why_no_ids
from hybridmem.memory.sequences.interrupts import Lease, uninterrupted, uninterrupted_call
from hybridmem.memory.sequences.soft_tokens import is_soft, passages_in, plain_ids
from hybridmem.memory.sequences.token_buffer import common_prefix

__all__ = [
    "Lease",
    "common_prefix",
    "count_tokens",
    "is_soft",
    "passages_in",
    "plain_ids",
    "uninterrupted",
    "uninterrupted_call",
    "why_no_ids",
]
