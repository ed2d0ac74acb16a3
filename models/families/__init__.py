"""Contains more families of models, a file each, beside those in the folder above."""
