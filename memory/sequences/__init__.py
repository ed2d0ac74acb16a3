"""Computes positions: the ledger, packing, fold points, pages, rollback and drops. No tensors."""
