"""API keys: who may ask, and how much. Keys are kept as SHA-256 hashes, and compared in constant time.

A plain hash is enough because keys are 32 random bytes, which nobody can guess; `new_key` makes them. The file is read
again when it changes, so a key can be withdrawn without a restart. Limits hold for each API process by itself.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import Field

from cast_ray.config import Settings
from cast_ray.errors import ConfigError, describe
from cast_ray.serve.refusal import Refusal

PREFIX = "sk-cast-"
REREAD_S = 2.0
LONGEST = 512


class KeyEntry(Settings):
    """One key in the file."""

    name: str = Field(min_length=1, max_length=64, description="who uses it; it owns the files that it uploads")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="SHA-256 of the key, in hexadecimal")
    requests_per_minute: int | None = Field(None, ge=1, description="requests a minute; default: any number")
    tokens_per_minute: int | None = Field(None, ge=1, description="tokens read and written a minute; default: any")
    concurrency: int | None = Field(None, ge=1, description="requests at once; default: any number")
    share_lookups: bool | None = Field(
        None, description="later requests of this key may look in its finished answers; default: the server's setting"
    )


class KeysFile(Settings):
    """The file: `keys: [{name, sha256, …}]`."""

    keys: tuple[KeyEntry, ...] = Field(description="at least one key")


def new_key() -> tuple[str, str]:
    """A key to give away, and its hash for the file."""
    key = PREFIX + secrets.token_urlsafe(32)
    return key, hash_key(key)


def hash_key(key: str) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass
class Bucket:
    """So many a minute, evenly: what is not used up is saved for at most a minute. It may be overdrawn, and then fills
    up first."""

    per_minute: int
    level: float = math.nan
    at: float = 0.0

    def refill(self, now: float) -> float:
        """What there is now."""
        if math.isnan(self.level):
            self.level = float(self.per_minute)
        else:
            self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / 60)
        self.at = now
        return self.level

    def wait(self, wanted: float, now: float) -> float:
        """Seconds until there is `wanted`; 0 when there is."""
        return max(0.0, (wanted - self.refill(now)) * 60 / self.per_minute)


@dataclass
class Caller:
    """Who asks, with what is left of his limits. `owner` is None where no key is needed."""

    owner: str | None = None
    requests: Bucket | None = None
    tokens: Bucket | None = None
    concurrency: int | None = None
    clock: Callable[[], float] = time.monotonic
    running: int = 0
    share_lookups: bool | None = None

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """One request. Refusal (429) where it is beyond a limit."""
        now = self.clock()
        if self.concurrency is not None and self.running >= self.concurrency:
            raise _limited(f"This key may have {self.concurrency} requests at once.", 1.0)
        if self.tokens is not None and (wait := self.tokens.wait(1, now)):
            raise _limited(f"This key may use {self.tokens.per_minute} tokens a minute.", wait)
        if self.requests is not None and (wait := self.requests.wait(1, now)):
            raise _limited(f"This key may send {self.requests.per_minute} requests a minute.", wait)
        if self.requests is not None:
            self.requests.level -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def lookup_scope(self, default: bool) -> str | None:
        """Among whose requests answers may be looked up in: this caller's own, or None, which is nobody's."""
        shares = default if self.share_lookups is None else self.share_lookups
        return f"key {self.owner or ''}" if shares else None

    def used(self, tokens: int) -> None:
        """Tokens read and written for a request of this caller."""
        if self.tokens is not None:
            self.tokens.refill(self.clock())
            self.tokens.level -= tokens

    def headers(self) -> dict[str, str]:
        """What is left, in OpenAI's headers."""
        found = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.refill(self.clock()))))
        return found


def _limited(message: str, wait: float) -> Refusal:
    return Refusal(429, message, code="rate_limit_exceeded", retry_after=max(1, math.ceil(wait)))


@dataclass
class Keyring:
    """The keys of a file. Raises ConfigError from `load` when it is not one."""

    path: Path
    clock: Callable[[], float] = time.monotonic
    _callers: dict[str, Caller] = field(default_factory=dict)
    _stamp: tuple[int, int] | None = None
    _looked: float = -math.inf

    def load(self) -> None:
        """Read the file. Callers whose limits did not change keep what they have used."""
        try:
            raw = yaml.safe_load(self.path.read_text(encoding="utf-8"))
            stamp = self._file_stamp()
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            problem = f"cannot be read ({type(error).__name__})"
            raise ConfigError(describe("keys_file", str(self.path), problem, "Check path and YAML")) from None
        entries = KeysFile(**raw if isinstance(raw, dict) else {"keys": raw}).keys
        fresh = {entry.sha256: self._caller(entry) for entry in entries}
        for digest, caller in fresh.items():
            old = self._callers.get(digest)
            if old is not None and _limits(old) == _limits(caller):
                fresh[digest] = old
        self._callers, self._stamp = fresh, stamp

    def check(self, header: str | None) -> Caller:
        """The caller of an Authorization header; Refusal (401) when it has no key, or a wrong one."""
        self._reload()
        scheme, _, key = (header or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key or len(key) > LONGEST:
            raise _unauthorised("No API key was given. Send it as 'Authorization: Bearer KEY'.", None)
        digest = hash_key(key)
        found: Caller | None = None
        # All of them, so that the time tells nothing of which came close.
        for known, caller in self._callers.items():
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise _unauthorised("The API key is not valid.", "invalid_api_key")
        return found

    def _reload(self) -> None:
        now = self.clock()
        if now - self._looked < REREAD_S:
            return
        self._looked = now
        try:
            if self._file_stamp() != self._stamp:
                self.load()
        except (OSError, ConfigError):
            return  # half written, or gone: what was read last holds until there is a whole file

    def _file_stamp(self) -> tuple[int, int]:
        found = self.path.stat()
        return found.st_mtime_ns, found.st_size

    def _caller(self, entry: KeyEntry) -> Caller:
        return Caller(
            entry.name,
            Bucket(entry.requests_per_minute) if entry.requests_per_minute else None,
            Bucket(entry.tokens_per_minute) if entry.tokens_per_minute else None,
            entry.concurrency,
            self.clock,
            share_lookups=entry.share_lookups,
        )


def _limits(caller: Caller) -> tuple[object, ...]:
    return (
        caller.owner,
        caller.requests.per_minute if caller.requests else None,
        caller.tokens.per_minute if caller.tokens else None,
        caller.concurrency,
        caller.share_lookups,
    )


def _unauthorised(message: str, code: str | None) -> Refusal:
    return Refusal(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})
