"""Folds the files of a ledger into one SQLite file, to be asked with SQL and read fast.

The lines are stored as they are, with file and line number as their key, so that building again, or with more files,
changes nothing that is there already; a file that has been deleted since stays known. What SQL asks are views on them.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsilent.errors import UsageError
from unsilent.ledger.entries import parse
from unsilent.ledger.reading import Contents, Problem, fold, read_lines

_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS lines (
    file TEXT NOT NULL, line INTEGER NOT NULL, run TEXT NOT NULL, kind TEXT NOT NULL, time REAL NOT NULL,
    step INTEGER NOT NULL, body TEXT NOT NULL, PRIMARY KEY (file, line)
);
CREATE TABLE IF NOT EXISTS problems (
    file TEXT NOT NULL, line INTEGER NOT NULL, reason TEXT NOT NULL, PRIMARY KEY (file, line)
);
CREATE VIEW IF NOT EXISTS runs AS
    SELECT run, min(time) AS started, max(time) AS last, max(json_extract(body, '$.worked')) AS worked,
        max(json_extract(body, '$.passed')) AS passed, max(json_extract(body, '$.directory')) AS directory,
        max(json_extract(body, '$.mode')) AS mode, max(json_extract(body, '$.exit_code')) AS exit_code
    FROM lines GROUP BY run;
CREATE VIEW IF NOT EXISTS places AS
    SELECT lines.run, json_extract(place.value, '$.rank') AS rank, json_extract(place.value, '$.node') AS node,
        json_extract(place.value, '$.device') AS device
    FROM lines, json_each(lines.body, '$.places') AS place WHERE lines.kind = 'run_started';
CREATE VIEW IF NOT EXISTS verdicts AS
    SELECT run, file, line, time, step, json_extract(body, '$.verdict') AS verdict,
        json_extract(body, '$.check') AS check_name, json_extract(body, '$.site') AS site,
        json_extract(body, '$.action') AS action, json_extract(body, '$.would') AS would,
        json_extract(body, '$.reason') AS reason
    FROM lines WHERE kind = 'verdict';
CREATE VIEW IF NOT EXISTS suspects AS
    SELECT lines.run, lines.file, lines.line, lines.time, lines.step,
        json_extract(lines.body, '$.verdict') AS verdict, json_extract(suspect.value, '$.rank') AS rank,
        json_extract(suspect.value, '$.node') AS node, json_extract(suspect.value, '$.device') AS device
    FROM lines, json_each(lines.body, '$.suspects') AS suspect WHERE lines.kind = 'verdict';
"""
_MOUNTS = Path("/proc/self/mounts")
_NETWORK = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb", "smbfs", "smb2", "smb3", "afs", "ncpfs", "9p", "ceph", "glusterfs", "lustre", "gpfs",
        "beegfs", "ocfs2", "gfs2", "pvfs2", "orangefs", "panfs", "wekafs", "virtiofs", "coda",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Built:
    """What a build did.

    Attributes:
        lines: lines in the database afterwards; ``added``: of those, how many are new.
        runs: runs in it.
        journal: SQLite's journal mode, ``wal`` or ``delete``; ``notice``: why it is not ``wal``, "" when it is.
        problems: what was left out of the files.
    """

    lines: int
    added: int
    runs: int
    journal: str
    notice: str
    problems: tuple[Problem, ...]


