"""A plugin of pytest: names below localhost, and below SUITES_DOMAIN, lead to the machine itself."""

import os
import socket

_lookup = socket.getaddrinfo
_local = tuple(filter(None, (".localhost", os.environ.get("SUITES_DOMAIN"))))


def _getaddrinfo(host, *args, **kwargs):
    name = host.decode() if isinstance(host, bytes) else host
    return _lookup("127.0.0.1" if name and str(name).endswith(_local) else host, *args, **kwargs)


socket.getaddrinfo = _getaddrinfo
