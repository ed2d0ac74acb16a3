"""Serves stored sessions: OpenAI's responses and conversations, and an API of their trees."""
