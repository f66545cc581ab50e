"""The split of requests into parts."""

from policies.split import part_of

IDS = [f"q{number}" for number in range(4000)]


def test_parts_are_equally_large_and_other_salts_make_independent_ones() -> None:
    """Five standard deviations."""
    for parts in (2, 5):
        for part in range(parts):
            assert abs(sum(part_of(name, parts) == part for name in IDS) - 4000 / parts) < 160
    assert abs(sum(part_of(name) == part_of(name, salt="again") for name in IDS) - 2000) < 160


def test_a_part_depends_on_the_id_alone() -> None:
    """A split by position moved requests to the other part when a row before them was left out."""
    whole = {name: part_of(name) for name in IDS}
    assert {name: part_of(name) for name in reversed(IDS[1:])} == {name: whole[name] for name in IDS[1:]}
    assert [part_of("a-request", 7, salt) for salt in ("", 1, "1")] == [4, 5, 5]  # what was split stays split
