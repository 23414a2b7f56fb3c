"""Who may ask: API keys, and the tenant that each belongs to.

Before: an operator's file, or one key. After: `guard.py` asks for each request. Always: no key is kept, only its SHA-256,
which is enough for keys drawn at random (`new_key`: 256 bits); a look-up compares with every entry, in a time that says
nothing about which one was near.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..engine.intake import MAX_TENANT_LENGTH
from ..errors import InvalidInputError

MAX_ADDRESS_LENGTH = 64
"""Characters of an address of IP, with its zone: nothing longer is looked at, or remembered."""

PREFIX = "bt-"
_LINE = re.compile(r"(?P<tenant>\S+)\s+sha256:(?P<digest>[0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key of one tenant."""

    tenant: str
    digest: bytes  # [32], SHA-256 of the key


class Tenants:
    """The keys that are known. With none, nobody needs one: see `is_open`."""

    def __init__(self, entries: Iterable[KeyEntry] = ()) -> None:
        self._entries = tuple(entries)

    @classmethod
    def from_file(cls, path: str | Path) -> Tenants:
        """Reads lines `TENANT sha256:DIGEST`; empty lines and those that begin with `#` are passed over.

        Raises `InvalidInputError` for a file that cannot be read, a bad line, a key twice, or no key at all.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError("api_key_file", str(path), f"cannot be read: {error}") from None
        entries = [
            _entry(f"{path}:{number}", line.strip())
            for number, line in enumerate(lines, start=1)
            if line.strip() and not line.lstrip().startswith("#")
        ]
        if not entries:
            raise InvalidInputError("api_key_file", str(path), "holds no key")
        if len({entry.digest for entry in entries}) < len(entries):
            raise InvalidInputError("api_key_file", str(path), "holds a key twice")
        return cls(entries)

    @classmethod
    def of_keys(cls, keys: Iterable[tuple[str, str]]) -> Tenants:
        """(tenant, key) pairs, the keys in the clear: hashed at once."""
        return cls(KeyEntry(_tenant("api_key", tenant), digest_of(key)) for tenant, key in keys)

    def read_again(self, path: str | Path) -> int:
        """From the next request on the keys of this file count, and no others; returns how many. Raises as `from_file`, and the
        keys are as they were then."""
        self._entries = Tenants.from_file(path)._entries
        return len(self._entries)

    @property
    def is_open(self) -> bool:
        """There are no keys: only clients of this machine are served, as no tenant."""
        return not self._entries

    def tenant_of(self, key: str) -> str | None:
        """Whose key it is; None if nobody's."""
        digest = digest_of(key)
        found = None
        for entry in self._entries:  # all of them, whatever was found
            if hmac.compare_digest(entry.digest, digest):
                found = entry.tenant
        return found

    def check_host(self, host: str) -> None:
        """Raises `InvalidInputError` if without keys an address is to be listened on that other machines reach."""
        if self.is_open and not is_loopback(host):
            raise InvalidInputError(
                "host", host, "without a file of API keys only a loopback address (127.0.0.1) is listened on"
            )


def new_key(tenant: str) -> tuple[str, str]:
    """A new key, to be given to the tenant and kept nowhere, and the line for the file."""
    key = PREFIX + secrets.token_urlsafe(32)
    return key, f"{_tenant('tenant', tenant)} sha256:{digest_of(key).hex()}"


def digest_of(key: str) -> bytes:
    """[32] SHA-256 of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_loopback(host: str) -> bool:
    """Whether this names an address of this machine that no other one reaches."""
    return len(host) <= MAX_ADDRESS_LENGTH and _is_loopback(host)


@lru_cache(maxsize=1024)
def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _entry(place: str, line: str) -> KeyEntry:
    found = _LINE.fullmatch(line)
    if found is None:
        # The line is not shown: it may hold a key in the clear.
        raise InvalidInputError("api_key_file", place, "must be a line `TENANT sha256:DIGEST` of 64 hexadecimal digits")
    return KeyEntry(_tenant(place, found["tenant"]), bytes.fromhex(found["digest"]))


def _tenant(field: str, tenant: str) -> str:
    if not re.fullmatch(r"[^\s#]\S*", tenant) or not tenant.isprintable() or len(tenant.encode()) > MAX_TENANT_LENGTH:
        # A line that begins with # is a remark.
        raise InvalidInputError(field, tenant, f"a tenant is a printable word of 1..{MAX_TENANT_LENGTH} bytes, not behind a #")
    return tenant
