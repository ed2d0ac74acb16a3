"""Tests of the house: files, imports, notebooks, and what programs start with."""
