"""`python -m capplan`."""

from capplan.cli import main

if __name__ == "__main__":
    main()
