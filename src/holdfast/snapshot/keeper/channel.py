"""Connections between the keepers of one run: mutual TLS 1.3 with a key that the run makes for itself.

    RUN/keepers/identity.pem       private key and certificate, readable by the owner alone

The invariants: both ends prove that they have the run's key, and everything is encrypted, so another process on the network can
neither read nor request anything, nor relay a handshake; the file appears complete or not at all; nothing that arrives is
unpickled.
"""

import contextlib
import datetime
import os
import secrets
import socket
import ssl
import struct
from pathlib import Path
from typing import Any

import orjson

from holdfast.system.atomic_files import fsync
from holdfast.system.descriptors import open_private
from holdfast.system.errors import HoldfastError

IDENTITY = "identity.pem"
HANDSHAKE_SECONDS = 10.0
TIMEOUT = 30.0
LONGEST_MESSAGE = 1 << 20


class Channel:
    """One connection: JSON messages and raw bytes. A `with` statement closes it."""

    def __init__(self, connection: socket.socket, identity: Path, server: bool) -> None:
        connection.settimeout(HANDSHAKE_SECONDS)
        try:
            self._socket = _context(identity, server).wrap_socket(connection, server_side=server)
        except BaseException:
            connection.close()
            raise
        self._socket.settimeout(TIMEOUT)

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, message: Any) -> None:
        content = orjson.dumps(message)
        self._socket.sendall(struct.pack("<I", len(content)) + content)

    def receive(self) -> Any:
        (length,) = struct.unpack("<I", self._exactly(4))
        if length > LONGEST_MESSAGE:
            raise HoldfastError(f"a peer sent a message of {length:,} bytes; at most {LONGEST_MESSAGE:,} are expected")
        return orjson.loads(self._exactly(length))

    def send_bytes(self, content: memoryview) -> None:
        self._socket.sendall(content)

    def receive_into(self, target: memoryview) -> None:
        done = 0
        while done < len(target):
            count = self._socket.recv_into(target[done:])
            if not count:
                raise ConnectionError("the peer closed the connection")
            done += count

    def _exactly(self, count: int) -> bytes:
        content = bytearray(count)
        self.receive_into(memoryview(content))
        return bytes(content)


def _context(identity: Path, server: bool) -> ssl.SSLContext:
    """Trusts the run's own certificate and no other, from any host."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(identity)
        context.load_verify_locations(identity)
    except (ssl.SSLError, OSError) as error:
        raise HoldfastError(
            f"{identity} cannot be used ({error}); remove it, and the keepers create a new one"
        ) from error
    return context


def run_identity(folder: Path) -> Path:
    """The file with the key and certificate of a run; the first keeper creates it."""
    path = folder / IDENTITY
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{IDENTITY}.{secrets.token_hex(8)}.tmp"
    try:
        with open(temporary, "xb", opener=open_private) as file:
            file.write(_new_identity())
        fsync(temporary)
        with contextlib.suppress(FileExistsError):  # another keeper was first
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _new_identity() -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "holdfast run")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Valid whatever the clocks of the nodes show: the key lives as long as the run folder.
        .not_valid_before(datetime.datetime(1990, 1, 1))
        .not_valid_after(datetime.datetime(2990, 1, 1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)
