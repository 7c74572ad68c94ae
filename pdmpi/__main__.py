"""``python -m pdmpi``: the command line, for environments that have no console script."""

from pdmpi.cli.main import main

main()
