"""Creates the image URLs of requests: web addresses, or data URLs of synthetic images and of files.

A synthetic image consists of vertical stripes in random colours. Every image is different, so the server finds none in
its cache. All rows of an image are equal, so its PNG file has only a few kilobytes. The server's work does not depend
on the content, but only on the size in pixels.
"""

from __future__ import annotations

import base64
import re
import struct
import zlib
from pathlib import Path
from random import Random

import msgspec

from loadgen.workloads.input_files import read_input

SIDE_LIMIT = 16_384
PICTURE_BYTES = 1 << 26
"""Maximum size of an image file in bytes."""
IMAGE_TYPES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif"}
_URL = re.compile(r"(https?://|data:image/)", re.IGNORECASE)


class SyntheticImage(msgspec.Struct, frozen=True):
    """A synthetic PNG image. `str()` encodes the image and returns its data URL."""

    width: int
    height: int
    seed: str

    def __str__(self) -> str:
        return _data_url("png", self.png())

    def png(self) -> bytes:
        """Return the image as a PNG with 8-bit RGB channels (PNG specification, third edition, sections 5 and 11)."""
        row = Random(self.seed).randbytes(3 * self.width)  # noqa: S311 - colours, not secrets
        repeated_row = b"\2" + bytes(len(row))  # filter type Up: no difference from the row above
        header = struct.pack("!IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        data = zlib.compress(b"\0" + row + repeated_row * (self.height - 1), 1)
        chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack("!I", len(content)) + kind + content + struct.pack("!I", zlib.crc32(kind + content))
            for kind, content in chunks
        )


def parse_size(text: str) -> tuple[int, int]:
    """Return the width and height of a size such as `512x512`. Raises ValueError if the text is invalid."""
    result = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    width, height = map(int, result.groups()) if result else (0, 0)
    if not (0 < width <= SIDE_LIMIT and 0 < height <= SIDE_LIMIT):
        raise ValueError(f"write the size of an image as 512x512, each side up to {SIDE_LIMIT}")
    return width, height


def image_url(source: str, folder: Path) -> str:
    """Return `source` unchanged if it is a URL, otherwise a data URL with the content of the file `source`.

    File names are relative to `folder`. Raises ValueError if the file is unreadable or has no image suffix, such as
    `.png`."""
    if _URL.match(source):
        return source
    file = folder / source
    if file.suffix.lower() not in IMAGE_TYPES:
        raise ValueError(f"{source!r} does not have the suffix of an image: {', '.join(IMAGE_TYPES)}")
    try:
        return _data_url(IMAGE_TYPES[file.suffix.lower()], read_input(file, PICTURE_BYTES))
    except OSError as error:
        raise ValueError(f"cannot read the image {source}: {error.strerror}") from None


def _data_url(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
