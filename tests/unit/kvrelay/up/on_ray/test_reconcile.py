from __future__ import annotations

from dataclasses import replace

from kvrelay.up.on_ray.actor import Report
from kvrelay.up.on_ray.reconcile import reconcile
from kvrelay.up.on_ray.services import RayService


def service(name: str, *words: str) -> RayService:
    return RayService(name, name.partition("-")[0], words)


def report(of: RayService, host: str = "10.0.0.1") -> Report:
    return Report(of.digest, host, 29500, 1, 1, None, True, [], 0)


WANTED = [service("router"), service("prefill-0"), service("decode-0")]
REPORTS = {each.name: report(each) for each in WANTED}


def test_nothing_to_do_where_all_is_there() -> None:
    actions = reconcile(WANTED, [each.name for each in WANTED], REPORTS, ())
    assert not actions.start
    assert not actions.retire
    assert not actions.join


def test_missing_services_start_unless_that_has_begun() -> None:
    assert [each.name for each in reconcile(WANTED, ["router"], {}, ["decode-0"]).start] == ["prefill-0"]


def test_an_actor_that_does_not_answer_is_left_to_ray() -> None:
    actions = reconcile(WANTED, [each.name for each in WANTED], {}, ())
    assert not actions.start
    assert not actions.retire


def test_surplus_services_end_highest_number_first() -> None:
    names = [*REPORTS, "decode-1", "decode-10", "decode-2", "decode-2.1"]
    assert reconcile(WANTED, names, REPORTS, ["decode-1"]).retire == ["decode-10", "decode-2"]


def test_a_service_with_other_options_is_replaced() -> None:
    reports = {**REPORTS, "prefill-0": replace(REPORTS["prefill-0"], digest="other")}
    assert reconcile(WANTED, list(REPORTS), reports, ()).retire == ["prefill-0"]
    # `start` begins when its actors are gone.
    assert not reconcile(WANTED, list(REPORTS), reports, ["prefill-0"]).start


def test_other_hosts_of_a_node_learn_where_the_first_is() -> None:
    names = [*REPORTS, "decode-0.1", "decode-0.2"]
    joins = reconcile(WANTED, names, REPORTS, ()).join
    assert [(name, number, leader.host) for name, number, leader in joins] == [
        ("decode-0", 1, "10.0.0.1"),
        ("decode-0", 2, "10.0.0.1"),
    ]
