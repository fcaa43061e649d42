"""Pages of memory that two processes share, and the messages that hand a page over. Linux only.

The memory is a memfd. It has no name, so the kernel frees it when both processes have ended, even if they were killed.
The sender creates it and passes its descriptor over a Unix socket. Its size is sealed: if one process shrank it, the
other would be killed by SIGBUS.

    page i:  [ header, MAX_HEADER_BYTES reserved, memory pages allocated only when touched | payload, page_bytes ]
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
PAGE_MESSAGE = struct.Struct("<IIQ")
"""A message on the socket: page, bytes of its header, bytes of its payload."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_GREETING = struct.Struct("<8sIQ")
_MAGIC = b"kvring01"
GREETING_BYTES = _GREETING.size


class Ring:
    """`num_pages` pages of `page_bytes`, mapped into this process by `create` (sender) or `accept` (receiver)."""

    def __init__(self, fd: int, num_pages: int, page_bytes: int, *, writable: bool) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # Unmapped when its last view is gone, never while one exists.
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
    """A new ring, its descriptor (to pass on, then close), and the greeting to send with it. Raises: OSError."""
    fd = os.memfd_create("kvrelay-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_pages * _stride(page_bytes))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return Ring(fd, num_pages, page_bytes, writable=True), fd, _GREETING.pack(_MAGIC, num_pages, page_bytes)
    except OSError:
        os.close(fd)
        raise


def accept(greeting: bytes, fd: int) -> Ring:
    """Map the ring that a sender created, read-only. `fd` still belongs to the caller.

    Raises: ProtocolError if greeting or memory is malformed, OSError.
    """
    if len(greeting) != _GREETING.size:
        raise ProtocolError(f"a greeting has {_GREETING.size} bytes, this one has {len(greeting)}")
    magic, num_pages, page_bytes = _GREETING.unpack(greeting)
    if magic != _MAGIC or not 0 < num_pages <= MAX_PAGES or not 0 < page_bytes <= wire.MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"invalid greeting: {magic!r}, {num_pages} pages of {page_bytes} bytes")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != num_pages * _stride(page_bytes):
        raise ProtocolError("the shared memory is not sealed, or its size differs from the greeting's")
    return Ring(fd, num_pages, page_bytes, writable=False)


def _stride(page_bytes: int) -> int:
    return wire.MAX_HEADER_BYTES + -(-page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
