"""Addresses of the loopback interface."""

import socket

import pytest

from realhf.launch.network import address_for, address_towards, host_of, interface_of


def test_loopback() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") == ""  # reserved for documentation


def test_loopback_is_used_if_all_hosts_are_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert address_for(["127.0.0.1", "no.such.host.invalid"]) == "127.0.0.1"


@pytest.mark.parametrize("endpoint, host", [("tcp://10.0.0.1:55", "10.0.0.1"), ("ipc:///tmp/x/master", "")])
def test_host_of_an_endpoint(endpoint: str, host: str) -> None:
    assert host_of(endpoint) == host
