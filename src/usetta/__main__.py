"""`python -m usetta` is the command line."""

from usetta.cli import main

main()
