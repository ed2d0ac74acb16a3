"""Publishes which prefixes can be resumed, in the format of vLLM's KV events."""
