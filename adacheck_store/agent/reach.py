"""Where other nodes reach an agent: at the port of the one before it, by an address of this host.

Two agents that are both started anew know of each other only where they were before. So one that
may take any port takes the one that its predecessor had, if that is free.
"""

from __future__ import annotations

import dataclasses
import socket
from contextlib import suppress
from ipaddress import ip_address

from adacheck_store.tiers.endpoint import Endpoint

from .places import Place

ELSEWHERE = "192.0.2.1"
"""An address of nobody (RFC 5737): the way to it is the way to any other host."""


def again(asked: Endpoint, place: Place) -> Endpoint:
    """Where to listen: where any port will do, at the one that the place's last agent had."""
    if asked.path or asked.port:
        return asked
    with suppress(OSError, ValueError):
        port = int(place.port.read_text(encoding="ascii"))
        if 0 < port < 1 << 16:
            return dataclasses.replace(asked, port=port)
    return asked


def remember(endpoint: Endpoint, place: Place) -> None:
    """Keep the port for the next agent of the place."""
    with suppress(OSError):
        place.port.write_text(str(endpoint.port), encoding="ascii")


def told(endpoint: Endpoint, meeting: str) -> Endpoint:
    """What to tell others: for one that listens at all addresses, the one on the way to them.

    ``meeting`` is a host where all ranks meet, empty if none is known. Nothing is sent.
    """
    if endpoint.path or not _any(endpoint.host):
        return endpoint
    found = [_source(host) for host in (meeting, ELSEWHERE) if host]
    known = [host for host in found if host]
    best = next((host for host in known if not ip_address(host).is_loopback), "127.0.0.1")
    return dataclasses.replace(endpoint, host=best)


def _any(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def _source(host: str) -> str:
    """This host's address as another one would see it, empty where there is no way to it."""
    with suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as sock:
                sock.connect(where)
                return str(sock.getsockname()[0]).partition("%")[0]
    return ""
