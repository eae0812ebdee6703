"""Asynchronous writes as of io_submit(2), of which glibc has no wrappers."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct

_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_IOCB = struct.Struct("@QIIHhIQQqQII")
"""A struct iocb: data, key, rw_flags, opcode, priority, descriptor, buffer, size, offset, reserved, flags, resfd."""
_EVENT = struct.Struct("@QQqq")
_PWRITE = 1
_libc = ctypes.CDLL(None, use_errno=True)


def write_asynchronously(file: int, content: bytes) -> None:
    """Write to the beginning of a file that is open with O_DIRECT, and wait for the end of that."""
    setup, destroy, events, submit = _CALLS[platform.machine()]
    with mmap.mmap(-1, len(content)) as memory:
        memory[:] = content
        start = ctypes.c_char.from_buffer(memory)
        context = ctypes.c_ulong()
        _call(setup, 1, ctypes.byref(context))
        try:
            write = _IOCB.pack(0, 0, 0, _PWRITE, 0, file, ctypes.addressof(start), len(content), 0, 0, 0, 0)
            block = ctypes.create_string_buffer(write, len(write))
            _call(submit, context, 1, ctypes.byref(ctypes.c_void_p(ctypes.addressof(block))))
            event = ctypes.create_string_buffer(_EVENT.size)
            _call(events, context, 1, 1, event, None)
            _, _, written, _ = _EVENT.unpack(event)
            assert written == len(content)
        finally:
            _call(destroy, context)
            del start


def _call(number: int, *arguments: object) -> None:
    if _libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
