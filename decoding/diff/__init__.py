"""Where two runs of one prompt part: the first token, step, layer and op, and by how much."""
