"""`python -m lucid_cli` is the `lucid` command."""

from lucid_cli import main

if __name__ == "__main__":
    main()
