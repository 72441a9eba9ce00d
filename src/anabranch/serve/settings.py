"""Settings of the server, each declared once for the command line and for Python."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from anabranch.declared import Option
from anabranch.errors import FileError, InputError

__all__ = ["Settings", "check", "is_loopback", "keys_of"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The server's address, its keys and its limits."""

    host: Annotated[str, Option("listen on this address")] = "127.0.0.1"
    port: Annotated[int, Option("listen on this port; 0: any free one")] = 8000
    api_keys: Annotated[
        tuple[str, ...], Option("require this API key; repeatable", flags=("--api-key",), metavar="KEY")
    ] = ()
    api_key_file: Annotated[Path | None, Option("require a key of this file, one a line", metavar="FILE")] = None
    no_key: Annotated[bool, Option("serve a public address without an API key", flags=("--no-key",))] = False
    names: Annotated[
        tuple[str, ...],
        Option("answer to this model name (default: the model's own); repeatable", flags=("--name",), metavar="NAME"),
    ] = ()
    origins: Annotated[
        tuple[str, ...],
        Option("let web pages of this origin call the server; repeatable", flags=("--cors",), metavar="ORIGIN"),
    ] = ()
    hosts: Annotated[
        tuple[str, ...],
        Option("without a key: also accept this Host header; repeatable", flags=("--allow-host",), metavar="NAME"),
    ] = ()
    rows: Annotated[int, Option("decode at most this many sequences at the same time")] = 32
    queue: Annotated[int, Option("let at most this many sequences wait; others get status 503")] = 64
    prefix_memory: Annotated[
        int | None, Option("keep keys and values of texts in so many MiB (default: a quarter of the free memory)")
    ] = None
    prefix_disk: Annotated[int, Option("keep them on disk too, in so many MiB, for after a restart")] = 0
    prefix_folder: Annotated[
        Path | None, Option("with --prefix-disk: keep them here (default: in the cache folder)", metavar="FOLDER")
    ] = None
    max_tokens: Annotated[int | None, Option("limit an answer to this many tokens (default: the context)")] = None
    max_body: Annotated[int, Option("limit a request to this many bytes")] = 8 * 2**20
    body_seconds: Annotated[float, Option("limit the time that a client takes to send a request")] = 30.0
    request_seconds: Annotated[float, Option("limit the time of a request, waiting included")] = 3600.0
    send_seconds: Annotated[float, Option("end a stream whose client reads nothing for so long")] = 60.0
    keep_alive: Annotated[float, Option("send a comment after so many seconds without an event")] = 10.0
    drain_seconds: Annotated[int, Option("on SIGTERM, let requests go on for so long")] = 30
    log_prompts: Annotated[
        bool, Option("log the text of prompts and answers, in traces too", flags=("--log-prompts",))
    ] = False


POSITIVE = ("rows", "max_tokens", "max_body", "body_seconds", "request_seconds", "send_seconds", "keep_alive")
NOT_NEGATIVE = ("queue", "drain_seconds", "prefix_memory", "prefix_disk")


def check(settings: Settings) -> None:
    """Raise InputError for a value out of range, and for a public address that is open to everyone."""
    for name in POSITIVE:
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise InputError(f"--{name.replace('_', '-')} must be positive, got {value}")
    for name, most in (("port", 65535), *((name, None) for name in NOT_NEGATIVE)):
        value = getattr(settings, name)
        if value is not None and (value < 0 or (most is not None and value > most)):
            limits = "at least 0" if most is None else f"between 0 and {most}"
            raise InputError(f"--{name.replace('_', '-')} must be {limits}, got {value}")
    if settings.no_key and (settings.api_keys or settings.api_key_file):
        raise InputError("--no-key contradicts the API keys that are given; leave it out")
    if not (is_loopback(settings.host) or settings.no_key or settings.api_keys or settings.api_key_file):
        raise InputError(
            f"--host {settings.host} can be reached by others, who would need no key; give --api-key or "
            "--api-key-file, or --no-key to serve everyone"
        )


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def keys_of(settings: Settings) -> tuple[bytes, ...]:
    """The API keys; none: the server is open. Raises InputError for an empty key, FileError for an unreadable file."""
    keys = list(settings.api_keys)
    if settings.api_key_file is not None:
        try:
            lines = settings.api_key_file.expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise FileError(
                f"cannot read the API keys in {settings.api_key_file}: {error}; correct the path"
            ) from error
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise InputError(f"{settings.api_key_file} contains no API key; put one on each line")
        keys += found
    if not all(keys):
        raise InputError("an API key is empty; give a longer one")
    return tuple(key.encode() for key in keys)
