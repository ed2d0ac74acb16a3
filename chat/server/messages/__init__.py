"""Speaks Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens, by the same code as chats."""
