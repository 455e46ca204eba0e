"""Command line without installing the package: `python run.py generate`, see `python run.py --help`."""

import os

try:
    from jddtree.cli.entry import main
except KeyboardInterrupt:  # before there is a handler
    os.write(2, b"interrupted\n")
    os._exit(130)

if __name__ == "__main__":
    main()
