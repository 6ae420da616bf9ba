"""Where a job's files lie: a folder of this machine or of an object store, reached through pyarrow's file systems.

It opens, lists, writes and removes whole files, and knows nothing of what is in them.
"""

from __future__ import annotations

import glob
import io
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.fs as pafs

from cast_ray.errors import InputError, describe

# What a file's name ends with, and the codec that it was packed with.
CODECS = {".gz": "gzip", ".zst": "zstd"}
# A file appears there only when it was sent whole, and a rename is a copy.
_OBJECT_STORES = frozenset({"s3", "gcs", "abfs"})
_PARTIAL = ".partial"


@dataclass(frozen=True)
class Storage:
    """A place in a file system. path: in the file system's own form. shown: as the user wrote it."""

    filesystem: Any
    path: str
    shown: str

    @classmethod
    def of(cls, field: str, location: str) -> Storage:
        """From a path of this machine or a URL. Raises InputError, naming field, for one that leads nowhere."""
        if "://" not in location:
            return cls(pafs.LocalFileSystem(), str(Path(location).expanduser().absolute()), location)
        try:
            filesystem, path = pafs.FileSystem.from_uri(location)
        except pa.ArrowInvalid as error:
            remedy = "Known are local paths, file://, s3://, gs://, abfs:// and hdfs://"
            raise InputError(
                describe(field, location, f"is no URL that can be read ({_line(error)})", remedy)
            ) from None
        except (OSError, ImportError, pa.ArrowException) as error:
            raise InputError(describe(field, location, f"cannot be reached ({_line(error)})", _credentials())) from None
        return cls(filesystem, path, location)

    @property
    def is_local(self) -> bool:
        return self.filesystem.type_name == "local"

    def join(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}" if name else self.path

    def info(self, name: str = "") -> Any:
        """pyarrow's FileInfo of a file in this place, or of the place itself."""
        try:
            return self.filesystem.get_file_info(self.join(name))
        except OSError as error:
            problem = f"cannot be reached ({_line(error)})"
            raise InputError(describe("path", self.shown, problem, _credentials())) from None

    def is_file(self, name: str = "") -> bool:
        return bool(self.info(name).type == pafs.FileType.File)

    def is_folder(self) -> bool:
        return bool(self.info().type == pafs.FileType.Directory)

    def files(self, recursive: bool = False) -> dict[str, int]:
        """Names below this place and their sizes in bytes, sorted by name; none where it does not exist."""
        selector = pafs.FileSelector(self.path, recursive=recursive, allow_not_found=True)
        try:
            found = self.filesystem.get_file_info(selector)
        except OSError as error:
            problem = f"cannot be listed ({_line(error)})"
            raise InputError(describe("path", self.shown, problem, _credentials())) from None
        root = self.path.rstrip("/") + "/"
        sizes = {item.path.removeprefix(root): item.size for item in found if item.type == pafs.FileType.File}
        return dict(sorted(sizes.items()))

    def matches(self) -> list[str]:
        """Files whose path fits this one read as a pattern (`*`, `?`, `[...]`, and `**` for folders)."""
        if self.is_local:
            return sorted(path for path in glob.glob(self.path, recursive=True) if os.path.isfile(path))
        fixed = self.path[: min(self.path.index(sign) for sign in "*?[" if sign in self.path)].rpartition("/")[0]
        below = Storage(self.filesystem, fixed, self.shown).files(recursive=True)
        pattern = re.compile(_regex(self.path))
        return [path for path in (f"{fixed}/{name}" if fixed else name for name in below) if pattern.fullmatch(path)]

    def read(self, name: str = "") -> bytes:
        with self.filesystem.open_input_stream(self.join(name), compression=None) as file:
            return bytes(file.read())

    def write(self, name: str, data: bytes | Iterable[bytes]) -> None:
        """The whole file or nothing of it, and safe from a crash once this returns. data: bytes, or pieces of them."""
        chunks = (data,) if isinstance(data, bytes) else data
        target = self.join(name)
        if self.filesystem.type_name in _OBJECT_STORES:
            with self.filesystem.open_output_stream(target, compression=None) as file:
                file.writelines(chunks)
            return
        folder, _, last = target.rpartition("/")
        partial = f"{folder}/.{last}{_PARTIAL}"
        self.filesystem.create_dir(folder, recursive=True)
        if self.is_local:
            with open(partial, "wb") as local:
                local.writelines(chunks)
                local.flush()
                os.fsync(local.fileno())
            os.replace(partial, target)
            _sync_folder(folder)
            return
        with self.filesystem.open_output_stream(partial, compression=None) as file:
            file.writelines(chunks)
        self.filesystem.move(partial, target)

    def remove(self, name: str) -> None:
        """Gone afterwards, whether or not it was there."""
        if self.is_file(name):
            self.filesystem.delete_file(self.join(name))

    def remove_partials(self) -> None:
        """What a writer that was killed left half written."""
        for name in self.files():
            if name.startswith(".") and name.endswith(_PARTIAL):
                self.remove(name)


def open_seekable(filesystem: Any, path: str) -> BinaryIO:
    """A plain file for reading from anywhere in it."""
    return io.BufferedReader(filesystem.open_input_file(path))


def open_from_start(filesystem: Any, path: str) -> BinaryIO:
    """A file for reading from its start, unpacked where its name says that it is packed."""
    codec = CODECS.get(Path(path).suffix.lower())
    return io.BufferedReader(filesystem.open_input_stream(path, compression=codec))


def check_writable(output: Storage) -> None:
    """Raise InputError where the folder is not there and cannot be made, or nothing can be written into it."""
    try:
        if not output.is_local:
            probe = ".cast-ray-probe"
            output.write(probe, b"")
            output.remove(probe)
            return
        path = Path(output.path)
        nearest = next(folder for folder in (path, *path.parents) if folder.exists())
        if not nearest.is_dir():
            problem = "is a file" if nearest == path else f"lies below {nearest}, which is a file"
            raise InputError(describe("output", output.shown, problem, "Name a folder"))
        # Tried rather than asked for: permissions say nothing of quotas, or of file systems that take no files.
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        problem = f"cannot be written ({error.strerror or _line(error)})"
        raise InputError(describe("output", output.shown, problem, "Name a folder that you may write to")) from None


def _sync_folder(folder: str) -> None:
    """So that the new name itself survives a power cut."""
    handle = os.open(folder or "/", os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # some network file systems have no such thing, and keep names safe by themselves
    finally:
        os.close(handle)


def _regex(pattern: str) -> str:
    """A glob pattern as a regular expression; Python has one of its own only from 3.13 on."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    split = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    return "".join(parts.get(part) or (part if part.startswith("[") else re.escape(part)) for part in split)


def _credentials() -> str:
    return (
        "Check the name, the network and the credentials (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a "
        "role, and ?region=NAME or ?endpoint_override=HOST after the path)"
    )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
