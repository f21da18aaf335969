"""Downloads, against a server on this machine that cuts, refuses and redirects."""

import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.server import Shelf
from usetta import web
from usetta.data import DataError
from usetta.data.download import download, require_https
from usetta.web import FetchError, fetch

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def stocked(shelf: Shelf) -> Shelf:
    shelf.files["set.tar"] = CONTENT
    return shelf


def test_a_file_arrives_whole_and_leaves_nothing_else(stocked: Shelf, tmp_path: Path, pauses: list[float]) -> None:
    download(f"{stocked.url}/set.tar", tmp_path / "deep" / "set.tar")
    assert (tmp_path / "deep" / "set.tar").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["set.tar"]
    assert stocked.requests == [("/set.tar", None, None)]
    assert pauses == []


def test_cut_connections_are_continued(stocked: Shelf, tmp_path: Path, pauses: list[float]) -> None:
    stocked.cuts = [1000, 0, 5000]
    download(f"{stocked.url}/set.tar", tmp_path / "set.tar")
    assert (tmp_path / "set.tar").read_bytes() == CONTENT
    assert [asked for _, asked, _ in stocked.requests] == [None, "bytes=1000-", "bytes=1000-", "bytes=6000-"]
    assert [condition for _, _, condition in stocked.requests] == [None, '"1"', '"1"', '"1"']
    assert pauses == [1, 2, 4]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.integers(0, 6000), max_size=7), ranges=st.booleans(), etag=st.sampled_from(['"1"', 'W/"1"', None])
)
def test_wherever_it_is_cut_the_file_is_whole(
    stocked: Shelf, tmp_path: Path, pauses: list[float], cuts: list[int], ranges: bool, etag: str | None
) -> None:
    stocked.cuts, stocked.ranges, stocked.etag = list(cuts), ranges, etag
    download(f"{stocked.url}/set.tar", tmp_path / "set.tar")
    assert (tmp_path / "set.tar").read_bytes() == CONTENT


def test_the_number_of_connections_is_bounded(stocked: Shelf, tmp_path: Path, pauses: list[float]) -> None:
    stocked.cuts = [100] * 20
    with pytest.raises(
        DataError, match=r"failed 8 times, most recently: .*after 800 of 10,240 bytes; rerun the same command to resume"
    ):
        download(f"{stocked.url}/set.tar", tmp_path / "set.tar")
    assert len(stocked.requests) == 8
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert not (tmp_path / "set.tar").exists()
    stocked.cuts.clear()
    download(f"{stocked.url}/set.tar", tmp_path / "set.tar")  # the same command again
    assert stocked.requests[-1] == ("/set.tar", "bytes=800-", '"1"')
    assert (tmp_path / "set.tar").read_bytes() == CONTENT


def test_a_server_without_ranges_starts_over(stocked: Shelf, tmp_path: Path, pauses: list[float]) -> None:
    stocked.ranges, stocked.cuts = False, [9000]
    download(f"{stocked.url}/set.tar", tmp_path / "set.tar")
    assert (tmp_path / "set.tar").read_bytes() == CONTENT


def test_another_file_is_not_glued_to_a_part(stocked: Shelf, tmp_path: Path, pauses: list[float]) -> None:
    stocked.cuts = [100] * 8
    with pytest.raises(DataError, match="failed 8 times"):
        download(f"{stocked.url}/set.tar", tmp_path / "set.tar")
    stocked.cuts, stocked.etag, stocked.files["set.tar"] = [], '"2"', CONTENT[::-1]
    download(f"{stocked.url}/set.tar", tmp_path / "set.tar")
    assert (tmp_path / "set.tar").read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("etag", ['W/"1"', None])
def test_what_does_not_promise_equal_bytes_is_no_condition(
    stocked: Shelf, tmp_path: Path, pauses: list[float], etag: str | None
) -> None:
    stocked.etag, stocked.cuts = etag, [100]
    download(f"{stocked.url}/set.tar", tmp_path / "set.tar")
    assert stocked.requests[-1] == ("/set.tar", "bytes=100-", None)


def test_a_part_that_is_whole_needs_no_more_bytes(stocked: Shelf, tmp_path: Path) -> None:
    (tmp_path / "set.tar.part").write_bytes(CONTENT)  # killed between the last byte and the renaming
    download(f"{stocked.url}/set.tar", tmp_path / "set.tar")
    assert (tmp_path / "set.tar").read_bytes() == CONTENT
    assert stocked.requests == [("/set.tar", f"bytes={len(CONTENT)}-", None)]


def test_a_part_that_is_too_long_is_thrown_away(stocked: Shelf, tmp_path: Path, pauses: list[float]) -> None:
    (tmp_path / "set.tar.part").write_bytes(CONTENT + b"more")
    download(f"{stocked.url}/set.tar", tmp_path / "set.tar")
    assert (tmp_path / "set.tar").read_bytes() == CONTENT
    assert stocked.requests[-1] == ("/set.tar", None, None)


