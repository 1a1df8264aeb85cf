"""``python -m unsilent``, so that torchrun can start it with ``-m``."""

from unsilent.cli import main

if __name__ == "__main__":
    main()
