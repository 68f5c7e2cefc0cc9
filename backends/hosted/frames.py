"""Frames: a JSON message with a body of bytes, over a pipe; what a process and the process of its engine speak."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

_LENGTHS = struct.Struct("<QQ")


def write_frame(stream: BinaryIO, message: Mapping[str, Any], body: bytes = b"") -> None:
    """Send one frame.

    Raises:
        BrokenPipeError: nobody reads any more.
    """
    text = json.dumps(message).encode()
    stream.write(_LENGTHS.pack(len(text), len(body)))
    stream.write(text)
    stream.write(body)
    stream.flush()


def read_frame(stream: BinaryIO) -> tuple[dict[str, Any], bytes]:
    """The next frame.

    Raises:
        EOFError: the other side has closed the pipe, or died, be it in the middle of a frame.
    """
    text_length, body_length = _LENGTHS.unpack(_exactly(stream, _LENGTHS.size))
    message: dict[str, Any] = json.loads(_exactly(stream, text_length))
    return message, _exactly(stream, body_length)


def _exactly(stream: BinaryIO, length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data
