# SPDX-License-Identifier: Apache-2.0
"""A report that is made anew while its run goes on, for a browser on the same machine."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from sparsebalance_megatron.telemetry.jsonl import log_files
from sparsebalance_megatron.telemetry.step_log import step_log_path

ADDRESS = "127.0.0.1"
"""Logs are nobody else's business; from another machine, forward the port over ssh."""

_HEAD = "<head>"


class PageServer(HTTPServer):
    """Serves one page at ``/``; asked again after a change of the logs, it is made again.

    Args:
        port: of 127.0.0.1; 0 for any that is free.
        make_page: the page as HTML; a ValueError becomes a page that says it, and is tried again.
        version: equal as long as the page would be.
        refresh_s: seconds after which browsers ask again.

    Raises:
        OSError: the port cannot be had.
    """

    def __init__(
        self,
        port: int,
        make_page: Callable[[], str],
        version: Callable[[], object],
        refresh_s: float,
    ) -> None:
        super().__init__((ADDRESS, port), _Handler)
        self._make_page, self._version, self._refresh_s = make_page, version, refresh_s
        self._made: tuple[object, str] | None = None

    def page(self) -> tuple[int, str]:
        """HTTP status and HTML of what there is to show now."""
        version = self._version()
        if self._made is None or self._made[0] != version:
            try:
                self._made = version, self._make_page()
            except ValueError as error:
                text = f"<!doctype html><html>{_HEAD}<title>No report yet</title></head>"
                return 503, self._refreshing(f"{text}<body><p>{escape(str(error))}</p></html>")
        return 200, self._refreshing(self._made[1])

    def _refreshing(self, page: str) -> str:
        tag = f'<meta http-equiv="refresh" content="{self._refresh_s:g}">'
        return page.replace(_HEAD, _HEAD + tag, 1)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, PageServer)
        if self.path.partition("?")[0] != "/":
            self.send_error(404, "The report is at /")
            return
        status, page = server.page()
        body = page.encode("utf-8")
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests of one's own browser are no news."""


def log_version(*directories: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of change of the step logs; equal where nothing was written."""
    found = []
    for directory in directories:
        for path in log_files(step_log_path(directory)):
            status = path.stat()
            found.append((str(path), status.st_size, status.st_mtime_ns))
    return tuple(found)
