"""Feeds hostile bytes to everything that reads a file, a config, a template or a request, and judges the results.

Every input is a function of a seed and a number, so one line identifies a finding and is enough to repeat it. A reader
passes if it returns, or raises an error of the library, in time, within a limit of memory, and without touching
anything but the files that it was given. `python -m fuzzing --help` says how to run it.
"""
