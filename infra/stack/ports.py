"""Free ports on loopback.

They lie outside the range from which the kernel takes the local end of outgoing connections. In that range a port of a
killed server can be gone at its restart, and a client that keeps dialling a dead port can end up connected to itself.
"""

import random
import socket
from collections.abc import Collection
from pathlib import Path

LOOPBACK = "127.0.0.1"
LOWEST, HIGHEST = 20_000, 65_535


def is_free(port: int) -> bool:
    """Whether a server could listen on this port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen()
        except OSError:
            return False
    return True


def is_open(port: int, timeout: float = 1.0) -> bool:
    """Whether somebody accepts connections on this port."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout):
            return True
    except OSError:
        return False


def pick_ports(count: int, avoid: Collection[int] = ()) -> list[int]:
    """`count` different free ports, none of them in `avoid`."""
    picked: list[int] = []
    for port in _shuffled_candidates():
        if len(picked) == count:
            break
        if port not in avoid and is_free(port):
            picked.append(port)
    return picked


def _shuffled_candidates() -> list[int]:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    quiet = [port for port in range(LOWEST, HIGHEST) if not low <= port <= high]
    candidates = quiet or list(range(LOWEST, HIGHEST))
    return random.sample(candidates, len(candidates))
