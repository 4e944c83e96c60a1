"""One file a command: options in, exit code out."""
