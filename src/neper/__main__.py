"""`python -m neper` is the `neper` command."""

from neper.cli import main

main()
