"""Contains the families of models, one in each file. They may take parts of each other."""
