"""`python -m holdfast`: the same program, where no script is on the path."""

from holdfast.cli import main

main()
