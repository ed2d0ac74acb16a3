"""Contains layers that several model families share."""
