"""The address that the connections of a peer are counted under."""

from __future__ import annotations

import ipaddress


def counted_address(host: str) -> str:
    """Return the IPv4 address, or the IPv6 network of 64 bits, because one host may have all addresses of
    such a network. What is no address comes back as it is.
    """
    host = host.partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))
