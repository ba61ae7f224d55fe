"""`python -m slipstream` is `slipstream`."""

from slipstream.cli.main import main

if __name__ == "__main__":
    main()
