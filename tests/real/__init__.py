"""The tests use files that others made: two models, and the vocabularies and templates of many."""
