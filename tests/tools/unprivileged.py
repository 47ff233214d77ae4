"""The command line in a process that permissions bind, even where root runs the tests."""

import ctypes

from adacheck_store.cli import main

VERSION = 0x20080522
OVERRIDING = 1 << 1 | 1 << 2
"""Permissions to write, and to read and search."""


class Header(ctypes.Structure):
    """Of capget and capset; process 0 is this one."""

    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class Half(ctypes.Structure):
    """32 capabilities."""

    _fields_ = tuple((name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable"))


def drop() -> None:
    """Give up what overrides permissions, for good."""
    libc, header = ctypes.CDLL(None, use_errno=True), Header(VERSION, 0)
    halves = (Half * 2)()
    assert libc.capget(ctypes.byref(header), halves) == 0
    halves[0].effective &= ~OVERRIDING
    halves[0].permitted &= ~OVERRIDING
    assert libc.capset(ctypes.byref(header), halves) == 0


if __name__ == "__main__":
    drop()
    main(prog_name="adacheck-store")
