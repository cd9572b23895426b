"""`python -m aquiline` is `aquiline`."""

from aquiline.cli.main import main

main()
