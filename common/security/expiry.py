"""When the certificate of a service is valid, and warnings before its end. Runs on the asyncio loop of the service."""

from __future__ import annotations

import asyncio
import datetime
import logging
from pathlib import Path
from typing import NamedTuple

from common.base.sentences import counted
from common.security.names import CA, CERTIFICATE

log = logging.getLogger(__name__)

WARN_DAYS = 14
_SOON = datetime.timedelta(days=WARN_DAYS)
_DAY_S, _CHECK_S = 86_400.0, 3600.0


class Validity(NamedTuple):
    """The period in which a certificate is valid."""

    begins: datetime.datetime
    ends: datetime.datetime


def certificate_validity(folder: str) -> Validity | None:
    """When both the certificate in this folder and its authority's are valid; None if they cannot be read now."""
    from cryptography import x509

    try:
        own = x509.load_pem_x509_certificate((Path(folder) / CERTIFICATE).read_bytes())
        authorities = x509.load_pem_x509_certificates((Path(folder) / CA).read_bytes())
    except (OSError, ValueError):  # they are being replaced
        return None
    issuers = [each for each in authorities if each.subject == own.issuer] or [own]
    return Validity(
        max(own.not_valid_before_utc, min(each.not_valid_before_utc for each in issuers)),
        min(own.not_valid_after_utc, max(each.not_valid_after_utc for each in issuers)),
    )


async def warn_before_end(folder: str) -> None:
    """Until cancelled: log once a day, from `WARN_DAYS` before, that the certificate in this folder ends; and once an hour that
    it is not valid yet."""
    while True:
        valid, now = certificate_validity(folder), datetime.datetime.now(datetime.UTC)
        wait_s = _CHECK_S
        if valid is not None and now < valid.begins:
            log.error(
                "the certificate in %s is valid from %s on: other services refuse it until then, if the clock of this host is right",
                folder,
                f"{valid.begins:%Y-%m-%d %H:%M} UTC",
            )
        elif valid is not None and valid.ends - now < _SOON:
            ends = valid.ends
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
