"""The tests check the house: files, imports, notebooks, and what programs import when they start."""
