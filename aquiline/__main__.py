"""`python -m aquiline` is `aquiline`."""

from aquiline.cli import main

main()
