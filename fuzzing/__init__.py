"""Feeds hostile bytes to everything that reads a file, a config, a template or a request, and judges what comes of it.

Every input is a function of a seed and a number, so a finding is told in one line and comes back from it. A reader
passes if it returns, or raises an error of the library, in time, within a limit of memory, and without touching
anything but the files that it was given. `python -m fuzzing --help` says how to run it.
"""
