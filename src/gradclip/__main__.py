"""The command line: `python -m gradclip`."""

from gradclip._src.cli.app import main

if __name__ == "__main__":
    main()
