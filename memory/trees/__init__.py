"""Runs steps over trees of draft tokens: each layer memory computes every token from the rows on the token's path."""