def test_a_wrong_range_is_thrown_away(stocked: Shelf, tmp_path: Path, pauses: list[float]) -> None:
    stocked.shift = 1
    (tmp_path / "set.tar.part").write_bytes(CONTENT[:500])
    download(f"{stocked.url}/set.tar", tmp_path / "set.tar")
    assert (tmp_path / "set.tar").read_bytes() == CONTENT
    assert [asked for _, asked, _ in stocked.requests] == ["bytes=500-", None]


def test_a_file_of_unknown_length(stocked: Shelf, tmp_path: Path) -> None:
    stocked.lengths = False
    download(f"{stocked.url}/set.tar", tmp_path / "set.tar")
    assert (tmp_path / "set.tar").read_bytes() == CONTENT


def test_a_file_that_is_gone_is_reported_at_once(stocked: Shelf, tmp_path: Path, pauses: list[float]) -> None:
    with pytest.raises(
        DataError, match=r"/other\.tar cannot be downloaded: HTTP 404 Not Found; the file may have moved"
    ):
        download(f"{stocked.url}/other.tar", tmp_path / "other.tar")
    assert (len(stocked.requests), pauses, list(tmp_path.iterdir())) == (1, [], [])


def test_a_busy_server_is_asked_again(stocked: Shelf, tmp_path: Path, pauses: list[float]) -> None:
    stocked.refusals = [503, 429]
    download(f"{stocked.url}/set.tar", tmp_path / "set.tar")
    assert (tmp_path / "set.tar").read_bytes() == CONTENT
    assert pauses == [1, 2]


def test_a_machine_that_is_offline_is_told_at_once(tmp_path: Path, pauses: list[float]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(DataError, match="cannot connect to 127.0.0.1: .*refused; check the network connection"):
        download(f"http://127.0.0.1:{port}/set.tar", tmp_path / "set.tar")
    assert pauses == []


def test_a_silent_server_is_given_up(tmp_path: Path, pauses: list[float]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/set.tar"
        with pytest.raises(DataError, match="cannot connect to 127.0.0.1: timed out"):
            download(address, tmp_path / "set.tar", attempts=2, timeout=0.1)


def test_redirects_are_followed_with_the_range(stocked: Shelf, tmp_path: Path, pauses: list[float]) -> None:
    stocked.redirects["/latest"] = f"{stocked.url}/set.tar"
    stocked.cuts = [3000]
    download(f"{stocked.url}/latest", tmp_path / "set.tar")
    assert (tmp_path / "set.tar").read_bytes() == CONTENT
    assert [(path, asked) for path, asked, _ in stocked.requests] == [
        *(("/latest", None), ("/set.tar", None)),
        *(("/latest", "bytes=3000-"), ("/set.tar", "bytes=3000-")),
    ]


@pytest.mark.parametrize("elsewhere", ["http://example.org/set.tar", "ftp://example.org/set.tar"])
def test_a_redirect_to_an_unsafe_address_is_refused(stocked: Shelf, tmp_path: Path, elsewhere: str) -> None:
    stocked.redirects["/latest"] = elsewhere
    with pytest.raises(DataError, match=f"/latest redirects to {elsewhere}, which is not https"):
        download(f"{stocked.url}/latest", tmp_path / "set.tar")


@pytest.mark.parametrize("url", ["http://example.org/a", "file:///etc/passwd", "ftp://example.org/a", "/etc/passwd"])
def test_an_unsafe_address_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(DataError, match=f"{url} is not https; refused"):
        download(url, tmp_path / "a")


def test_the_network_does_not_lead_back_to_this_machine() -> None:
    require_https("https://cdn.example.org/a", "https://example.org/a")
    with pytest.raises(DataError, match="which is not https"):
        require_https("http://127.0.0.1/a", "https://example.org/a")


def test_a_file_is_fetched_within_its_limits(stocked: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    url, size = f"{stocked.url}/set.tar", len(CONTENT)
    stocked.redirects = {"/moved": "/set.tar", "/away": "ftp://127.0.0.1/set.tar"}
    assert fetch(url, size) == fetch(f"{stocked.url}/moved", size) == CONTENT
    for address, limit, reason in (
        (url, size - 1, "larger than the limit of 10,239 bytes"),
        (f"{stocked.url}/none", size, "HTTP 404"),
        (f"{stocked.url}/away", size, "redirected to ftp://127.0.0.1/set.tar, which is neither http nor https"),
        ("http://[", size, "."),
    ):
        with pytest.raises(FetchError, match=reason):
            fetch(address, limit)
    monkeypatch.setattr(web, "SECONDS", -1.0)
    with pytest.raises(FetchError, match="took longer than"):
        fetch(url, size)
