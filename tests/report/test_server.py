# SPDX-License-Identifier: Apache-2.0
"""The served report: made again when logs grow, only then; local; honest while there is none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import pytest

from sparsebalance_megatron.report.charts.figure import ReportError
from sparsebalance_megatron.report.server import PageServer, log_version

PAGE = "<!doctype html><html><head><title>x</title></head><body>{}</body></html>"


@contextmanager
def served(server: PageServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def fetched(address: str) -> tuple[int, str]:
    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(address, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_page_is_made_again_only_when_the_logs_change(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    log.write_text("one")
    made: list[int] = []

    def make_page() -> str:
        made.append(len(made))
        return PAGE.format(f"page {len(made)}")

    with served(PageServer(0, make_page, lambda: log_version(tmp_path), 7.0)) as address:
        status, page = fetched(address)
        assert (status, len(made)) == (200, 1)
        assert '<head><meta http-equiv="refresh" content="7">' in page
        assert "page 1" in fetched(f"{address}/?again")[1]
        log.write_text("one and two")
        assert "page 2" in fetched(address)[1]
        assert fetched(f"{address}/etc/passwd")[0] == 404
    assert len(made) == 2


def test_a_run_without_steps_is_waited_for() -> None:
    ready = False

    def make_page() -> str:
        if not ready:
            raise ReportError("no step <yet>")
        return PAGE.format("here")

    with served(PageServer(0, make_page, lambda: None, 1.0)) as address:
        status, page = fetched(address)
        assert status == 503 and "no step &lt;yet&gt;" in page and "refresh" in page
        ready = True
        assert "here" in fetched(address)[1]


def test_the_server_listens_on_this_machine_only() -> None:
    server = PageServer(0, str, str, 1.0)
    try:
        assert server.server_address[0] == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            PageServer(server.server_port, str, str, 1.0)
    finally:
        server.server_close()
