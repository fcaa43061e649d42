"""Where traces are sent."""

from __future__ import annotations

import pytest

from common.base.errors import ConfigError
from router.tracing.exporter import Traces


@pytest.mark.parametrize(
    "endpoint", ["localhost:4318", "collector", "http://", "http://collector:99999/v1/traces", "http://[::1"]
)
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    """Each batch of spans failed with a traceback in the log."""
    with pytest.raises(ConfigError, match="is not a URL such as"):
        Traces(endpoint)
