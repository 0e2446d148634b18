"""`python -m ctatune` is the command `ctatune`."""

from ctatune.cli import main

if __name__ == "__main__":
    main(prog_name="ctatune")
