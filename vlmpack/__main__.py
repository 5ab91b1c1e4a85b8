"""`python -m vlmpack` and `torchrun -m vlmpack`."""

from vlmpack.cli import main

if __name__ == "__main__":
    main()
