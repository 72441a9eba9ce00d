"""Execution equivalence of two SQL queries: equal results on small generated tables.

The tables come from CREATE TABLE statements, and SQLite runs the queries in memory. Rows are drawn from a fixed seed,
half of them from the literals that the queries compare a column with, so that conditions hold for some rows and fail
for others. Queries that agree on all of these databases may still differ on others.

Queries are written by a model, so SQLite may only read, call a few harmless functions, and take a bounded number of
steps.
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TypeAlias

__all__ = ["equivalent", "query_in"]

DATABASES = 6
ROWS = 12  # of each table
NEIGHBOURS = 3  # values of a number
MOST_ROWS = 10_000  # of a result; a longer one counts as an error
STEPS = 300  # thousands of instructions of SQLite's virtual machine for one query
NUMERIC = re.compile("INT|REAL|NUM|DEC|FLOA|DOUB", re.IGNORECASE)
WORDS = ("ash", "birch", "cedar", "elm")
FUNCTIONS = frozenset(
    (
        *("abs", "avg", "coalesce", "count", "date", "iif", "ifnull", "instr", "julianday", "length", "like", "lower"),
        *("ltrim", "max", "min", "nullif", "round", "rtrim", "strftime", "substr", "substring", "sum", "total", "trim"),
        *("typeof", "upper"),
    )
)
READING = frozenset((sqlite3.SQLITE_READ, sqlite3.SQLITE_SELECT))
CREATING = READING | {
    sqlite3.SQLITE_CREATE_INDEX,
    sqlite3.SQLITE_CREATE_TABLE,
    sqlite3.SQLITE_INSERT,
    sqlite3.SQLITE_UPDATE,
    sqlite3.SQLITE_TRANSACTION,
    sqlite3.SQLITE_REINDEX,
}
QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*\"""")
# a column compared with a literal
COMPARED = re.compile(
    r"""["`]?(\w+)["`]?\s*(?:=|<>|!=|<=?|>=?|\b(?:not\s+)?like\b|\bbetween\b)\s*('(?:[^']|'')*'|-?\d+(?:\.\d+)?)""",
    re.IGNORECASE,
)
LITERAL = re.compile(r"'(?:[^']|'')*'|(?<![\w.])-?\d+(?:\.\d+)?(?![\w.])")
FENCED = re.compile(r"```(?:\w*\n)?(.*?)(?:```|\Z)", re.DOTALL)

FAILURES = (sqlite3.Error, sqlite3.Warning, ValueError)  # ValueError: a null character
DIGITS = 18  # of numbers that fit SQLite's 64 bits

Value: TypeAlias = "str | int | float | None"
Rows: TypeAlias = "list[tuple[Value, ...]]"
Columns = Mapping[str, Sequence[tuple[str, bool]]]  # by table: name, and whether it is numeric


def query_in(text: str) -> str:
    """Extract the query of an answer: its first Markdown code block or the whole text, without the final semicolon."""
    fenced = FENCED.search(text)
    return (fenced[1] if fenced else text).strip().rstrip(";").strip()


def equivalent(answer: str, reference: str, context: str) -> bool | None:
    """True if two queries give the same results on every generated database.

    context  the CREATE TABLE statements

    The order of rows counts if the reference has an ORDER BY of its own, the order of columns always. An answer that
    fails differs. None if the statements or the reference fail in SQLite, or if the reference has no results at all.
    """
    mine, wanted = (query_in(text).encode("utf-8", "replace").decode() for text in (answer, reference))
    expected: list[Rows] = []
    results: list[Rows | None] = []
    try:
        with closing(_created(context)) as connection:
            columns = _columns(connection)
            names = {name.lower() for name in columns} | {n.lower() for c in columns.values() for n, _ in c}
            mine, wanted = _single_quoted(mine, names), _single_quoted(wanted, names)
            ordered = _is_ordered(wanted)
            for seed in range(DATABASES):
                _fill(connection, columns, (wanted, mine), seed)
                expected.append(_run(connection, wanted, ordered=ordered))
                try:
                    results.append(_run(connection, mine, ordered=ordered))
                except FAILURES:
                    results.append(None)
    except FAILURES:
        return None
    if all(value in (None, 0) for rows in expected for row in rows for value in row):
        return None
    return results == expected


