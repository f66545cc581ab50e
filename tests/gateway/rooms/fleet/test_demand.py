"""The traffic to expect: of late, with its growth, and as a day ago."""

from __future__ import annotations

import math

from pytest import approx  # noqa: PT013

from gateway.rooms.fleet.demand import DAY_MINUTES, Minute, finish_s, forecast, present, usual


def minutes(*requests: float) -> list[Minute]:
    return [Minute(each, 10.0 * each, 2.0 * each, 2.0 * each) for each in requests]


def test_even_traffic_stays_and_growth_goes_on_until_a_replica_is_up() -> None:
    assert forecast(minutes(*[60.0] * 30)) == approx((1.0, 10.0, 2.0))
    expected = forecast(minutes(*[60.0] * 10, *range(60, 120, 6)), ahead=5)
    assert expected.requests == approx((117.0 + 5 * 6) / 60.0)


def test_what_falls_is_kept_for_a_quarter_of_an_hour() -> None:
    before = [120.0] * 20
    assert forecast(minutes(*before, *[60.0] * 5)).requests == approx((120.0 * 10 + 60.0 * 5) / 15 / 60.0)
    assert forecast(minutes(*before, *[60.0] * 15)).requests == approx(1.0)


def test_what_came_a_day_ago_is_expected_as_much_as_the_last_hour_was_of_that_one() -> None:
    day = [60.0] * DAY_MINUTES
    day[4:12] = [600.0] * 8  # from five minutes from now on, a day ago
    traffic = [*[60.0] * 60, *day]
    assert forecast(minutes(*traffic)).requests == approx(10.0)
    half = [*traffic[:-60], *[30.0] * 60]
    assert forecast(minutes(*half)).requests == approx(5.0)


def test_what_a_request_met_and_took_is_weighted_by_requests() -> None:
    uneven = [*minutes(30.0, 90.0), Minute()]
    assert usual(uneven).requests == approx((30.0**2 + 90.0**2) / 120.0 / 60.0)
    timed = [Minute(2.0, finished=2.0, finish_s=1.0), Minute(1.0, finished=1.0, finish_s=2.0), Minute()]
    assert finish_s(timed) == approx(1.0)
    assert math.isnan(finish_s([Minute()]))


def test_what_others_sent_to_the_engines_counts() -> None:
    shared = [Minute(60.0, 600.0, 120.0, 360.0)] * 20
    assert present(shared) == approx((3.0, 30.0, 6.0))
    lost = [Minute(60.0, 600.0, 120.0, 0.0)] * 20  # engines that report nothing
    assert present(lost) == approx((1.0, 10.0, 2.0))
