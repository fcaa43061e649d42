"""Which worker of pytest-xdist runs which tests: half of them begin with tests that wait, half with tests that compute.

Clusters wait for clocks, leases and process starts; beside them the cores are free for unit and property tests. A file's tests
stay together, because they share models and caches, except where a file of clusters shares nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from support.paths import TESTS
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

_WAITING = ("tests/fault/", "tests/integration/", "tests/browser/")


class WaitsBesideComputation(LoadScopeScheduling):
    """Units of work are taken in the order of collection, in which tests that wait come first."""

    def schedule(self) -> None:
        """Keep that order: pytest-xdist's own begins with the files of most tests, which leaves those that wait for the end."""
        self.config.option.loadscopereorder = False
        if self.collection is None:
            self._units = units(next(iter(self.registered_collections.values()), []))
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self._units[nodeid]

    def _assign_work_unit(self, node: WorkerController) -> None:
        if int(node.gateway.id.removeprefix("gw")) % 2:
            computing = next((unit for unit in self.workqueue if not unit.startswith(_WAITING)), None)
            if computing is not None:
                self.workqueue.move_to_end(computing, last=False)
        super()._assign_work_unit(node)


def units(nodeids: Iterable[str]) -> dict[str, str]:
    """The unit of each test: itself, or it and its neighbours of the same file, if tests of that file share something."""
    found: dict[str, str] = {}
    unit, before = "", ""
    for nodeid in nodeids:
        path = nodeid.partition("::")[0]
        if path != before or not _shares(path):
            unit, before = nodeid, path
        found[nodeid] = unit
    return found


@functools.cache
def _shares(path: str) -> bool:
    """Whether tests of a file share a cluster or a model, by its text: the process that schedules imports no tests."""
    return not path.startswith(_WAITING) or 'scope="module"' in (TESTS.parent / path).read_text()
