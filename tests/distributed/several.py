"""Run the cases that are named, of one script or of several, in the same processes."""

import sys

from worker import run_named

if __name__ == "__main__":
    run_named(sys.argv[1:])
