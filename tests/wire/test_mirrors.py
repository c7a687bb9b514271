"""What is a mirror's address and what is none, and which machines are near."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.errors import ConfigError
from edgefl.wire.mirrors import Mirror, is_near


@pytest.mark.parametrize(
    ("text", "found", "target"),
    [
        ("https://weights.example.org", Mirror("https", "weights.example.org", 443, ""), "/ab"),
        ("https://weights.example.org/", Mirror("https", "weights.example.org", 443, ""), "/ab"),
        ("http://10.0.0.7:8480/a/b-1/", Mirror("http", "10.0.0.7", 8480, "/a/b-1"), "/a/b-1/ab"),
        ("http://[fd00::1]:80", Mirror("http", "fd00::1", 80, ""), "/ab"),
        ("HTTPS://Gateway.LAN:8443/x%20y", Mirror("https", "gateway.lan", 8443, "/x%20y"), "/x%20y/ab"),
    ],
)
def test_addresses(text: str, found: Mirror, target: str) -> None:
    assert Mirror.parse(text) == found == Mirror.parse(str(found))
    assert found.target("ab") == target


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "weights.example.org",
            "ftp://x",
            "file:///etc/passwd",
            "https://",
            "https:///x",
            "http://x:0",
            "http://x:99999",
        ),
        *(
            "https://me:secret@x",
            "https://me@x",
            "https://h b",
            "https://h\\b",
            "https://x/?a=b",
            "https://x/#a",
            "https://x/a b",
            "https://x//a",
            "https://[x",
        ),
        *(
            "https://x/a\r\nHost: y",
            "https://x\n",
            "https://b\u00fccher.example",
            "https://x/" + "a" * 500,
            "https://x/\u00e9",
        ),
    ],
)
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no mirror"):
        Mirror.parse(text)


@given(st.text(max_size=60))
def test_whatever_is_taken_can_be_asked(text: str) -> None:
    try:
        found = Mirror.parse(f"https://h{text}")
    except ConfigError:
        return
    assert not set(found.target("ab") + found.netloc) & set(" \r\n\t#?@\\")


@pytest.mark.parametrize(
    ("address", "near"),
    [
        *(
            ("127.0.0.1", True),
            ("10.1.2.3", True),
            ("192.168.0.9", True),
            ("172.16.5.5", True),
            ("::1", True),
        ),
        *(
            ("fd00::7", True),
            ("fe80::1%eth0", False),
            ("169.254.169.254", False),
            ("8.8.8.8", False),
            ("0.0.0.0", False),
        ),
        *(
            ("2a00::1", False),
            ("::ffff:10.0.0.1", True),
            ("::ffff:8.8.8.8", False),
            ("172.32.0.1", False),
            ("nonsense", False),
        ),
    ],
)
def test_near_is_this_machine_and_private_networks(address: str, near: bool) -> None:
    assert is_near(address) == near
