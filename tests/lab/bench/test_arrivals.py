from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from backends.validation import UsageError
from lab.bench.arrivals import Arrival, gamma_arrivals, read_trace, shorten


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_have_the_rate_and_variation_of_a_gamma_distribution(burstiness: float) -> None:
    times = np.array(gamma_arrivals(20.0, burstiness, np.random.default_rng(1), 20_000, None))
    intervals = np.diff(times)
    assert times[-1] == pytest.approx(20_000 / 20.0)
    assert np.all(intervals >= 0)
    assert intervals.std() / intervals.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_with_a_duration_the_number_of_arrivals_is_random() -> None:
    counts = [len(gamma_arrivals(10.0, 1.0, np.random.default_rng(seed), None, 30.0)) for seed in range(200)]
    assert np.mean(counts) == pytest.approx(300, rel=0.02)
    assert np.std(counts) == pytest.approx(300**0.5, rel=0.2)  # of a Poisson distribution
    assert max(gamma_arrivals(10.0, 0.1, np.random.default_rng(3), None, 30.0)) < 30.0


def test_count_and_duration_both_limit_the_arrivals() -> None:
    assert len(gamma_arrivals(100.0, 1.0, np.random.default_rng(0), 7, 30.0)) == 7
    assert len(gamma_arrivals(1.0, 1.0, np.random.default_rng(0), 1000, 5.0)) < 20


def trace_file(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_a_trace_with_seven_digits_and_any_order_of_columns_is_read(tmp_path: Path, name: str) -> None:
    text = "ContextTokens,TIMESTAMP,GeneratedTokens\n"
    text += "374,2023-11-16 18:15:46.6805900,44\n396,2023-11-16 18:15:50.9305901,9\n"
    assert read_trace(trace_file(tmp_path, text, name)) == [
        Arrival(0.0, 374, 44),
        Arrival(pytest.approx(4.25, abs=1e-5), 396, 9),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("stamps", [("12.5", "13"), ("2024-05-12 00:00:00.5+00:00", "2024-05-12T00:00:01Z")])
def test_times_may_be_seconds_or_have_a_zone(tmp_path: Path, stamps: tuple[str, str]) -> None:
    trace = read_trace(trace_file(tmp_path, HEAD + f"{stamps[1]},1,2\n{stamps[0]},3,4\n"))
    assert [(one.at_s, one.input_tokens) for one in trace] == [(0.0, 3), (0.5, 1)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n", "has no column TIMESTAMP"),
        (HEAD, "holds no requests"),
        (HEAD + "1,2,3\nyesterday,2,3\n", ":3: expected a time and two whole numbers"),
        (HEAD + "1,2\n", ":2: expected a time and two whole numbers"),
        (HEAD + "1,2.5,3\n", ":2: expected a time and two whole numbers"),
    ],
)
def test_an_invalid_trace_is_rejected_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=r"--trace: .*trace\.csv") as caught:
        read_trace(trace_file(tmp_path, text))
    assert says in str(caught.value)


def test_a_trace_is_stretched_to_a_rate_and_shortened() -> None:
    trace = [Arrival(float(second), second + 1, 1) for second in range(11)]
    assert [one.at_s for one in shorten(trace, 2.0, None, None)] == [pytest.approx(half / 2) for half in range(11)]
    assert len(shorten(trace, None, 4, None)) == 4
    assert [one.input_tokens for one in shorten(trace, 2.0, None, 1.4)] == [1, 2, 3]
