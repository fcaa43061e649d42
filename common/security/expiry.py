"""When the certificate of a service ends, and warnings before that. Runs on the asyncio loop of the service."""

from __future__ import annotations

import asyncio
import datetime
import logging
from pathlib import Path

from common.base.counted import counted
from common.security.names import CA, CERTIFICATE

log = logging.getLogger(__name__)

WARN_DAYS = 14
_SOON = datetime.timedelta(days=WARN_DAYS)
_DAY_S, _CHECK_S = 86_400.0, 3600.0


def certificate_end(folder: str) -> datetime.datetime | None:
    """When the certificate in this folder, or that of its authority, ends; None if they cannot be read now."""
    from cryptography import x509

    try:
        own = x509.load_pem_x509_certificate((Path(folder) / CERTIFICATE).read_bytes())
        authorities = x509.load_pem_x509_certificates((Path(folder) / CA).read_bytes())
    except (OSError, ValueError):  # they are being replaced
        return None
    ends = [each.not_valid_after_utc for each in authorities if each.subject == own.issuer]
    return min(own.not_valid_after_utc, max(ends, default=own.not_valid_after_utc))


async def warn_before_end(folder: str) -> None:
    """Until cancelled: log once a day, from `WARN_DAYS` before, that the certificate in this folder ends."""
    while True:
        ends, now = certificate_end(folder), datetime.datetime.now(datetime.UTC)
        wait_s = _CHECK_S
        if ends is not None and ends - now < _SOON:
            ended = ends <= now
            log.log(
                logging.ERROR if ended else logging.WARNING,
                "the certificate in %s %s on %s%s: issue it again (kvrelay keys issue) and copy the folder here",
                folder,
                "ended" if ended else "ends",
                f"{ends:%Y-%m-%d %H:%M} UTC",
                "; other services refuse it" if ended else f", in {counted((ends - now).days, 'day')}",
            )
            wait_s = _DAY_S if ended else min(_DAY_S, (ends - now).total_seconds() + 1.0)
        await asyncio.sleep(wait_s)
