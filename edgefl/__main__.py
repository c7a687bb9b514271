"""``python -m edgefl``."""

from edgefl.cli import main

if __name__ == "__main__":
    main()
