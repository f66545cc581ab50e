import socket
from pathlib import Path

from backends.launch.ports import free_port, port_is_free


def test_a_free_port_is_free_and_below_the_ephemeral_ports() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(50):
        port = free_port()
        assert port < lowest
        assert port_is_free("127.0.0.1", port)


def test_a_port_bound_on_all_addresses_is_not_free() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        assert not port_is_free("127.0.0.1", taken.getsockname()[1])


def test_a_port_of_another_machine_counts_as_free() -> None:
    assert port_is_free("192.0.2.1", 8000)
