"""The GPUs that this process may give to workers, where its settings do not name them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_DEVICE = re.compile(r"nvidia[0-9]+")


def visible_gpus(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Those in CUDA_VISIBLE_DEVICES, which a container or a batch system may have set; else all of the machine."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        listed = [part.strip() for part in named.split(",")]
        # As CUDA reads it: what follows one that is not there is not seen either.
        end = next((at for at, one in enumerate(listed) if one in ("", "-1")), len(listed))
        return tuple(listed[:end])
    count = sum(_DEVICE.fullmatch(path.name) is not None for path in devices.glob("nvidia*"))
    # CUDA counts those that are there from 0, whatever their files' numbers: a container may have the second alone.
    return tuple(map(str, range(count)))
