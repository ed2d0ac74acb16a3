"""Measures real models beside llama.cpp's own programs, from the same GGUF files: serving, texts and perplexity."""
