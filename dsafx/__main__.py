"""``python -m dsafx`` is the command ``dsafx``."""

from ._cli import main

if __name__ == "__main__":
    main()
