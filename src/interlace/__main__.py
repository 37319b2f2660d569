"""`python -m interlace`: the same as the `interlace` command."""

from interlace.cli.app import main

if __name__ == "__main__":
    main()
