"""What of a machine and of a Python environment stands in the way of a measurement; nothing is changed by looking.

Importing this package loads nothing: one of its modules runs where only the program's own packages are installed.
"""
