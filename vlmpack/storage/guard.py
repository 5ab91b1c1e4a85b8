"""Which hosts may be asked: public ones, and private ones where the recipe allows them.

Names are resolved first. So a name, a decimal or hexadecimal spelling or an IPv6 form is judged by
the address it means. Link-local addresses hold the credentials of cloud machines and are always
refused.

Our own HTTP client connects to the address that was judged. obstore resolves the endpoint's name
again, so a name server that changes its answer in between is not noticed. TLS protects then, and an
endpoint without it needs `data.storage.allow_private`.
"""

from __future__ import annotations

import ipaddress
import socket

from vlmpack.storage.transport import Refused, Transient

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "fd00:ec2::254",  # AWS
        "fd20:ce::254",  # Google
        "168.63.129.16",  # Azure; a public address by its number
        "100.100.100.200",  # Alibaba
        "192.0.0.192",  # Oracle
    )
)


def allowed_addresses(
    host: str, port: int, *, allow_private: bool, is_named: bool = True
) -> list[str]:
    """The addresses of a host, each of which may be asked.

    Args:
        is_named: by the recipe, not by a redirect; for the message.

    Raises:
        Refused: one of them is private, or never allowed.
        Transient: the name cannot be resolved now.
    """
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise Transient(f"the host name {host} cannot be resolved") from None
    addresses = list(dict.fromkeys(str(item[4][0]) for item in resolved))
    for address in addresses:
        check_address(host, address, allow_private=allow_private, is_named=is_named)
    return addresses


def check_address(host: str, address: str, *, allow_private: bool, is_named: bool = True) -> None:
    """Refuses an address that is not to be asked.

    Raises:
        Refused: it is not.
    """
    for real in _meant(ipaddress.ip_address(address.partition("%")[0])):
        name = host if host == address else f"{host} ({address})"
        if real.is_link_local or real in _METADATA:
            raise Refused(f"{name} is a link-local or metadata address, which is never asked")
        if real.is_multicast or real.is_unspecified:
            raise Refused(f"{name} is no address of a server")
        if not real.is_global and not allow_private:
            if not is_named:
                raise Refused(
                    f"redirected to {name}, a private or loopback address that the recipe does "
                    f"not name; if it is yours, set data.storage.allow_private: [{host}]"
                )
            raise Refused(
                f"{name} is a private or loopback address; if it is yours, set "
                "data.storage.allow_private: true"
            )


def _meant(address: Address) -> list[Address]:
    """The address, and the IPv4 address that is packed into it."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    packed: list[Address] = [address]
    if address.sixtofour is not None:
        packed.append(address.sixtofour)
    if address.teredo is not None:
        packed.append(address.teredo[1])
    if address in _NAT64:
        packed.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return packed