def build(directory: str | Path, out: str | Path) -> Built:
    """Fold all files of a ledger directory into the SQLite file ``out``.

    Raises:
        UsageError: there is no such directory, or ``out`` cannot be written or is something else.
    """
    path = Path(out)
    kind, mount = file_system_of(path, _mounts())
    network = is_network(kind)
    notice = ""
    if network:
        notice = (
            f"{path} lies on a network file system ({kind} at {mount}): SQLite's WAL needs memory that all its users "
            "share, which machines do not have, so it is refused there and the rollback journal is used; build on a "
            "local disk to read while it is being built"
        )
    problems: list[Problem] = []
    # Listed before anything is made: a wrong directory leaves no empty database behind.
    found = list(read_lines(directory, problems))
    with _opened(path) as database:
        if database.execute("PRAGMA user_version").fetchone()[0] > _VERSION:
            raise UsageError(f"{path}: a newer version of unsilent has made it; build into another file")
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        if tables and "lines" not in tables:
            raise UsageError(f"{path}: it is a database of something else; build into another file")
        (journal,) = database.execute(f"PRAGMA journal_mode={'DELETE' if network else 'WAL'}").fetchone()
        with database:
            for statement in _SCHEMA.split(";\n"):
                database.execute(statement)
            database.execute(f"PRAGMA user_version={_VERSION}")
            before = _count(database, "SELECT count(*) FROM lines")
            database.executemany(
                "INSERT OR REPLACE INTO lines VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    (one.file, one.number, one.entry.run, one.entry.kind, one.entry.time, one.entry.step, one.text)
                    for one in found
                ),
            )
            database.executemany(
                "INSERT OR REPLACE INTO problems VALUES (?, ?, ?)",
                ((problem.file, problem.line, problem.reason) for problem in problems),
            )
            # A line that was cut off when it was looked at before may be whole by now.
            database.execute("DELETE FROM problems WHERE (file, line) IN (SELECT file, line FROM lines)")
        lines = _count(database, "SELECT count(*) FROM lines")
        runs = _count(database, "SELECT count(DISTINCT run) FROM lines")
        with suppress(sqlite3.OperationalError):  # somebody is reading it: it stays as it is
            # What is left is one file that can be copied, and read where nothing may be written.
            database.execute("PRAGMA journal_mode=DELETE")
        return Built(
            lines=lines, added=lines - before, runs=runs, journal=journal, notice=notice, problems=tuple(problems)
        )


def read_database(path: str | Path) -> Contents:
    """The runs of a file that :func:`build` has made.

    Raises:
        UsageError: there is no such file, or it is something else.
    """
    if not Path(path).is_file():
        raise UsageError(f"{path}: there is no such file")
    with _opened(Path(path), read_only=True) as database:
        rows = database.execute("SELECT file, line, body FROM lines ORDER BY file, line").fetchall()
        known = database.execute("SELECT file, line, reason FROM problems ORDER BY file, line").fetchall()
    problems = [Problem(file=file, line=line, reason=reason) for file, line, reason in known]
    entries: list[Any] = []
    for file, line, body in rows:
        try:
            entries.append(parse(body))
        except (ValueError, TypeError) as error:
            problems.append(Problem(file=file, line=line, reason=str(error)))
    return fold(entries, problems)


def file_system_of(path: Path, mounts: str) -> tuple[str, str]:
    """The type of the file system that a path lies on, and where it is mounted; two empty texts when nobody knows.

    Args:
        mounts: the content of ``/proc/self/mounts``.
    """
    where = path.resolve()
    best = ("", "")
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[1])  # a blank stands there as \040
        inside = where == Path(mount) or Path(mount) in where.parents
        # Of two on the same place the later one is on top.
        if inside and len(mount) >= len(best[1]):
            best = (fields[2], mount)
    return best


def is_network(file_system: str) -> bool:
    """Whether machines share it. What FUSE brings in may be anything, mostly a remote store, so it counts as shared."""
    return file_system in _NETWORK or file_system == "fuse" or file_system.startswith("fuse.")


def _mounts() -> str:
    try:
        return _MOUNTS.read_text("utf-8", "replace")
    except OSError:
        return ""


@contextmanager
def _opened(path: Path, *, read_only: bool = False) -> Generator[sqlite3.Connection]:
    try:
        if not read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
        with closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode={'ro' if read_only else 'rwc'}", uri=True)
        ) as opened:
            yield opened
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from None
    except sqlite3.Error as error:
        what = "is no ledger that `unsilent ledger build` has made" if read_only else "cannot be built"
        raise UsageError(f"{path}: {what} ({error})") from None


def _count(database: sqlite3.Connection, query: str) -> int:
    return int(database.execute(query).fetchone()[0])
