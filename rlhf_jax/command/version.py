"""Print the versions that a bug report needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

import jax

from rlhf_jax.monitoring.environment import PACKAGES
from rlhf_jax.setup.run_spec import count_devices


def main(argv: list[str]) -> int:
    """Return the exit code."""
    argparse.ArgumentParser(prog=argv[0], description=__doc__).parse_args(argv[1:])
    for name in PACKAGES:
        print(f"{name} {importlib.metadata.version(name)}")
    print(f"python {platform.python_version()} on {platform.platform()}")
    print(f"devices: {count_devices()} x {jax.devices()[0].device_kind}")
    return 0
