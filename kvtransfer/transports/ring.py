"""Pages of memory that two processes share, and how one gives them to the other. Linux only.

The memory is a memfd: it has no name, so nothing is left of it when both processes are gone, however they went.
The sender makes it and passes its descriptor over a Unix socket. Its size is sealed: a peer that shrank it could
kill the other with SIGBUS.

    page i:  [ header, MAX_HEADER_BYTES reserved, pages of memory taken only when touched | payload, page_bytes ]
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct

import numpy as np

from common.base.errors import ProtocolError
from kvtransfer import wire

MAX_PAGES = 256
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_GREETING = struct.Struct("<8sIQ")
_MAGIC = b"kvring01"
GREETING_BYTES = _GREETING.size


class Ring:
    """`num_pages` pages of `page_bytes`, mapped here. Made by `create` at one end and by `accept` at the other."""

    def __init__(self, fd: int, num_pages: int, page_bytes: int, *, writable: bool) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # Unmapped when the last view of it is gone, never under one.
        memory = mmap.mmap(fd, num_pages * _stride(page_bytes), mmap.MAP_SHARED, access)
        self._bytes = np.frombuffer(memory, dtype=np.uint8)

    def header(self, page: int, size_bytes: int) -> np.ndarray:
        """[size_bytes], uint8: the first bytes of a page's header."""
        at = page * _stride(self.page_bytes)
        return self._bytes[at : at + size_bytes]

    def payload(self, page: int, size_bytes: int) -> np.ndarray:
        """[size_bytes], uint8: the first bytes of a page's payload."""
        at = page * _stride(self.page_bytes) + wire.MAX_HEADER_BYTES
        return self._bytes[at : at + size_bytes]


def create(num_pages: int, page_bytes: int) -> tuple[Ring, int, bytes]:
    """A new ring, its descriptor (to pass on, then close), and the greeting to send with it.

    Raises: OSError.
    """
    fd = os.memfd_create("kvrelay-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_pages * _stride(page_bytes))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return Ring(fd, num_pages, page_bytes, writable=True), fd, _GREETING.pack(_MAGIC, num_pages, page_bytes)
    except OSError:
        os.close(fd)
        raise


def accept(greeting: bytes, fd: int) -> Ring:
    """The ring that a peer made. `fd` stays the caller's.

    Raises: ProtocolError if it is not as it should be, OSError.
    """
    if len(greeting) != _GREETING.size:
        raise ProtocolError(f"a greeting of {len(greeting)} bytes")
    magic, num_pages, page_bytes = _GREETING.unpack(greeting)
    if magic != _MAGIC or not 0 < num_pages <= MAX_PAGES or not 0 < page_bytes <= wire.MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"a greeting of {magic!r} with {num_pages} pages of {page_bytes} bytes")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != num_pages * _stride(page_bytes):
        raise ProtocolError("its memory is not sealed or not as large as it says")
    return Ring(fd, num_pages, page_bytes, writable=False)


def _stride(page_bytes: int) -> int:
    return wire.MAX_HEADER_BYTES + -(-page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
