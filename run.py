"""Command line without installing the package: `python run.py generate`, see `python run.py --help`."""

from jddtree.cli.main import main

if __name__ == "__main__":
    main()
