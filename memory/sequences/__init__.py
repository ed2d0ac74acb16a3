"""Positions of sequences: the ledger, packing, fold points, pages, rollback, dropping. Holds no tensors."""
