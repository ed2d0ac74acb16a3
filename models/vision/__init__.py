"""Reads pictures, and makes rows of embeddings of them by the tower of a checkpoint."""
