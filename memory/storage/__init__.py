"""Out of the budget and back: host memory, swap files, saved sequences."""
