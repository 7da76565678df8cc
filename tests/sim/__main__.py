"""`python -m sim`: see `sim.run`."""

from __future__ import annotations

import sys

from sim.run import main

if __name__ == "__main__":
    sys.exit(main())
