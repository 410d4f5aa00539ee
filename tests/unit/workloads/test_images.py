"""Pictures: synthetic ones are whole PNG files, small and all different; files and URLs of a dataset."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import pytest

from loadgen.servers.backends import BACKENDS
from loadgen.workloads import datasets
from loadgen.workloads.images import SyntheticImage
from loadgen.workloads.lengths import Fixed
from loadgen.workloads.prompts import id_prompts
from loadgen.workloads.request import Request
from loadgen.workloads.spec_syntax import WorkloadError
from loadgen.workloads.workload import Prompts, Synthetic, WorkloadSpec


def chunks(png: bytes) -> dict[bytes, bytes]:
    """Its chunks, each with its length and checksum as they should be."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    found, place = {}, 8
    while place < len(png):
        (length,) = struct.unpack("!I", png[place : place + 4])
        kind, content = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        assert png[place + 8 + length : place + 12 + length] == struct.pack("!I", zlib.crc32(kind + content))
        found[kind] = content
        place += 12 + length
    return found


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 7), (512, 512), (1920, 1080)])
def test_a_synthetic_picture_is_a_png_of_its_size(width: int, height: int) -> None:
    """RGB, every row there, all alike, in a few bytes per column."""
    png = SyntheticImage(width, height, "a").png()
    found = chunks(png)
    assert list(found) == [b"IHDR", b"IDAT", b"IEND"]
    assert struct.unpack("!IIBBBBB", found[b"IHDR"]) == (width, height, 8, 2, 0, 0, 0)
    rows = zlib.decompress(found[b"IDAT"])
    assert len(rows) == height * (1 + 3 * width)
    assert rows[1 + 3 * width :] == (b"\2" + bytes(3 * width)) * (height - 1)
    assert len(png) < 3 * width + width * height / 50 + 100


def test_the_same_seed_gives_the_same_picture_and_another_another() -> None:
    """Byte for byte, as a data URL."""
    one, same, other = (str(SyntheticImage(8, 8, seed)) for seed in "aab")
    assert one == same != other
    assert base64.b64decode(one.removeprefix("data:image/png;base64,")) == SyntheticImage(8, 8, "a").png()


def prompts(*, chat: bool) -> Prompts:
    order = WorkloadSpec(Synthetic(), Fixed(4), Fixed(2), 7, 3, warmup=1, image_sizes=((8, 8), (8, 4)))
    return Prompts(order, id_prompts([5, 6, 7], 7, numbers=4, shortest=4), len, chat=chat)


def test_each_request_has_pictures_of_its_own() -> None:
    """Of the sizes named, in warm-up requests too; how long such a prompt is nobody knows beforehand."""
    requests = [*prompts(chat=True).requests(), *prompts(chat=True).warmup()]
    assert [[(each.width, each.height) for each in request.images] for request in requests] == [[(8, 8), (8, 4)]] * 4
    assert len({str(image) for request in requests for image in request.images}) == 8
    assert {request.input_tokens for request in requests} == {0}
    assert [*prompts(chat=True).requests()] == requests[:3]


def test_pictures_need_a_chat() -> None:
    """Elsewhere they would be left out in silence."""
    with pytest.raises(WorkloadError, match="only chat requests can contain images"):
        next(iter(prompts(chat=False).requests()))


@pytest.mark.parametrize("server", [name for name, backend in BACKENDS.items() if "chat" in backend.dialects])
def test_a_message_has_them_as_parts(server: str) -> None:
    """The text first, then each picture, as all chat routes take them."""
    asked = Request(1, "What is it?", 0, 4, images=("https://x/y.png", SyntheticImage(1, 1, "a")))
    body = BACKENDS[server].dialects["chat"].encode(asked, "m")
    url = str(SyntheticImage(1, 1, "a")).encode()
    assert body.startswith(
        b'{"messages":[{"role":"user","content":[{"type":"text","text":"What is it?"},'
        b'{"type":"image_url","image_url":{"url":"https://x/y.png"}},{"type":"image_url","image_url":{"url":"%b"}}]}],'
        % url
    )


def test_a_dataset_names_urls_and_files(tmp_path: Path) -> None:
    """A file by its path from the dataset's folder; one that is missing or no picture is an error with its line."""
    png = SyntheticImage(2, 2, "a")
    (tmp_path / "a.png").write_bytes(png.png())
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "p", "image": "a.png"}\n{"prompt": "q", "images": ["https://x/y.jpg", "a.png"]}\n')
    assert [sample.images for sample in datasets.jsonl(file)] == [(str(png),), ("https://x/y.jpg", str(png))]
    for image, said in (
        ("b.png", "cannot read the image b.png: No such file"),
        ("a.txt", "does not have the suffix of an image"),
    ):
        file.write_text(f'{{"prompt": "p", "image": "{image}"}}\n')
        with pytest.raises(WorkloadError, match=f"line 1: .*{said}"):
            list(datasets.jsonl(file))
