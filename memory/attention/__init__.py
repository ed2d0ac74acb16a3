"""Defines the layer memories of attention that is not dense: quantized, evicting, selecting, crossing or offloaded."""
