"""Speaks the API of llama.cpp's server beside OpenAI's: /completion, /infill, /apply-template, /props and /slots."""
