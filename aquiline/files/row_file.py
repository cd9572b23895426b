"""JSON lines that grow over several runs of one command; its settings and counts stand in NAME.run.json beside them.

Killed at any byte, the file holds every finished row and maybe an unfinished line, which the next run cuts off.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from aquiline.config import UserError, require
from aquiline.files.disk import changes, json_object, read_json, write_json_atomic


class RowFile:
    """An open file of rows; `rows` are those of earlier runs, as far as `keys` asks.

    A row with `part` [k, n] is one of n that belong together: they stay together, or none does.
    """

    def __init__(self, path: Path, settings: dict[str, Any], keys: Sequence[str]) -> None:
        """UserError when it was written with other settings or by something else, or another process writes it."""
        self.path = path
        self.record_path = path.with_name(path.name + ".run.json")
        self._settings = json.loads(json.dumps(settings))  # as they will be read back
        try:
            self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        try:
            self._lock()
            self._check_settings()
            self.rows = self._cut_and_read(keys)
            write_json_atomic(self.record_path, {"settings": self._settings})
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "RowFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows that belong together."""
        try:
            self._file.write(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}; the same command goes on from there"
            ) from error

    def finish(self, counts: dict[str, Any]) -> None:
        """All rows are there: keep them, and what was counted."""
        os.fsync(self._file.fileno())
        write_json_atomic(self.record_path, {"settings": self._settings, "counts": counts})

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{self.path} is being written by another process") from error
        except OSError:  # a file system without locks
            pass

    def _check_settings(self) -> None:
        if os.fstat(self._file.fileno()).st_size == 0:
            return
        require(
            self.record_path.is_file(),
            f"{self.path} exists and was not written by this command (there is no {self.record_path.name}); "
            "give another output file",
        )
        before = read_json(self.record_path).get("settings")
        before = before if isinstance(before, dict) else {}
        changed = changes(before, self._settings)
        require(
            not changed,
            f"{self.path} was begun with other settings: {'; '.join(changed)}. Give the same ones, or another file",
        )

    def _cut_and_read(self, keys: Sequence[str]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        end, complete = 0, 0  # bytes and rows up to the last row, or group of rows, that is whole
        for line in self._lines():
            try:
                row = json_object(line)
            except UserError as error:
                raise UserError(f"{self.path}:{len(rows) + 1}: {error}; the file is damaged") from error
            rows.append({key: row[key] for key in keys if key in row})
            part = row.get("part", [1, 1])
            if part[0] == part[1]:
                end, complete = self._file.tell(), len(rows)
        self._file.seek(end)
        self._file.truncate()
        return rows[:complete]

    def _lines(self) -> Iterator[bytes]:
        while (line := self._file.readline()).endswith(b"\n"):
            yield line
