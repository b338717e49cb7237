"""Makes a small draft for a target by training it on what the target writes."""
