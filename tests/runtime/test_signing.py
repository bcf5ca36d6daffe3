"""What processes tell each other is signed, and nothing else is heard: the signatures alone.

Between processes, `tests/support/ranks.py` forges words.
"""

from __future__ import annotations

import os

import pytest

from rlhf_jax.runtime import signing
from rlhf_jax.runtime.signing import ForgedWord, Signer

RUN = b"the key of this run"


def test_what_is_signed_is_read_as_often_as_asked():
    sender, reader = Signer(RUN, 1), Signer(RUN, 0)
    for body in (b"", b"one", bytes(range(256)) * 100):
        word = sender.sign("name", body)
        assert [reader.check("name", word), reader.check("name", word, sender=1)] == [body, body]


@pytest.mark.parametrize("place", [0, 31, 32, 36, 43, 44, -1])
def test_a_changed_byte_is_noticed_wherever_it_stands(place):
    word = bytearray(Signer(RUN, 1).sign("name", b"a body"))
    word[place] ^= 1
    with pytest.raises(ForgedWord, match="not signed with this run's key"):
        Signer(RUN, 0).check("name", bytes(word))


@pytest.mark.parametrize("length", [0, 1, 31, 32, 43])
def test_a_word_that_is_cut_off_is_none(length):
    word = Signer(RUN, 1).sign("name", b"")
    assert len(word) == 44
    with pytest.raises(ForgedWord):
        Signer(RUN, 0).check("name", word[:length])


def test_a_word_counts_for_its_run_its_name_and_its_sender():
    word = Signer(RUN, 1).sign("name", b"body")
    for reader, name, sender in ((Signer(b"another", 0), "name", 1), (Signer(RUN, 0), "nam", 1)):
        with pytest.raises(ForgedWord, match="not signed with this run's key"):
            reader.check(name, word, sender)
    with pytest.raises(ForgedWord, match="signed by rank 1"):
        Signer(RUN, 0).check("name", word, sender=2)


def test_an_old_word_that_is_laid_again_is_refused():
    sender, reader = Signer(RUN, 1), Signer(RUN, 0)
    old, new = sender.sign("name", b"old"), sender.sign("name", b"new")
    assert reader.check("name", old) == b"old" and reader.check("name", new) == b"new"
    with pytest.raises(ForgedWord, match="old message"):
        reader.check("name", old)
    assert reader.check("name", new) == b"new"
    assert reader.check("name", Signer(RUN, 2).sign("name", b"its first")) == b"its first"


def test_what_is_kept_of_names_has_a_bound(monkeypatch):
    monkeypatch.setattr(signing, "MOST_NAMES", 8)
    sender, reader = Signer(RUN, 1), Signer(RUN, 0)
    for number in range(100):
        reader.check(f"name {number}", sender.sign(f"name {number}", b""))
    assert len(reader.newest) == 8


def test_a_secret_of_the_environment_is_not_handed_on(monkeypatch):
    monkeypatch.setenv(signing.KEY, " " + "k" * 32)
    monkeypatch.delenv(signing.KEY_FILE, raising=False)
    assert signing.read_secret() == b" " + b"k" * 32
    assert signing.KEY not in os.environ and signing.read_secret() is None


def test_a_secret_of_a_file_is_its_owners_alone(tmp_path, monkeypatch):
    path = tmp_path / "key"
    monkeypatch.setenv(signing.KEY_FILE, str(path))
    with pytest.raises(FileNotFoundError):
        signing.read_secret()
    path.write_text("k" * 64 + "\n")
    path.chmod(0o640)
    with pytest.raises(ValueError, match=r"RLHF_JAX_KEY_FILE: others may read .*key; chmod 600"):
        signing.read_secret()
    path.chmod(0o600)
    assert signing.read_secret() == b"k" * 64
    path.write_text("short")
    with pytest.raises(ValueError, match="a key of 5 characters can be guessed"):
        signing.read_secret()
