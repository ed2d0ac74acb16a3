"""Runs the command `hybrid-memory`: `python -m hybridmem`."""

from hybridmem.chat.cli import main

if __name__ == "__main__":
    main()
