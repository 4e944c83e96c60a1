"""One file an output: text from an analysis, without any computation of its own."""
