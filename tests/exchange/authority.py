"""Certificates for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.servers import program


class Ca:
    """A certificate authority, made by openssl(1)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._run("req", "-x509", *self._key("ca"), "-subj", "/CN=lab", "-days", "2", "-out", "ca.crt")

    def issue(self, into: Path) -> Path:
        """Write the three files of a node."""
        self._run("req", *self._key("tls"), "-subj", "/CN=node", "-out", "tls.csr")
        signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1")
        self._run("x509", "-req", "-in", "tls.csr", *signed, "-out", "tls.crt")
        into.mkdir(exist_ok=True)
        for name in ("tls.crt", "tls.key", "ca.crt"):  # replaced, as the kubelet does
            beside = into / f"{name}.new"
            beside.write_bytes((self.folder / name).read_bytes())
            beside.replace(into / name)
        return into

    def _key(self, name: str) -> tuple[str, ...]:
        return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key")

    def _run(self, *arguments: str) -> None:
        openssl = program("openssl", package="openssl")
        subprocess.run([openssl, *arguments], cwd=self.folder, check=True, capture_output=True)
