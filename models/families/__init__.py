"""Contains families of models, one in each file. Other families are in the folder above."""
