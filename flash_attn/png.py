"""Grayscale pictures, for which a library of pictures would be the only thing that it is needed for."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence


def write_png(path: str, rows: Sequence[bytes], width: int) -> None:
    """Rows of `width` bytes, 0 black, 255 white. Source: the PNG specification (ISO/IEC 15948), color type 0."""
    header = struct.pack(">IIBBBBB", width, len(rows), 8, 0, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for name, content in ((b"IHDR", header), (b"IDAT", data), (b"IEND", b"")):
            check = struct.pack(">I", zlib.crc32(name + content))
            file.write(struct.pack(">I", len(content)) + name + content + check)
