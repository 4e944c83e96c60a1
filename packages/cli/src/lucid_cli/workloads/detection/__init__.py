"""A small object detector and everything that trains it: `python -m lucid_cli.workloads.detection`."""
