"""TLS between nodes, with a CA made by openssl: who has no certificate gets nothing, and renewed ones are taken."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from datacache.core.errors import SettingsError
from datacache.exchange import server as server_module
from datacache.exchange.auth import HELLO, Identity, PeerRefusedError, introduce, welcome
from datacache.exchange.frames import FrameSocket, Kind, header
from datacache.exchange.server import Answer, FrameServer
from datacache.exchange.tls import Certificates
from tests.exchange.authority import Ca
from tests.promises import promise

KEY = b"0123456789abcdef"
BODY = bytes(range(256)) * 2**14  # 4 MiB


@pytest.fixture
def ca(tmp_path: Path) -> Ca:
    return Ca(tmp_path / "ca")


@pytest.fixture
def a(ca: Ca, tmp_path: Path) -> Identity:
    return Identity("lab", "a", KEY, Certificates(ca.issue(tmp_path / "a")))


@pytest.fixture
def b(ca: Ca, tmp_path: Path) -> Identity:
    return Identity("lab", "b", KEY, Certificates(ca.issue(tmp_path / "b")))


@contextlib.contextmanager
def serving(me: Identity) -> Iterator[tuple[str, int]]:
    """Listen as a node that answers with `BODY`; give its address."""
    server = FrameServer(
        lambda frame: (Answer(Kind.OK, frame.head, BODY) for _ in range(1)),
        most_bytes=2 * len(BODY),
        welcome=lambda frames: welcome(frames, me),
    )
    listener = socket.create_server(("127.0.0.1", 0))
    server.listen(listener)
    try:
        yield listener.getsockname()
    finally:
        server.close()


@contextlib.contextmanager
def framed(connection: socket.socket) -> Iterator[FrameSocket]:
    """Give frames on a connection; a test that waits for half a minute has failed."""

    def look() -> None:
        looks.append(0)
        assert len(looks) < 600, "nothing comes"

    looks: list[int] = []
    frames = FrameSocket(connection, look_every_s=0.05, receiving=look, sending=look)
    try:
        yield frames
    finally:
        frames.close()


def exchange(address: tuple[str, int], me: Identity) -> str:
    """Get `BODY` from the node `b`, as large as it is both ways; return the version of TLS."""
    with framed(socket.create_connection(address, timeout=30)) as frames:
        introduce(frames, me, "b")
        frames.send(Kind.CALL, 1, b"head", BODY)
        assert frames.receive(most_bytes=len(BODY), head_bytes=4, body_bytes=len(BODY))[2:] == (b"head", BODY)
        frames.send(Kind.CALL, 2, b"other", b"")
        assert frames.receive(most_bytes=len(BODY))[2:] == (b"other", BODY)
        return str(frames.connection.version()) if isinstance(frames.connection, ssl.SSLSocket) else ""


def test_frames_go_both_ways_over_tls_and_whole(a: Identity, b: Identity) -> None:
    with serving(b) as address:
        assert exchange(address, a) == "TLSv1.3"


@promise("With `DATACACHE_CLUSTER_TLS` a node speaks to none in the clear, nor to one without a certificate of its CA")
def test_a_node_in_the_clear_is_refused_at_both_ends_and_told(
    a: Identity, b: Identity, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(b) as address, pytest.raises(PeerRefusedError, match="speaks TLS") as refused:
        exchange(address, replace(a, tls=None))
    assert "DATACACHE_CLUSTER_TLS" in refused.value.hint
    caplog.clear()
    with serving(replace(b, tls=None)) as address, pytest.raises(OSError, match="speaks no TLS") as silent:
        exchange(address, a)
    assert "DATACACHE_CLUSTER_TLS" in silent.value.hint
    assert "the node that asks speaks TLS, and the one that is asked does not" in caplog.text


@promise("With `DATACACHE_CLUSTER_TLS` a node speaks to none in the clear, nor to one without a certificate of its CA")
def test_a_certificate_of_another_ca_opens_nothing_at_either_end(
    ca: Ca, a: Identity, b: Identity, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = replace(a, tls=Certificates(Ca(tmp_path / "other").issue(tmp_path / "stranger")))
    with serving(b) as address, pytest.raises(OSError, match="certificate is not accepted") as refused:
        exchange(address, stranger)
    assert "certificates of one CA" in refused.value.hint
    with serving(replace(b, tls=stranger.tls)) as address, pytest.raises(OSError, match="certificate is not accepted"):
        exchange(address, a)
    caplog.clear()
    trusts_us = Ca(tmp_path / "third").issue(tmp_path / "trusts us")
    shutil.copy(ca.folder / "ca.crt", trusts_us)
    with serving(b) as address, pytest.raises(OSError, match=r"certificate is not accepted|its daemon's log says why"):
        exchange(address, replace(a, tls=Certificates(trusts_us)))
    assert "hung up on: a certificate is not accepted (certificate signature failure)" in caplog.text


@promise("With `DATACACHE_CLUSTER_TLS` a node speaks to none in the clear, nor to one without a certificate of its CA")
def test_who_has_a_certificate_and_no_key_cannot_pass_an_introduction_on(a: Identity, b: Identity) -> None:
    def passed(source: FrameSocket, other: FrameSocket) -> None:
        frame = source.receive(most_bytes=4096)
        other.send(Kind(frame.kind), frame.number, frame.head, frame.body)

    with serving(b) as address, socket.create_server(("127.0.0.1", 0)) as between:

        def relay() -> None:
            connection, _ = between.accept()
            with framed(connection) as to_a, framed(socket.create_connection(address)) as to_b:
                assert a.tls is not None
                a.tls.secure(to_a, server=True)
                a.tls.secure(to_b, server=False)
                with contextlib.suppress(OSError):
                    for source, other in ((to_a, to_b), (to_b, to_a)) * 2:
                        passed(source, other)

        thread = threading.Thread(target=relay)
        thread.start()
        with pytest.raises(PeerRefusedError, match="keys of the two nodes differ"):
            exchange(between.getsockname(), a)
        thread.join()


@promise("Renewed certificates are taken without a restart")
def test_renewed_certificates_are_taken_and_broken_ones_are_not(
    a: Identity, b: Identity, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(b) as address:
        exchange(address, a)
        renewed = Ca(tmp_path / "next")
        renewed.issue(tmp_path / "b")
        with pytest.raises(OSError, match=r"certificate is not accepted|TLS"):
            exchange(address, a)
        renewed.issue(tmp_path / "a")
        exchange(address, a)
        (tmp_path / "a" / "tls.crt").write_text("half of")
        exchange(address, a)
    assert "those before them are" in caplog.text


@pytest.mark.parametrize("spoil", [Path.unlink, lambda file: file.write_text("no certificate")])
def test_a_folder_without_certificates_is_named(ca: Ca, tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    folder = ca.issue(tmp_path / "node")
    spoil(folder / "ca.crt")
    with pytest.raises(SettingsError, match=r"DATACACHE_CLUSTER_TLS .*ca\.crt"):
        Certificates(folder)


def test_an_introduction_over_tls_has_one_end_however_often_a_byte_of_it_comes(
    monkeypatch: pytest.MonkeyPatch, a: Identity, b: Identity
) -> None:
    monkeypatch.setattr(server_module, "_INTRODUCTION_S", 0.6)
    assert a.tls is not None

    def drip(connection: socket.socket) -> None:
        for byte in header(Kind.CALL, 0, 5, 200) + HELLO + bytes(200):
            connection.sendall(bytes([byte]))
            threading.Event().wait(0.3)

    with serving(b) as address, framed(socket.create_connection(address, timeout=30)) as frames:
        a.tls.secure(frames, server=False)
        with pytest.raises(OSError, match=r"(?i)reset|pipe|eof|closed"):
            drip(frames.connection)


def test_an_answer_under_way_when_a_node_stops_is_not_sent_in_the_clear(a: Identity, b: Identity) -> None:
    ours, theirs = socket.socketpair()
    with framed(ours) as client, framed(theirs) as server:
        meeting = threading.Thread(target=lambda: welcome(server, b))
        meeting.start()
        introduce(client, a, "b")
        meeting.join()
        server.connection.shutdown(socket.SHUT_RD)
        server.send(Kind.OK, 7, b"", b"content")
        assert client.receive(most_bytes=100) == (Kind.OK, 7, b"", b"content")
