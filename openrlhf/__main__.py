"""`python -m openrlhf`: the same as the command `openrlhf`."""

from openrlhf.cli.main import main

if __name__ == "__main__":
    main()
