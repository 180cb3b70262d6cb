"""Two network namespaces of Linux as two hosts, joined by a slow network. It needs root, `ip` and `tc`."""

import contextlib
import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ON_HOST = Path(__file__).parents[1] / "workers" / "on_host.py"
# What limits the packets that a host sends. Some kernels have no netem: then only the rate is limited.
_LIMITS = ("netem rate 500mbit delay 1ms loss 0.1%", "tbf rate 500mbit burst 256kb latency 100ms")


@dataclass(frozen=True)
class Host:
    """A network namespace with one interface.

    Attributes:
        name: of the namespace.
        interface: its name.
        address: its IPv4 address.
        limit: how its packets are limited.
    """

    name: str
    interface: str
    address: str
    limit: str

    @property
    def bytes_sent(self) -> int:
        """Number of bytes that the host has sent through its interface."""
        shown = subprocess.run(["ip", "-n", self.name, "-s", "-j", "link", "show", self.interface], capture_output=True)
        return json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make torch use the interface."""
        return {"GLOO_SOCKET_IFNAME": self.interface, "TP_SOCKET_IFNAME": self.interface}


@functools.cache
def missing() -> str:
    """Return why this machine cannot simulate hosts, or ""."""
    if os.geteuid() != 0 or not hasattr(os, "setns"):
        return "needs root and Python 3.12"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "needs ip and tc"
    try:
        with two_hosts():
            return ""
    except subprocess.CalledProcessError as error:
        return f"cannot make network namespaces: {error.stderr.strip()}"


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts, and delete them at the end of the `with` block."""
    names = [f"sb{os.getpid()}{letter}" for letter in "ab"]
    interfaces = [f"{name}0" for name in names]
    hosts = []
    try:
        for name in names:
            _run("ip netns add", name)
            _run("ip -n", name, "link set lo up")
        _run("ip link add", interfaces[0], "netns", names[0], "type veth peer name", interfaces[1], "netns", names[1])
        for index, (name, interface) in enumerate(zip(names, interfaces, strict=True), 1):
            address = f"10.89.0.{index}"
            _run("ip -n", name, "addr add", f"{address}/24", "dev", interface)
            _run("ip -n", name, "link set", interface, "up")
            hosts.append(Host(name, interface, address, _limit(name, interface)))
        yield tuple(hosts)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)  # deletes its interface, too


def _limit(name: str, interface: str) -> str:
    for limit in _LIMITS[:-1]:
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("tc -n", name, "qdisc add dev", interface, "root", limit)
            return limit
    _run("tc -n", name, "qdisc add dev", interface, "root", _LIMITS[-1])
    return _LIMITS[-1]


def _run(*words: str) -> None:
    subprocess.run(" ".join(words).split(), check=True, capture_output=True, text=True)
