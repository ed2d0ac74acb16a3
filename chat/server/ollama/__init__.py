"""Speaks Ollama's API: /api/chat, /api/generate and what its clients ask about models, over the same calls as chats."""
