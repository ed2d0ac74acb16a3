"""Speaks Ollama's API: /api/chat, /api/generate and its endpoints about models, by the same code as chats."""