def _created(context: str) -> sqlite3.Connection:
    """A database in memory with the tables. Raises sqlite3.Error for other statements than CREATE TABLE and INDEX."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        _restrict(connection, CREATING)
        connection.executescript(context)
        _restrict(connection, None)
    except BaseException:
        connection.close()
        raise
    return connection


def _restrict(connection: sqlite3.Connection, allowed: frozenset[int] | None) -> None:
    """Restrict statements to ``allowed`` actions and a limited number of steps; None: no limits."""
    if allowed is None:
        connection.set_authorizer(lambda *_: sqlite3.SQLITE_OK)
        connection.set_progress_handler(None, 0)
        return

    def authorise(action: int, first: str | None, second: str | None, *_: object) -> int:
        if action == sqlite3.SQLITE_FUNCTION:
            return sqlite3.SQLITE_OK if str(second).lower() in FUNCTIONS else sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK if action in allowed else sqlite3.SQLITE_DENY

    left = iter(range(STEPS))
    connection.set_authorizer(authorise)
    connection.set_progress_handler(lambda: int(next(left, None) is None), 1000)


def _columns(connection: sqlite3.Connection) -> dict[str, list[tuple[str, bool]]]:
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
    columns = {}
    for (table,) in tables:
        rows = connection.execute("SELECT name, type FROM pragma_table_info(?)", (table,)).fetchall()
        columns[table] = [(name, bool(NUMERIC.search(kind))) for name, kind in rows]
    return columns


def _fill(connection: sqlite3.Connection, columns: Columns, queries: Sequence[str], seed: int) -> None:
    """Replace the rows of all tables by those of a seed."""
    draws = random.Random(seed)
    literals = [value for query in queries for text in LITERAL.findall(query) for value in _values(text)]
    compared: dict[str, list[list[Value]]] = {}
    for query in queries:
        for name, literal in COMPARED.findall(query):
            if values := _values(literal):
                compared.setdefault(name.lower(), []).append(values)
    for table, described in columns.items():
        connection.execute(f"DELETE FROM {_name(table)}")
        marks = ", ".join("?" * len(described))
        for number in range(ROWS):
            row = [
                _cell(draws, numeric, compared.get(name.lower(), []), literals, number) for name, numeric in described
            ]
            connection.execute(f"INSERT OR IGNORE INTO {_name(table)} VALUES ({marks})", row)


def _cell(
    draws: random.Random, numeric: bool, own: Sequence[Sequence[Value]], literals: Sequence[Value], number: int
) -> Value:
    """A value: in the first rows, and often later, one that the column is compared with; else a common one, or any.

    own  the values of each literal that the column is compared with
    """
    if own and number < NEIGHBOURS:  # the same place in all columns, so that a row can meet several conditions
        values = draws.choice(own)
        return values[min(number, len(values) - 1)]
    kind = draws.random()
    if own and kind < 0.5:
        return draws.choice(draws.choice(own))
    common: Sequence[Value] = (*range(1, 6), number + 1) if numeric else WORDS
    fitting = [value for value in literals if isinstance(value, str) != numeric]
    return draws.choice(fitting if fitting and kind > 0.85 else common)


def _values(literal: str) -> list[Value]:
    """The value of a literal, and near ones: a number's neighbours, a text without the wildcards at its ends."""
    if literal.startswith("'"):
        text = literal[1:-1].replace("''", "'")
        return list(dict.fromkeys((text, text.strip("%"))))
    if len(literal) > DIGITS:
        return []
    number = float(literal) if "." in literal else int(literal)
    return [number, number + 1, number - 1]


def _run(connection: sqlite3.Connection, query: str, *, ordered: bool) -> Rows:
    """The rows of a query, sorted unless they are ``ordered``. Raises one of ``FAILURES``."""
    _restrict(connection, READING)
    try:
        cursor = connection.execute(query)
        fetched = cursor.fetchmany(MOST_ROWS + 1)
    finally:
        _restrict(connection, None)
    if cursor.description is None or len(fetched) > MOST_ROWS:
        raise sqlite3.DataError(f"no query, or a result of more than {MOST_ROWS} rows")
    rows = [tuple(map(_plain, row)) for row in fetched]
    return rows if ordered else sorted(rows, key=lambda row: [(isinstance(value, str), str(value)) for value in row])


def _plain(value: Value) -> Value:
    """A value without rounding errors; 2.0 is 2."""
    if not isinstance(value, float):
        return value
    rounded = round(value, 6)
    return int(rounded) if rounded.is_integer() else rounded


def _single_quoted(query: str, names: set[str]) -> str:
    """The query with double-quoted texts in single quotes, unless they are ``names`` of tables or columns."""

    def quoted(match: re.Match[str]) -> str:
        text = match[0]
        if text.startswith("'") or text[1:-1].lower() in names:
            return text
        return "'" + text[1:-1].replace('""', '"').replace("'", "''") + "'"

    return QUOTED.sub(quoted, query)


def _is_ordered(query: str) -> bool:
    """True if the outermost SELECT has an ORDER BY."""
    bare = QUOTED.sub("''", query)
    while (less := re.sub(r"\([^()]*\)", " ", bare)) != bare:
        bare = less
    return re.search(r"\border\s+by\b", bare, re.IGNORECASE) is not None


def _name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
