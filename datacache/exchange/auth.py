"""Two nodes of a cluster prove to each other that they have its key, before anything else is said.

    client → hello      cluster, node, the versions it speaks, a nonce
    server → OK         node, the version to speak, a nonce, HMAC-SHA256(key, "server" + both hellos)
    client → proof      HMAC-SHA256(key, "client" + both hellos)
    server → OK

Nonces are of this connection, so a recorded proof is worth nothing; the roles differ, so no proof can be sent back to
whoever made it. All of this is in frames of the oldest version; then both speak the newest that they have in common.
Over TLS (`tls`) the proofs also cover what is this connection's own. Without it nothing is encrypted: the network
between nodes must be one that tenants cannot listen to.
"""

from __future__ import annotations

import hmac
import json
import secrets
import ssl
from dataclasses import dataclass
from typing import Any

from datacache.core.errors import DaemonError, DatacacheError
from datacache.core.ipc import parse_object
from datacache.exchange.frames import OLDEST_VERSION, VERSION, FrameError, FrameSocket, Kind
from datacache.exchange.tls import CERTIFICATES_HINT, Certificates
from datacache.exchange.wire import decode_error, encode_error, expect_text

HELLO, PROOF = b"hello", b"proof"
_MOST_BYTES = 4096
_NONCE_BYTES = 32
# One node says these words and another one shows them: they name no "this" and no "other" node.
_KEYS_DIFFER = "the keys of the two nodes differ"
_KEYS_HINT = "Give all nodes of the cluster the same key: DATACACHE_CLUSTER_KEY_FILE."


class PeerRefusedError(DaemonError):
    """A node that is not let in, or does not let us in."""


@dataclass(frozen=True)
class Identity:
    """A node as it introduces itself, the key of its cluster, and what it speaks TLS with."""

    cluster: str
    node: str
    key: bytes
    tls: Certificates | None = None
    versions: tuple[int, int] = (OLDEST_VERSION, VERSION)
    """The oldest and the newest version of the exchange that it speaks."""

    def __repr__(self) -> str:
        return f"Identity({self.cluster!r}, {self.node!r})"


def introduce(frames: FrameSocket, me: Identity, wanted: str) -> None:
    """Be let in by the node `wanted`. `PeerRefusedError` if one of the two has not got the key, or if it is another
    node: whoever has the address of one that is gone could pass all this on to it. `OSError`."""
    binding = me.tls.secure(frames, server=False) if me.tls else b""
    frames.version = OLDEST_VERSION
    hello = _hello(me, {"versions": me.versions})
    try:
        frames.send(Kind.CALL, 0, HELLO, hello)
        answer = frames.receive(most_bytes=_MOST_BYTES)
    except (ConnectionError, ssl.SSLEOFError) as exc:
        if not me.tls:
            raise
        # It looks at our certificate once the handshake is over here, and we may not get to read what it says.
        hung_up = "the node hung up after the handshake of TLS; its daemon's log says why"
        raise FrameError(hung_up, hint=CERTIFICATES_HINT) from exc
    if answer.kind != Kind.OK:
        raise _refusal(answer.body)
    theirs, proof = bytes(answer.body[:-_PROOF_BYTES]), bytes(answer.body[-_PROOF_BYTES:])
    if not hmac.compare_digest(proof, _proof(me.key, b"server", hello, theirs, binding)):
        raise PeerRefusedError(_KEYS_DIFFER, hint=_KEYS_HINT)
    fields = _fields(theirs)
    version = fields.get("version")
    if not isinstance(version, int) or not me.versions[0] <= version <= me.versions[1]:
        raise _no_common_version(repr(version), me)
    if fields["node"] != wanted:
        raise PeerRefusedError(
            f"the node there is {fields['node']!r}, not {wanted!r}",
            hint="Give each node an address of its own, and the same in the settings of all.",
        )
    frames.send(Kind.CALL, 0, PROOF, _proof(me.key, b"client", hello, theirs, binding))
    answer = frames.receive(most_bytes=_MOST_BYTES)
    if answer.kind != Kind.OK:
        raise _refusal(answer.body)
    frames.version = version


def welcome(frames: FrameSocket, me: Identity) -> str:
    """Let a client in; return its node. `PeerRefusedError`, once the client was told, if it has not got the key;
    `OSError`."""
    try:
        return _welcome(frames, me)
    except DatacacheError as exc:
        frames.send(Kind.ERROR, 0, body=encode_error(exc))
        raise


def _welcome(frames: FrameSocket, me: Identity) -> str:
    frames.version = OLDEST_VERSION
    binding = me.tls.secure(frames, server=True) if me.tls else b""
    hello = bytes(_expected(frames, HELLO))
    fields = _fields(hello)
    if fields.get("cluster") != me.cluster:
        raise PeerRefusedError("the clusters' names differ", hint="Set the same DATACACHE_CLUSTER on all nodes.")
    oldest, newest = fields["versions"]
    version = min(newest, me.versions[1])
    if version < max(oldest, me.versions[0]):
        raise _no_common_version(f"{oldest} to {newest}", me)
    mine = _hello(me, {"version": version})
    frames.send(Kind.OK, 0, body=mine + _proof(me.key, b"server", hello, mine, binding))
    if not hmac.compare_digest(bytes(_expected(frames, PROOF)), _proof(me.key, b"client", hello, mine, binding)):
        raise PeerRefusedError(_KEYS_DIFFER, hint=_KEYS_HINT)
    frames.send(Kind.OK, 0)
    frames.version = version
    return str(fields["node"])


def _no_common_version(theirs: str, me: Identity) -> PeerRefusedError:
    mine = "{} to {}".format(*me.versions)
    return PeerRefusedError(
        f"the nodes have no version of the exchange in common: {theirs}, and {mine}", hint="Upgrade the older one."
    )


def _hello(me: Identity, more: dict[str, Any]) -> bytes:
    nonce = secrets.token_hex(_NONCE_BYTES)
    return json.dumps({"cluster": me.cluster, "node": me.node, "nonce": nonce} | more).encode()


_PROOF_BYTES = 32


def _proof(key: bytes, role: bytes, client: bytes, server: bytes, binding: bytes) -> bytes:
    lengths = b"%s %d %d " % (role, len(client), len(server))
    return hmac.digest(key, lengths + client + server + binding, "sha256")


def _expected(frames: FrameSocket, what: bytes) -> memoryview:
    frame = frames.receive(most_bytes=_MOST_BYTES)
    if (frame.kind, frame.head) != (Kind.CALL, what):
        raise FrameError("a node has to introduce itself first")
    return frame.body


def _fields(hello: bytes) -> dict[str, Any]:
    try:
        fields = parse_object(hello)
        for name in ("cluster", "node", "nonce"):
            expect_text(fields[name])
        versions = fields.setdefault("versions", [0, 0])
        if [type(each) for each in versions] != [int, int] or len(fields["nonce"]) != 2 * _NONCE_BYTES:
            raise ValueError("no versions, or no nonce")
    except (KeyError, TypeError, ValueError) as exc:
        raise PeerRefusedError("that is no introduction of a node") from exc
    return fields


def _refusal(body: memoryview) -> PeerRefusedError:
    error = decode_error(body)
    return PeerRefusedError(f"refused: {error.message}", hint=error.hint)
