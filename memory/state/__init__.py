"""What a sequence holds as a body and a tail: the table of its blocks, and how they are read."""
