"""Warnings before a certificate ends."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path

import pytest
from support.certificates import made

from common.security import certificates, expiry
from common.security.certificates import Authority
from common.security.names import CA
from common.security.tls import Credentials


@pytest.mark.parametrize(
    ("days", "level", "says"),
    [(20, None, ""), (3, "WARNING", "UTC, in 2 days: issue it again"), (0, "ERROR", "other services refuse it")],
)
def test_a_certificate_that_ends_soon_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, days: int, level: str | None, says: str
) -> None:
    Authority.create(tmp_path / "ca").issue("d0", "node", tmp_path / "d0", days)

    async def main() -> None:
        task = asyncio.create_task(expiry.warn_before_end(str(tmp_path / "d0")))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(main())
    assert [record.levelname for record in caplog.records] == ([level] if level else [])
    assert says in caplog.text
    assert Credentials(str(tmp_path / "d0")).folder in caplog.text or level is None


def test_a_certificate_that_is_not_valid_yet_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "_BACKDATED", datetime.timedelta(days=-1))
    Authority.create(tmp_path / "ca").issue("d0", "node", tmp_path / "d0", 30)

    async def main() -> None:
        task = asyncio.create_task(expiry.warn_before_end(str(tmp_path / "d0")))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(main())
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert "UTC on: other services refuse it until then" in record.getMessage()


def test_it_is_told_again_every_day_and_when_it_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Authority.create(tmp_path / "ca").issue("d0", "node", tmp_path / "d0", 2)
    started = datetime.datetime.now(datetime.UTC)
    slept: list[float] = []

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
            return started + datetime.timedelta(seconds=sum(slept))

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 4:
            raise asyncio.CancelledError

    monkeypatch.setattr(expiry.datetime, "datetime", Clock)
    monkeypatch.setattr(expiry.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(expiry.warn_before_end(str(tmp_path / "d0")))
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "ERROR", "ERROR"]
    assert sum(slept[:2]) == pytest.approx(2 * 86400, abs=60)


def test_a_certificate_ends_with_its_authority_and_files_that_are_replaced_say_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    for file in (made() / "node").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    valid = expiry.certificate_validity(str(folder))
    assert valid is not None
    assert 0 < (valid.ends - datetime.datetime.now(datetime.UTC)).total_seconds() <= 86400
    (folder / CA).write_text("half of")
    assert expiry.certificate_validity(str(folder)) is None
