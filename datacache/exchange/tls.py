"""TLS between nodes: mutual TLS 1.3 with certificates of the cluster's CA, as a `kubernetes.io/tls` Secret has them.

`auth` uses it, before anything is said. Certificates do not name nodes, whose addresses change: any that the CA signed
is let through to the introduction, which is bound to the connection (`binding`), so that nobody between two nodes can
pass an introduction on. Any thread.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datacache.core.errors import DaemonError, SettingsError
from datacache.core.reloaded import Reloaded
from datacache.exchange.frames import MAGIC, FrameError, FrameSocket

log = logging.getLogger(__name__)
_FILES = ("tls.crt", "tls.key", "ca.crt")
_RECORD_BYTES = 2**14
_PIECE_BYTES = 2**18
"""The most that is sent before the connection looks around again."""
_HINT = "Set DATACACHE_CLUSTER_TLS on all nodes of the cluster, or on none."
CERTIFICATES_HINT = "Have certificates of one CA in DATACACHE_CLUSTER_TLS of all nodes, and clocks that are right."


class Certificates:
    """A folder with `tls.crt`, `tls.key` and `ca.crt`. Renewed files are taken for the next connection."""

    def __init__(self, folder: Path) -> None:
        """`SettingsError` if they cannot be read, or do not fit together."""
        self._folder = folder
        files = [folder / name for name in _FILES]
        self._contexts = Reloaded(files, self._load, named=f"the certificates in {folder}", log=log)
        try:
            self._contexts.get()
        except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
            raise SettingsError(
                f"DATACACHE_CLUSTER_TLS {folder} cannot be used: {exc}",
                hint=f"It is a folder with {', '.join(_FILES)}, such as a Secret of the type kubernetes.io/tls.",
            ) from exc

    def secure(self, frames: FrameSocket, *, server: bool) -> bytes:
        """Go on over TLS; return what binds an introduction to this connection. `DaemonError` for a node that speaks
        in the clear, and can be told; `FrameError` without a certificate of the CA on both sides; `OSError`."""
        plain = frames.connection
        plain.settimeout(frames.look_every_s)
        if server and _retried(frames, lambda: plain.recv(len(MAGIC), socket.MSG_PEEK)) == MAGIC:
            raise DaemonError("the node that was asked speaks TLS, and the one that asks does not", hint=_HINT)
        context = self._contexts.get()[server]
        secured = context.wrap_socket(plain, server_side=server, do_handshake_on_connect=False)
        frames.connection = secured
        try:
            _retried(frames, secured.do_handshake)
        except TimeoutError:
            raise
        except OSError as exc:
            why = "" if isinstance(exc, ssl.SSLEOFError) else f": {exc}"
            no_tls = f"the node speaks no TLS, and DATACACHE_CLUSTER_TLS is set here{why}"
            raise _not_accepted(exc) or FrameError(no_tls, hint=_HINT) from exc
        # Both sides have the same one only if they made the same keys; RFC 5929 has it as `tls-unique`.
        binding = secured.get_channel_binding("tls-unique")
        if not binding:  # without it somebody with a certificate could pass an introduction on
            raise FrameError("this TLS library tells nothing that is of one connection alone")
        return binding

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        certificate, key, ca = (self._folder / name for name in _FILES)
        made = []
        for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            with _named("ca.crt"):
                context.load_verify_locations(ca)
            with _named("tls.crt and tls.key"):
                context.load_cert_chain(certificate, key, password="")  # a key with one is refused, nobody is asked
            context.sslsocket_class = _TlsSocket
            made.append(context)
        made[1].num_tickets = 0  # no session is taken up again: each connection has keys of its own
        return made[0], made[1]


@contextlib.contextmanager
def _named(files: str) -> Iterator[None]:
    """Have the errors of OpenSSL name the files."""
    try:
        yield
    except (OSError, ValueError) as exc:
        raise ValueError(f"{files}: {getattr(exc, 'strerror', None) or exc}") from exc


def _not_accepted(exc: OSError) -> FrameError | None:
    """Return the error of a handshake that one side ended because of the other's certificate; None for another one."""
    if not isinstance(exc, ssl.SSLError) or not isinstance(exc.reason, str):
        return None
    why = getattr(exc, "verify_message", "") or exc.reason.lower().replace("_", " ")
    if not isinstance(exc, ssl.SSLCertVerificationError) and "ALERT" not in exc.reason:
        return None
    return FrameError(f"a certificate is not accepted ({why})", hint=CERTIFICATES_HINT)


def _retried(frames: FrameSocket, action: Any) -> Any:
    """Do something that may be tried again each time that the connection has looked around."""
    while True:
        try:
            return action()
        except TimeoutError:
            frames.look()


class _TlsSocket(ssl.SSLSocket):
    """TLS with the calls that `FrameSocket` makes. It has a timeout of its own: OpenSSL tries again by itself when one
    of the kernel's ends."""

    def sendmsg(self, parts: Sequence[Any], *_: Any) -> int:  # type: ignore[override]
        """Send some of the bytes. Short parts go in one record. After a timeout it is to be given the same again."""
        views = [memoryview(part) for part in parts if len(part)]
        some = views[0][:_PIECE_BYTES]
        if len(some) < _RECORD_BYTES and len(views) > 1:
            joined = bytearray()
            for view in views:
                joined += view[: _RECORD_BYTES - len(joined)]
            some = memoryview(joined)
        try:
            return self.send(some)
        except TimeoutError as exc:
            raise BlockingIOError from exc

    def recvmsg_into(self, buffers: Sequence[Any], *_: int) -> Any:  # type: ignore[override]
        """Receive some bytes into the first buffer that is not empty: a record at most, whatever the flags."""
        try:
            return self.recv_into(next(filter(len, buffers))), [], 0, None
        except TimeoutError as exc:
            raise BlockingIOError from exc
        except ssl.SSLError as exc:  # the other side may look at our certificate once the handshake is over here
            raise _not_accepted(exc) or exc from exc

    def shutdown(self, how: int) -> None:
        """Shut the connection down and stay with TLS: `SSLSocket` would send the rest of an answer in the clear."""
        socket.socket.shutdown(self, how)
