"""Training runs that ship with lucid, so that a measurement needs no script of one's own."""
