"""Attention layer memories beside the dense one: quantized, evicting, selecting, cross-attention, offloaded."""
