"""Where ranks meet."""

import socket
import sys

import psutil

from antiphon.learning.mesh import _interface


def test_an_interface_is_found_by_its_address():
    """As psutil knows them; collectives would use another one, which may not reach the other nodes."""
    known = {
        address.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses[:1]
        if address.family == socket.AF_INET
    }
    assert "127.0.0.1" in known
    expected = known if sys.platform == "linux" else dict.fromkeys(known, "")
    assert {address: _interface(address) for address in known} == expected
    assert _interface("203.0.113.1") == "", "an address of no machine"
