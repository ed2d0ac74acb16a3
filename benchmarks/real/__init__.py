"""Measures real models beside llama.cpp's own programs on the same GGUF files: serving, greedy texts and perplexity."""
