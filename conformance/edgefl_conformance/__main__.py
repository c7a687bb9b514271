"""``python -m edgefl_conformance``."""

from edgefl_conformance.command import main

if __name__ == "__main__":
    main()
